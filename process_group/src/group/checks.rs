//! Checks of a call before the rank sends anything, and the number of the call.

use super::ProcessGroup;
use super::inner::Buffers;
use crate::device::buffer::{Memory, View, ViewMut};
use crate::error::{Error, Result};
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Composed, Operation};
use crate::types::rank::Rank;

impl ProcessGroup {
    /// Returns the number of the next collective.
    pub(super) fn next(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives
    }

    pub(super) fn in_place(&mut self, operation: Operation, buffer: ViewMut<'_>) -> Result<()> {
        self.check_memory(operation, buffer.memory())?;
        let fingerprint = self.fingerprint(operation, buffer.dtype(), buffer.count())?;
        let sequence = self.next();
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::InPlace(Some(buffer)))
    }

    /// Returns the fingerprint of a call whose whole array (of all ranks' chunks, where chunked) has `total` elements.
    pub(super) fn fingerprint(
        &self,
        operation: Operation,
        dtype: DType,
        total: usize,
    ) -> Result<CallFingerprint> {
        self.check_ranks(operation)?;
        let chunks = if operation.is_chunked() { self.world_size() } else { 1 };
        let count = self.chunk(operation, "buffer", total, chunks)?;
        Ok(CallFingerprint { composed: self.composed, ..CallFingerprint::new(operation, dtype, count) })
    }

    pub(super) fn out_of_place<'a>(
        &mut self,
        operation: Operation,
        input: Option<View<'a>>,
        output: Option<ViewMut<'a>>,
    ) -> Result<()> {
        for memory in [input.as_ref().map(View::memory), output.as_ref().map(ViewMut::memory)] {
            memory.map_or(Ok(()), |memory| self.check_memory(operation, memory))?;
        }
        let read = input.as_ref().map(|v| (v.dtype(), v.count()));
        let written = output.as_ref().map(|v| (v.dtype(), v.count()));
        let fingerprint = self.fingerprint_of_two(operation, read, written)?;
        let sequence = self.next();
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::OutOfPlace(input, output))
    }

    /// Returns the fingerprint of a call with this type and these lengths of input and output, where it has them.
    fn fingerprint_of_two(
        &self,
        operation: Operation,
        input: Option<(DType, usize)>,
        output: Option<(DType, usize)>,
    ) -> Result<CallFingerprint> {
        let (n, me) = (self.world_size(), self.info.rank);
        // The number of chunks of input and output, and the ranks that must pass them.
        let (inputs, outputs) = match operation {
            Operation::AllGather | Operation::Gather { .. } => (1, n),
            Operation::ReduceScatter(_) | Operation::Scatter { .. } => (n, 1),
            Operation::AllToAll => (n, n),
            _ => (1, 1),
        };
        let only_root_reads = matches!(operation, Operation::Broadcast { .. } | Operation::Scatter { .. });
        let only_root_writes = matches!(operation, Operation::Reduce { .. } | Operation::Gather { .. });
        let am_root = operation.root() == Some(me);
        for (what, there, wanted) in [
            ("input", input.is_some(), !only_root_reads || am_root),
            ("output", output.is_some(), !only_root_writes || am_root),
        ] {
            if there != wanted {
                let rule = if wanted { "needs" } else { "takes no" };
                return Err(Error::invalid(format!(
                    "{operation} on rank {me} {rule} {what}: only the root has one"
                )));
            }
        }
        let shape = |view: Option<(DType, usize)>, chunks: usize, what: &str| {
            let chunk = |(dtype, total)| Ok((dtype, self.chunk(operation, what, total, chunks)?));
            view.map(chunk).transpose() as Result<Option<(DType, usize)>>
        };
        let read = shape(input, inputs, "input")?;
        let written = shape(output, outputs, "output")?;
        if let (Some(read), Some(written)) = (read, written)
            && read != written
        {
            return Err(Error::invalid(format!(
                "{operation} needs the same type and chunk length in input and output; \
                 the input has {} {} a chunk, the output {} {}",
                read.1, read.0, written.1, written.0
            )));
        }
        let Some((dtype, count)) = read.or(written) else {
            return Err(Error::invalid(format!("{operation} needs a buffer")));
        };
        self.check_ranks(operation)?;
        Ok(CallFingerprint { composed: self.composed, ..CallFingerprint::new(operation, dtype, count) })
    }

    /// Makes the collectives of a composed call. The ranks compare its parameters with each of them.
    pub(super) fn compose<R>(
        &mut self,
        call: Composed,
        parts: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let outer = std::mem::replace(&mut self.composed, call);
        let outcome = parts(self);
        self.composed = outer;
        outcome
    }

    /// Returns the fingerprint of a message in `view`.
    pub(super) fn message(&self, operation: Operation, view: View<'_>) -> Result<CallFingerprint> {
        self.check_memory(operation, view.memory())?;
        if let Some(peer) = operation.peer() {
            self.check_rank(operation, peer)?;
            if peer == self.info.rank {
                return Err(Error::invalid(format!(
                    "{operation}: a rank cannot exchange messages with itself"
                )));
            }
        }
        Ok(CallFingerprint::new(operation, view.dtype(), view.count()))
    }

    /// Returns the number of the next message in this direction between this rank and `peer`.
    pub(super) fn next_message(&mut self, operation: Operation, peer: Rank) -> u64 {
        let counters =
            if matches!(operation, Operation::Send { .. }) { &mut self.sent } else { &mut self.received };
        let sequence = counters.entry(peer).or_default();
        *sequence += 1;
        *sequence
    }

    /// Returns the number of elements of one chunk of an array of `total` elements that consists of `chunks` of them: one, or one
    /// per rank.
    fn chunk(&self, operation: Operation, what: &str, total: usize, chunks: usize) -> Result<usize> {
        if total.is_multiple_of(chunks) {
            return Ok(total / chunks);
        }
        Err(Error::invalid(format!(
            "the {what} of {operation} holds one chunk for each of the {chunks} ranks of group `{}`; \
             {total} elements do not divide by {chunks}",
            self.info.name
        )))
    }

    pub(super) fn check_memory(&self, operation: Operation, memory: Memory) -> Result<()> {
        if memory == self.memory {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{operation}: the buffer is in {memory}, and the backend `{}` of group `{}` works on {}; copy it there, or \
             choose another process_group.backend",
            self.kind, self.info.name, self.memory
        )))
    }

    /// Checks that the root or the peer is in the group.
    pub(super) fn check_ranks(&self, operation: Operation) -> Result<()> {
        operation.root().or(operation.peer()).map_or(Ok(()), |rank| self.check_rank(operation, rank))
    }

    pub(super) fn check_rank(&self, operation: Operation, rank: Rank) -> Result<()> {
        if rank.index() < self.world_size() {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{operation}: rank {rank} is not in group `{}`, whose ranks are 0 to {}",
            self.info.name,
            self.world_size() - 1
        )))
    }
}
