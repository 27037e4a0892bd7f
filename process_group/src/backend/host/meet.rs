//! Before a group's first call, the members agree on how they use each other's memory.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::Host;
use super::shared::{INTRODUCTION, Introduction, Offered, Segment, Shared};
use super::transport::CrossMemory;
use crate::backend::Backend;
use crate::buffer::{View, ViewMut};
use crate::call::Call;
use crate::dtype::DType;
use crate::error::Result;
use crate::mesh::{Peer, Peers};
use crate::operation::{CallFingerprint, Operation, ReduceOp};
use crate::paths::host::{Links, table};

/// Why links stay on sockets. Ranks exchange the index and take the smallest.
const REASONS: [&str; 3] = [
    "process_group.tcp.shared_memory is false",
    "process_group.tcp.algorithm demands an algorithm over sockets",
    "a rank could not create or open shared memory (another user, separate containers, or a security policy); its debug log has the error",
];
const DEMANDED: u8 = 1;
const REFUSED: u8 = 2;
/// Nothing does.
const SHARED: u8 = REASONS.len() as u8;

/// This rank's segment, to be kept until all peers have opened it, and theirs.
type Mapped = (Offered, Peers<Arc<Segment>>);

impl Host {
    /// Finds out whether links can go through shared memory, and whether every rank can read every other's memory. All
    /// members call this, once, before anything else.
    pub(crate) fn meet(&mut self, deadline: Instant) -> Result<()> {
        if self.links.world_size() == 1 {
            return Ok(());
        }
        // Nobody has a group yet that could tell the others.
        self.agree(deadline).inspect_err(|error| self.abort(error))
    }

    fn agree(&mut self, deadline: Instant) -> Result<()> {
        let is_one_host = self.topology.hosts.count() == 1;
        let (standing, mapped) = if is_one_host { self.share(deadline)? } else { (REFUSED, None) };
        let mut agreed = [u8::from(self.readable.is_some()), standing];
        let call = first_call(Operation::AllReduce(ReduceOp::Min), deadline, None, Some(&mut agreed));
        self.submit(call)?;
        let [readable, standing] = agreed;
        self.cross_memory = self.readable.take().filter(|_| readable == 1).map(CrossMemory::new);
        let links = match (mapped, REASONS.get(usize::from(standing))) {
            (Some((offered, segments)), None) => {
                self.go_through(offered.share(segments));
                Links::SharedMemory
            }
            (_, why) if is_one_host => Links::Sockets(why.copied().unwrap_or(REASONS[usize::from(REFUSED)])),
            _ => Links::Sockets("the ranks are on several hosts"),
        };
        let Self { topology, settings, .. } = &self;
        self.paths = table(topology, links, self.cross_memory.is_some(), settings.demand, &settings.tuned);
        self.choices.clear();
        Ok(())
    }

    /// Maps the segments of all members if it can. Returns [`SHARED`], or the index of what keeps it from doing so.
    fn share(&mut self, deadline: Instant) -> Result<(u8, Option<Mapped>)> {
        let (mut standing, offered) = match (self.settings.shared_memory, self.settings.demand) {
            (false, _) => (0, None),
            (true, Some(_)) => (DEMANDED, None),
            (true, None) => match Offered::new(self.rank.index(), self.links.world_size()) {
                Ok(offered) => (SHARED, Some(offered)),
                Err(error) => (refused("this rank", &error), None),
            },
        };
        let mine = offered.as_ref().map_or([0; INTRODUCTION], |it| it.introduction().encode());
        let theirs = self.exchange(&mine, deadline)?;
        let mut segments: Vec<Option<Arc<Segment>>> = vec![None; self.links.world_size()];
        for (peer, bytes) in theirs.pairs() {
            let rank = theirs.rank(peer);
            let Some((offered, it)) = offered.as_ref().zip(Introduction::decode(bytes)) else { continue };
            match offered.open(&it) {
                Ok(segment) => segments[rank.index()] = Some(segment),
                Err(error) => standing = refused(&format!("rank {rank}"), &error),
            }
        }
        match (offered, Peers::complete(self.rank.index(), segments)) {
            (Some(offered), Ok(segments)) => Ok((SHARED, Some((offered, segments)))),
            // A peer without a segment says why.
            _ => Ok((standing.min(REFUSED), None)),
        }
    }

    /// Tells every peer something, and hears the same from each.
    fn exchange<const N: usize>(&mut self, mine: &[u8; N], deadline: Instant) -> Result<Peers<[u8; N]>> {
        let peers: Vec<Peer> = self.links.ids().collect();
        for &peer in &peers {
            let to = self.links.rank(peer);
            let call = first_call(Operation::Send { to }, deadline, Some(mine), None);
            self.submit(call)?;
        }
        let mut theirs = Peers::from_fn(self.rank.index(), self.links.world_size(), |_| [0; N]);
        for peer in peers {
            let from = self.links.rank(peer);
            let call = first_call(Operation::Recv { from }, deadline, None, Some(&mut theirs[peer]));
            self.submit(call)?;
        }
        Ok(theirs)
    }

    pub(super) fn go_through(&mut self, Shared { rings, bell }: Shared) {
        for (peer, rings) in self.links.ids().zip(rings.into_items()) {
            self.links[peer].share(rings);
        }
        self.bell = Some(bell);
    }
}

/// A call of bytes before the group has made one.
fn first_call<'a>(
    operation: Operation,
    deadline: Instant,
    input: Option<&'a [u8]>,
    output: Option<&'a mut [u8]>,
) -> Call<'a> {
    let count = input.map(<[u8]>::len).or(output.as_ref().map(|output| output.len())).unwrap_or_default();
    let (sequence, add_norm, interrupt) = (0, None, None);
    Call {
        fingerprint: CallFingerprint { operation, dtype: DType::U8, count },
        sequence,
        deadline,
        in_place: input.is_none(),
        input: input.map(View::of),
        output: output.map(ViewMut::of),
        add_norm,
        interrupt,
    }
}

fn refused(whose: &str, error: &io::Error) -> u8 {
    tracing::debug!(%error, "the memory of {whose} cannot be shared");
    REFUSED
}
