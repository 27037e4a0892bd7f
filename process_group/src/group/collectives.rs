//! The calls of a group that return when they are done: collectives in place and out of place, messages, barrier.

use std::time::Instant;

use super::ProcessGroup;
use super::inner::Buffers;
use crate::device::buffer::{Buffer, BufferMut, Memory};
use crate::error::Result;
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation, ReduceOp};
use crate::types::rank::Rank;

impl ProcessGroup {
    // ---- collectives, in place -------------------------------------------------------------------------------

    /// Reduces everybody's `buffer` (`[count]`) into all of them.
    pub fn all_reduce(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp) -> Result<()> {
        self.in_place(Operation::AllReduce(op), buffer.view_mut())
    }

    /// Copies the root's `buffer` (`[count]`) to everybody's.
    pub fn broadcast(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Broadcast { root }, buffer.view_mut())
    }

    /// Reduces everybody's `buffer` (`[count]`) into the root's. The others' stay as they are.
    pub fn reduce(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp, root: Rank) -> Result<()> {
        self.in_place(Operation::Reduce { op, root }, buffer.view_mut())
    }

    /// Fills `buffer` (`[world × count]`) with everybody's chunk; chunk `rank` is this rank's own and is there before.
    pub fn all_gather(&mut self, buffer: &mut (impl BufferMut + ?Sized)) -> Result<()> {
        self.in_place(Operation::AllGather, buffer.view_mut())
    }

    /// Reduces everybody's `buffer` (`[world × count]`); chunk `rank` is the result, the others are then undefined.
    pub fn reduce_scatter(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp) -> Result<()> {
        self.in_place(Operation::ReduceScatter(op), buffer.view_mut())
    }

    /// Fills the root's `buffer` (`[world × count]` everywhere) with chunk `r` of each rank `r`.
    pub fn gather(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Gather { root }, buffer.view_mut())
    }

    /// Fills chunk `rank` of `buffer` (`[world × count]` everywhere) from the root's.
    pub fn scatter(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Scatter { root }, buffer.view_mut())
    }

    /// Exchanges chunks of `buffer` (`[world × count]`): chunk `p` goes to rank `p`, and is replaced by what `p` sent.
    pub fn all_to_all(&mut self, buffer: &mut (impl BufferMut + ?Sized)) -> Result<()> {
        self.in_place(Operation::AllToAll, buffer.view_mut())
    }

    // ---- collectives, out of place ---------------------------------------------------------------------------

    /// Reduces everybody's `input` (`[count]`) into everybody's `output` (`[count]`).
    pub fn all_reduce_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
        op: ReduceOp,
    ) -> Result<()> {
        self.out_of_place(Operation::AllReduce(op), Some(input.view()), Some(output.view_mut()))
    }

    /// Copies the root's `input` (`[count]`, `Some` there only) into everybody's `output` (`[count]`).
    pub fn broadcast_into(
        &mut self,
        input: Option<&dyn Buffer>,
        output: &mut (impl BufferMut + ?Sized),
        root: Rank,
    ) -> Result<()> {
        let input = input.map(Buffer::view);
        self.out_of_place(Operation::Broadcast { root }, input, Some(output.view_mut()))
    }

    /// Reduces everybody's `input` (`[count]`) into the root's `output` (`[count]`, `Some` there only).
    pub fn reduce_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: Option<&mut dyn BufferMut>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<()> {
        let output = output.map(BufferMut::view_mut);
        self.out_of_place(Operation::Reduce { op, root }, Some(input.view()), output)
    }

    /// Puts everybody's `input` (`[count]`) into everybody's `output` (`[world × count]`), in rank order.
    pub fn all_gather_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
    ) -> Result<()> {
        self.out_of_place(Operation::AllGather, Some(input.view()), Some(output.view_mut()))
    }

    /// Reduces everybody's `input` (`[world × count]`); `output` (`[count]`) is chunk `rank` of the result.
    pub fn reduce_scatter_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
        op: ReduceOp,
    ) -> Result<()> {
        self.out_of_place(Operation::ReduceScatter(op), Some(input.view()), Some(output.view_mut()))
    }

    /// Puts everybody's `input` (`[count]`) into the root's `output` (`[world × count]`, `Some` there only).
    pub fn gather_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: Option<&mut dyn BufferMut>,
        root: Rank,
    ) -> Result<()> {
        let output = output.map(BufferMut::view_mut);
        self.out_of_place(Operation::Gather { root }, Some(input.view()), output)
    }

    /// Puts chunk `rank` of the root's `input` (`[world × count]`, `Some` there only) into `output` (`[count]`).
    pub fn scatter_into(
        &mut self,
        input: Option<&dyn Buffer>,
        output: &mut (impl BufferMut + ?Sized),
        root: Rank,
    ) -> Result<()> {
        let input = input.map(Buffer::view);
        self.out_of_place(Operation::Scatter { root }, input, Some(output.view_mut()))
    }

    /// Sends chunk `p` of `input` to rank `p`; chunk `p` of `output` is what `p` sent. Both `[world × count]`.
    pub fn all_to_all_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
    ) -> Result<()> {
        self.out_of_place(Operation::AllToAll, Some(input.view()), Some(output.view_mut()))
    }

    // ---- messages and barrier --------------------------------------------------------------------------------

    /// Sends `buffer` to one rank, which must [`recv`](Self::recv) the same type and length. Messages between two
    /// ranks arrive in order. Returns when the buffer may be reused, which says nothing of the receiver.
    pub fn send(&mut self, buffer: &(impl Buffer + ?Sized), to: Rank) -> Result<()> {
        let view = buffer.view();
        let operation = Operation::Send { to };
        let fingerprint = self.message(operation, view)?;
        let sequence = self.next_message(operation, to);
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::OutOfPlace(Some(view), None))
    }

    /// Receives one message from one rank.
    pub fn recv(&mut self, buffer: &mut (impl BufferMut + ?Sized), from: Rank) -> Result<()> {
        let view = buffer.view_mut();
        let operation = Operation::Recv { from };
        let fingerprint = self.message(operation, view.as_view())?;
        let sequence = self.next_message(operation, from);
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::OutOfPlace(None, Some(view)))
    }

    /// Waits until every member has come.
    pub fn barrier(&mut self) -> Result<()> {
        let fingerprint = CallFingerprint { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
        let sequence = self.next();
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::InPlace(None))
    }

    /// Waits until everything that this rank has enqueued on its GPU is done: collectives, copies and kernels. Ends at the
    /// group's timeout at the latest, with the ranks that are missing. On host memory nothing is left to wait for but
    /// asynchronous calls.
    pub fn synchronize(&mut self) -> Result<()> {
        self.wait_idle();
        self.inner.synchronize()
    }

    /// Lets the others know that this rank makes no more calls, where calls are compared beside their run.
    pub(crate) fn announce_exit(&mut self) {
        if self.memory() != Memory::Host {
            self.wait_idle();
            self.inner.announce_exit();
        }
    }

    /// Waits until the calls of all members are known to have been the same, where they are compared beside the calls, at most
    /// until the deadline. All do so behind [`announce_exit`](Self::announce_exit).
    pub(crate) fn verify_calls(&mut self, deadline: Instant) -> Result<()> {
        if self.memory() == Memory::Host {
            return Ok(());
        }
        self.inner.verify_calls(deadline)
    }
}
