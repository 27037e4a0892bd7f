//! Reducing what has come with what is there.

use super::{Run, Spaces};
use crate::backend::tcp::compiled::peer;
use crate::backend::tcp::link::Moved;
use crate::error::Result;
use crate::operation::ReduceOp;
use crate::reduce::{self, Source as Operand};
use crate::schedule::program::{Node, Region, Source, Space};

impl Run<'_> {
    /// Folds as many elements as every operand has and hazards allow; reads more from `peer` first if it lacks.
    pub(super) fn fold(&mut self, from: usize, node: usize) -> Result<bool> {
        let length = self.length(node);
        let done = self.progress.done[node];
        let mut read = false;
        let link = self.links[from].as_mut().expect("only links are pulled");
        if link.buffered().len() < (length - done).min(self.context.segment) {
            match link.fill() {
                Moved::Bytes(bytes) => read = bytes > 0,
                Moved::Closed if link.buffered().len() < length - done => return Err(self.lost(from)),
                Moved::WouldBlock | Moved::Closed => {}
            }
        }
        let size = self.size();
        let (compiled, allowed) = (self.compiled, self.allowed(node));
        let Node::Fold { into, sources, last } = &compiled.nodes[node] else { unreachable!() };
        let mut ready = allowed - done;
        for other in sources.iter().filter_map(peer) {
            let at_node = compiled.receives[other].get(self.progress.received[other]) == Some(&node);
            if !at_node || !self.progress.open[other] {
                return Ok(read);
            }
            ready = ready.min(self.links[other].as_ref().expect("sources are links").buffered().len());
        }
        ready -= ready % size;
        if ready > 0 {
            self.fold_ready(*into, sources, *last, done, ready);
            self.progress.done[node] += ready;
            for other in sources.iter().filter_map(peer) {
                self.links[other].as_mut().expect("sources are links").consume(ready);
            }
        }
        if self.progress.done[node] == length {
            for other in sources.iter().filter_map(peer) {
                self.close_message(other);
            }
            self.finish();
            return Ok(true);
        }
        Ok(read || ready > 0)
    }

    pub(super) fn fold_ready(
        &mut self,
        into: Region,
        sources: &[Source],
        last: bool,
        done: usize,
        ready: usize,
    ) {
        let size = self.size();
        let op = self.signature.operation.reduce_op().unwrap_or(ReduceOp::Max);
        let divisor = (last && op == ReduceOp::Avg).then_some(self.links.len());
        let by_reference = self.by_reference;
        let Spaces { input, output, scratch } = &mut self.spaces;
        let own_space = sources.iter().find_map(|s| match s {
            Source::Own(region) => Some(*region),
            Source::Peer(_) => None,
        });
        let (target, own): (&mut [u8], Option<&[u8]>) = match (into.space, own_space.map(|r| r.space)) {
            (Space::Scratch, Some(Space::Output)) => (scratch, Some(&**output)),
            (Space::Scratch, Some(Space::Input)) => (scratch, *input),
            (_, Some(Space::Input)) => (output, *input),
            (Space::Scratch, _) => (scratch, None),
            _ => (output, None),
        };
        let operands: Vec<Operand<'_>> = sources
            .iter()
            .map(|source| match (source, own) {
                (Source::Peer(rank), _) => {
                    let link = self.links[*rank].as_ref().expect("sources are links");
                    let bytes = if by_reference { link.staged() } else { link.buffered() };
                    Operand::Bytes(&bytes[..ready])
                }
                (Source::Own(region), Some(own)) => {
                    Operand::Bytes(&own[region.start * size + done..region.start * size + done + ready])
                }
                (Source::Own(_), None) => Operand::Destination,
            })
            .collect();
        let at = into.start * size + done;
        reduce::fold(self.signature.dtype, op, &mut target[at..at + ready], &operands, divisor);
    }
}
