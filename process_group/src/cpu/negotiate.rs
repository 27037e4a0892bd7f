//! The members negotiate, before the first call of a group, whether links within hosts go through shared memory.

use std::io;
use std::time::Instant;

use bytemuck::Zeroable;

use super::CpuGroup;
use super::shared::{ByteQueues, Doorbell, ExportedSegment, SegmentHandle};
use crate::backend::Backend;
use crate::backend::call::Call;
use crate::device::buffer::{View, ViewMut};
use crate::error::Result;
use crate::link::mesh::Peer;
use crate::paths::host::{Links, table};
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation, ReduceOp};

/// Reasons for which links within a host stay on sockets. The ranks of the host exchange the index and take the smallest.
const REASONS: [&str; 2] = [
    "process_group.tcp.shared_memory is false",
    "a rank could not create or open shared memory (another user, separate containers, or a security policy); its debug log has the error",
];
/// The reason for which all links of a group on several hosts count as sockets.
const NOT_EVERYWHERE: &str = "the ranks are on several hosts, and those of one host do not share memory: process_group.tcp.shared_memory \
                              is false there, or a rank's debug log has the error";
const REFUSED: u8 = 1;
/// No reason: links go through shared memory.
const SHARED: u8 = REASONS.len() as u8;

/// This rank's segment, kept until the other ranks of its host have opened it, and the rings to them.
type Mapped = (ExportedSegment, Vec<(Peer, ByteQueues)>);

impl CpuGroup {
    /// Decides whether links within hosts can go through shared memory. All members call this, once, before any other call.
    pub(crate) fn negotiate(&mut self, deadline: Instant) -> Result<()> {
        if self.links.world_size() == 1 {
            return Ok(());
        }
        // No rank has a group yet that could tell the others.
        self.agree(deadline).inspect_err(|error| self.abort(error))
    }

    fn agree(&mut self, deadline: Instant) -> Result<()> {
        let (host, _) = self.topology.hosts.place(self.rank.index());
        let (standing, mapped) = self.share(deadline)?;
        // One byte for each host.
        let mut agreed = vec![SHARED; self.topology.hosts.count()];
        agreed[host] = standing;
        let call = first_call(Operation::AllReduce(ReduceOp::Min), deadline, None, Some(&mut agreed));
        self.submit(call)?;
        let why_not = REASONS.get(usize::from(agreed[host])).copied();
        if let (Some((offered, rings)), None) = (mapped, why_not) {
            self.go_through(rings, offered.close());
        }
        let is_shared_everywhere = agreed.iter().all(|standing| *standing == SHARED);
        let links = match why_not {
            _ if agreed.len() > 1 && !is_shared_everywhere => Links::Sockets(NOT_EVERYWHERE),
            _ if self.topology.hosts.why_one_level().is_none() => Links::SharedWithinHosts,
            _ if agreed.len() > 1 => Links::Sockets("each rank has a host of its own"),
            Some(why) => Links::Sockets(why),
            None => Links::SharedMemory,
        };
        let Self { topology, settings, .. } = &self;
        self.paths = table(topology, links, settings.demand, &settings.tuned);
        self.programs.clear();
        Ok(())
    }

    /// Maps the segments of this host's ranks if possible. Returns [`SHARED`], or the index of the reason why not.
    fn share(&mut self, deadline: Instant) -> Result<(u8, Option<Mapped>)> {
        let hosts = &self.topology.hosts;
        let (host, place) = hosts.place(self.rank.index());
        let (ranks, is_one_host) = (hosts.ranks()[host].clone(), hosts.count() == 1);
        if ranks.len() == 1 {
            return Ok((SHARED, None));
        }
        let created =
            self.settings.shared_memory.then(|| ExportedSegment::new(place, ranks.len(), !is_one_host));
        let (mut standing, offered) = match created {
            None => (0, None),
            Some(Ok(offered)) => (SHARED, Some(offered)),
            Some(Err(error)) => (refused("this rank", &error), None),
        };
        let mine = offered.as_ref().map_or_else(SegmentHandle::zeroed, ExportedSegment::handle);
        let peers: Vec<(usize, Peer)> = ranks
            .iter()
            .enumerate()
            .filter_map(|(place, rank)| Some((place, Peer::new(*rank, self.rank.index())?)))
            .collect();
        for (_, peer) in &peers {
            let to = self.links.rank(*peer);
            self.submit(first_call(Operation::Send { to }, deadline, Some(bytemuck::bytes_of(&mine)), None))?;
        }
        let mut rings = Vec::new();
        for (place, peer) in peers {
            let (from, mut theirs) = (self.links.rank(peer), SegmentHandle::zeroed());
            let output = Some(bytemuck::bytes_of_mut(&mut theirs));
            self.submit(first_call(Operation::Recv { from }, deadline, None, output))?;
            let Some(offered) = offered.as_ref().filter(|_| theirs.exists()) else { continue };
            match offered.open(&theirs, place) {
                Ok(opened) => rings.push((peer, opened)),
                Err(error) => standing = refused(&format!("rank {from}"), &error),
            }
        }
        match offered {
            Some(offered) if rings.len() == ranks.len() - 1 => Ok((SHARED, Some((offered, rings)))),
            // A peer without a segment states the reason.
            _ => Ok((standing.min(REFUSED), None)),
        }
    }

    pub(super) fn go_through(&mut self, rings: Vec<(Peer, ByteQueues)>, doorbell: Doorbell) {
        for (peer, rings) in rings {
            self.links[peer].share(rings);
        }
        self.doorbell = Some(doorbell);
    }
}

/// Returns a call on bytes, before the first call of the group.
fn first_call<'a>(
    operation: Operation,
    deadline: Instant,
    input: Option<&'a [u8]>,
    output: Option<&'a mut [u8]>,
) -> Call<'a> {
    let count = input.map(<[u8]>::len).or(output.as_ref().map(|output| output.len())).unwrap_or_default();
    let (sequence, add_norm, interrupt) = (0, None, None);
    Call {
        fingerprint: CallFingerprint::new(operation, DType::U8, count),
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
