//! The calls of a group that return at once with a [`Work`]: they run on the group's own worker.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::ProcessGroup;
use super::inner::{Buffers, GroupInner, Job, Worker};
use crate::device::buffer::{Buffer, BufferMut};
use crate::error::{Error, Result};
use crate::group::work::Work;
use crate::types::operation::{Operation, ReduceOp};
use crate::types::rank::Rank;
use crate::types::sync::lock;

impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce) on the group's worker. Later calls of the group come after it.
    pub fn all_reduce_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        op: ReduceOp,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::AllReduce(op), buffer)
    }

    /// Starts a [`broadcast`](Self::broadcast) on the group's worker.
    pub fn broadcast_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        root: Rank,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::Broadcast { root }, buffer)
    }

    /// Starts an [`all_gather`](Self::all_gather) on the group's worker.
    pub fn all_gather_async<B: BufferMut + Send + 'static>(&mut self, buffer: B) -> Result<Work<B>> {
        self.in_place_async(Operation::AllGather, buffer)
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter) on the group's worker.
    pub fn reduce_scatter_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        op: ReduceOp,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::ReduceScatter(op), buffer)
    }

    /// Starts an [`all_to_all`](Self::all_to_all) on the group's worker.
    pub fn all_to_all_async<B: BufferMut + Send + 'static>(&mut self, buffer: B) -> Result<Work<B>> {
        self.in_place_async(Operation::AllToAll, buffer)
    }

    /// Starts a [`send`](Self::send) on the group's worker.
    pub fn send_async<B: Buffer + Send + 'static>(&mut self, buffer: B, to: Rank) -> Result<Work<B>> {
        let view = buffer.view();
        let operation = Operation::Send { to };
        let fingerprint = self.message(operation, view)?;
        let sequence = self.next_message(operation, to);
        if self.device.is_some() {
            let ticket = self.inner.start(fingerprint, sequence, Buffers::OutOfPlace(Some(view), None))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |inner, buffer| {
            inner.run_queued(fingerprint, sequence, Buffers::OutOfPlace(Some(buffer.view()), None))
        })
    }

    /// Starts a [`recv`](Self::recv) on the group's worker: every later call of the group waits for the message.
    pub fn recv_async<B: BufferMut + Send + 'static>(
        &mut self,
        mut buffer: B,
        from: Rank,
    ) -> Result<Work<B>> {
        let view = buffer.view_mut();
        let operation = Operation::Recv { from };
        let fingerprint = self.message(operation, view.as_view())?;
        let sequence = self.next_message(operation, from);
        if self.device.is_some() {
            let ticket = self.inner.start(fingerprint, sequence, Buffers::OutOfPlace(None, Some(view)))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |inner, buffer| {
            inner.run_queued(fingerprint, sequence, Buffers::OutOfPlace(None, Some(buffer.view_mut())))
        })
    }

    fn in_place_async<B: BufferMut + Send + 'static>(
        &mut self,
        operation: Operation,
        mut buffer: B,
    ) -> Result<Work<B>> {
        let view = buffer.view_mut();
        self.check_memory(operation, view.memory())?;
        let fingerprint = self.fingerprint(operation, view.dtype(), view.count())?;
        let sequence = self.next();
        if self.device.is_some() {
            let ticket = self.inner.start(fingerprint, sequence, Buffers::InPlace(Some(view)))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |inner, buffer| {
            inner.run_queued(fingerprint, sequence, Buffers::InPlace(Some(buffer.view_mut())))
        })
    }

    fn spawn<B: Send + 'static>(
        &mut self,
        mut buffer: B,
        run: impl FnOnce(&GroupInner, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let (sender, work) = Work::new();
        let job: Job = Box::new(move |inner| {
            // The other ranks wait for this call: a panic in the buffer's code must not hide the reason from them.
            let result = catch_unwind(AssertUnwindSafe(|| run(inner, &mut buffer)))
                .unwrap_or_else(|panic| Err(inner.panicked(&*panic)));
            // The caller may have stopped waiting; the buffer is then freed here.
            let _ = sender.send((buffer, result));
        });
        if self.worker.is_none() {
            self.worker = Some(Worker::spawn(Arc::clone(&self.inner), &self.info)?);
        }
        *lock(&self.inner.queued) += 1;
        let jobs = self.worker.as_ref().and_then(|w| w.jobs.as_ref());
        if jobs.is_none_or(|jobs| jobs.send(job).is_err()) {
            *lock(&self.inner.queued) -= 1;
            return Err(Error::Transport("the worker of this group has died".into()));
        }
        Ok(work)
    }

    /// Waits for all earlier work of the worker.
    pub(super) fn wait_idle(&self) {
        if self.worker.is_none() {
            return;
        }
        drop(self.inner.idle.wait_while(lock(&self.inner.queued), |queued| *queued > 0));
    }
}
