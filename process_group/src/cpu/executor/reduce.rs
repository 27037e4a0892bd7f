//! Reduces received elements with local ones.

use super::{Run, Spaces};
use crate::cpu::SEGMENT;
use crate::cpu::compiled::{Operand, Reduction};
use crate::cpu::link::Moved;
use crate::cpu::reduce::{self, Source};
use crate::error::Result;
use crate::link::mesh::Peer;
use crate::schedule::program::Space;
use crate::types::operation::ReduceOp;

impl Run<'_> {
    /// Reduces as many elements as every operand has and hazards allow. First reads more from `from` if elements are missing.
    pub(super) fn reduce(&mut self, from: Peer, reduction: &Reduction) -> Result<bool> {
        let Reduction { node, ref peers, .. } = *reduction;
        let (length, done) = (self.length(node), self.progress.done[node]);
        let link = &mut self.links[from];
        let read = match link.read_ahead((length - done).min(SEGMENT)) {
            Moved::Bytes(bytes) => bytes > 0,
            Moved::Closed if link.buffered().len() < length - done => return Err(self.lost(from)),
            Moved::WouldBlock | Moved::Closed => false,
        };
        if !peers.iter().all(|peer| self.is_open_at(*peer, node)) {
            return Ok(read);
        }
        let size = self.size();
        let mut ready = (self.allowed(node) - done).min(SEGMENT);
        for &peer in peers {
            ready = ready.min(self.links[peer].buffered().len());
        }
        ready -= ready % size;
        if ready > 0 {
            self.reduce_ready(reduction, done, ready);
            self.progress.done[node] += ready;
            for &peer in peers {
                self.links[peer].consume(ready);
            }
        }
        if self.progress.done[node] == length {
            for &peer in peers {
                self.close_message(peer);
            }
            self.finish();
            return Ok(true);
        }
        Ok(read || ready > 0)
    }

    /// Returns true if the peer's open message is an operand of this node.
    fn is_open_at(&self, peer: Peer, node: usize) -> bool {
        let progress = self.progress.peers[peer];
        let next = self.compiled.receives[peer].get(progress.received);
        progress.open && next.is_some_and(|receive| receive.node == node)
    }

    fn reduce_ready(&mut self, reduction: &Reduction, done: usize, ready: usize) {
        let size = self.size();
        let Reduction { into, ref operands, last, .. } = *reduction;
        let op = self.fingerprint.operation.reduce_op().unwrap_or(ReduceOp::Max);
        let divisor = (last && op == ReduceOp::Avg).then_some(self.links.world_size());
        let Spaces { input, output, scratch } = &mut self.spaces;
        let own_space = operands.iter().find_map(|operand| match operand {
            Operand::Own(region) => Some(region.space),
            Operand::Peer(_) => None,
        });
        let (target, own): (&mut [u8], Option<&[u8]>) = match (into.space, own_space) {
            (Space::Scratch, Some(Space::Output)) => (scratch, Some(&**output)),
            (Space::Scratch, Some(Space::Input)) => (scratch, *input),
            (_, Some(Space::Input)) => (output, *input),
            (Space::Scratch, _) => (scratch, None),
            _ => (output, None),
        };
        let sources: Vec<Source<'_>> = operands
            .iter()
            .map(|operand| match (*operand, own) {
                (Operand::Peer(peer), _) => Source::Bytes(&self.links[peer].buffered()[..ready]),
                (Operand::Own(region), Some(own)) => {
                    Source::Bytes(&own[region.start * size + done..region.start * size + done + ready])
                }
                (Operand::Own(_), None) => Source::Destination,
            })
            .collect();
        let at = into.start * size + done;
        reduce::reduce(self.fingerprint.dtype, op, &mut target[at..at + ready], &sources, divisor);
    }
}
