//! The calls of a group that return when they are complete: collectives in place and out of place, messages, barrier.

use std::time::Instant;

use super::ProcessGroup;
use super::inner::Buffers;
use crate::device::Event;
use crate::device::buffer::{Buffer, BufferMut, Memory};
use crate::error::Result;
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation, ReduceOp};
use crate::types::rank::Rank;

impl ProcessGroup {
    // ---- collectives, in place -------------------------------------------------------------------------------

    /// Reduces the `buffer` (`[count]`) of all ranks into all of them.
    pub fn all_reduce(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp) -> Result<()> {
        self.in_place(Operation::AllReduce(op), buffer.view_mut())
    }

    /// Copies the root's `buffer` (`[count]`) to that of every rank.
    pub fn broadcast(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Broadcast { root }, buffer.view_mut())
    }

    /// Reduces the `buffer` (`[count]`) of all ranks into the root's. Those of the other ranks stay unchanged.
    pub fn reduce(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp, root: Rank) -> Result<()> {
        self.in_place(Operation::Reduce { op, root }, buffer.view_mut())
    }

    /// Fills `buffer` (`[world × count]`) with the chunks of all ranks; chunk `rank` is this rank's own and must be there before.
    pub fn all_gather(&mut self, buffer: &mut (impl BufferMut + ?Sized)) -> Result<()> {
        self.in_place(Operation::AllGather, buffer.view_mut())
    }

    /// Reduces the `buffer` (`[world × count]`) of all ranks; chunk `rank` is the result, and the others are then undefined.
    pub fn reduce_scatter(&mut self, buffer: &mut (impl BufferMut + ?Sized), op: ReduceOp) -> Result<()> {
        self.in_place(Operation::ReduceScatter(op), buffer.view_mut())
    }

    /// Fills the root's `buffer` (`[world × count]` everywhere) with chunk `r` of each rank `r`.
    pub fn gather(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Gather { root }, buffer.view_mut())
    }

    /// Fills chunk `rank` of `buffer` (`[world × count]` everywhere) from the root's buffer.
    pub fn scatter(&mut self, buffer: &mut (impl BufferMut + ?Sized), root: Rank) -> Result<()> {
        self.in_place(Operation::Scatter { root }, buffer.view_mut())
    }

    /// Exchanges chunks of `buffer` (`[world × count]`): chunk `p` goes to rank `p`, and is replaced by the chunk that `p` sent.
    pub fn all_to_all(&mut self, buffer: &mut (impl BufferMut + ?Sized)) -> Result<()> {
        self.in_place(Operation::AllToAll, buffer.view_mut())
    }

    // ---- collectives, out of place ---------------------------------------------------------------------------

    /// Reduces the `input` (`[count]`) of all ranks into the `output` (`[count]`) of every rank.
    pub fn all_reduce_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
        op: ReduceOp,
    ) -> Result<()> {
        self.out_of_place(Operation::AllReduce(op), Some(input.view()), Some(output.view_mut()))
    }

    /// Copies the root's `input` (`[count]`, `Some` there only) into the `output` (`[count]`) of every rank.
    pub fn broadcast_into(
        &mut self,
        input: Option<&dyn Buffer>,
        output: &mut (impl BufferMut + ?Sized),
        root: Rank,
    ) -> Result<()> {
        let input = input.map(Buffer::view);
        self.out_of_place(Operation::Broadcast { root }, input, Some(output.view_mut()))
    }

    /// Reduces the `input` (`[count]`) of all ranks into the root's `output` (`[count]`, `Some` there only).
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

    /// Copies the `input` (`[count]`) of all ranks into the `output` (`[world × count]`) of every rank, in rank order.
    pub fn all_gather_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
    ) -> Result<()> {
        self.out_of_place(Operation::AllGather, Some(input.view()), Some(output.view_mut()))
    }

    /// Reduces the `input` (`[world × count]`) of all ranks; `output` (`[count]`) is chunk `rank` of the result.
    pub fn reduce_scatter_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
        op: ReduceOp,
    ) -> Result<()> {
        self.out_of_place(Operation::ReduceScatter(op), Some(input.view()), Some(output.view_mut()))
    }

    /// Copies the `input` (`[count]`) of all ranks into the root's `output` (`[world × count]`, `Some` there only).
    pub fn gather_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: Option<&mut dyn BufferMut>,
        root: Rank,
    ) -> Result<()> {
        let output = output.map(BufferMut::view_mut);
        self.out_of_place(Operation::Gather { root }, Some(input.view()), output)
    }

    /// Copies chunk `rank` of the root's `input` (`[world × count]`, `Some` there only) into `output` (`[count]`).
    pub fn scatter_into(
        &mut self,
        input: Option<&dyn Buffer>,
        output: &mut (impl BufferMut + ?Sized),
        root: Rank,
    ) -> Result<()> {
        let input = input.map(Buffer::view);
        self.out_of_place(Operation::Scatter { root }, input, Some(output.view_mut()))
    }

    /// Sends chunk `p` of `input` to rank `p`; chunk `p` of `output` is the chunk that `p` sent. Both are `[world × count]`.
    pub fn all_to_all_into(
        &mut self,
        input: &(impl Buffer + ?Sized),
        output: &mut (impl BufferMut + ?Sized),
    ) -> Result<()> {
        self.out_of_place(Operation::AllToAll, Some(input.view()), Some(output.view_mut()))
    }

    // ---- messages and barrier --------------------------------------------------------------------------------

    /// Sends `buffer` to one rank, which must [`recv`](Self::recv) the same type and length. Messages between two ranks arrive in
    /// order. Returns when the buffer may be reused, which does not mean that the receiver has the message.
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

    /// Waits until every member has entered the barrier.
    pub fn barrier(&mut self) -> Result<()> {
        let fingerprint = CallFingerprint::new(Operation::Barrier, DType::U8, 0);
        let sequence = self.next();
        self.wait_idle();
        self.inner.run(fingerprint, sequence, Buffers::InPlace(None))
    }

    /// Waits until all work that this rank has enqueued on its GPU is done: collectives, copies and kernels. Ends at the group's
    /// timeout at the latest, with the missing ranks. On host memory it only waits for asynchronous calls.
    pub fn synchronize(&mut self) -> Result<()> {
        self.wait_idle();
        self.inner.synchronize()
    }

    /// Waits until the group's GPU reaches an event, with the timeout and the errors of [`synchronize`](Self::synchronize). Later work may
    /// still run. On host memory it only waits for asynchronous calls.
    pub fn synchronize_event(&mut self, event: &Event) -> Result<()> {
        self.wait_idle();
        self.inner.synchronize_event(event)
    }

    /// Tells the other ranks that this rank makes no more calls, where calls are compared in the background.
    pub(crate) fn announce_exit(&mut self) {
        if self.memory() != Memory::Host {
            self.wait_idle();
            self.inner.announce_exit();
        }
    }

    /// Waits until the calls of all members are known to have been the same, where they are compared in the background, until the
    /// deadline at the latest. All members do so after [`announce_exit`](Self::announce_exit).
    pub(crate) fn verify_calls(&mut self, deadline: Instant) -> Result<()> {
        if self.memory() == Memory::Host {
            return Ok(());
        }
        self.inner.verify_calls(deadline)
    }
}
