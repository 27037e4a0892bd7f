//! Before a group's first call: what the members can all do with each other's memory, which all must know alike.

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

/// What keeps links on sockets, as its number on the wire. The least of all members' is the group's.
const REASONS: [&str; 3] = [
    "process_group.tcp.shared_memory is false",
    "process_group.tcp.algorithm demands an algorithm over sockets",
    "a rank could not open another's memory in /proc (another user, separate containers, or a security policy); its debug log has the error",
];
const DEMANDED: u8 = 1;
const REFUSED: u8 = 2;
/// Nothing does.
const SHARED: u8 = REASONS.len() as u8;

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
        let (standing, shared) = if is_one_host { self.share(deadline)? } else { (REFUSED, None) };
        let mut agreed = [u8::from(self.readable.is_some()), standing];
        let call = first_call(Operation::AllReduce(ReduceOp::Min), deadline, None, Some(&mut agreed));
        self.submit(call)?;
        let [readable, standing] = agreed;
        self.cross_memory = self.readable.take().filter(|_| readable == 1).map(CrossMemory::new);
        let links = match (shared, REASONS.get(usize::from(standing))) {
            (Some(shared), None) => {
                self.go_through(shared);
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

    /// Tries to map the segments of all members, with what this rank can say of it.
    fn share(&mut self, deadline: Instant) -> Result<(u8, Option<Shared>)> {
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
        // Once a peer has answered this, it has written its proof, or never will.
        self.exchange(&[0], deadline)?;
        let Some(offered) = offered else { return Ok((standing, None)) };
        let is_proved = |(peer, bytes)| {
            Introduction::decode(bytes).is_some_and(|it| offered.is_proved(theirs.rank(peer).index(), &it))
        };
        let is_proved = theirs.pairs().all(is_proved);
        match Peers::complete(self.rank.index(), segments) {
            Ok(segments) if is_proved => Ok((SHARED, Some(offered.share(segments)))),
            // A peer that has none says why.
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
