//! A process group: the one place where calls are checked, numbered, timed and recorded.

mod coalesce;
mod engine;
mod monitored;
mod objects;
mod placed;

pub use engine::LastCall;
pub use monitored::Arrival;
pub use placed::GroupBuffer;

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::backend::loopback::LoopbackHub;
use crate::backend::{Backend, Path};
use crate::buffer::{Buffer, BufferMut, Memory, View, ViewMut};
use crate::call::{Operation, ReduceOp, Signature};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::profile::{Profile, Recording};
use crate::rank::Rank;
use crate::roster::BackendKind;
use crate::store::{MemoryStore, Store};
use crate::work::Work;
use engine::{Buffers, Core, Engine, Job, LastWords, Worker, lock};

/// What a group is, beside its backend.
#[derive(Clone, Debug)]
pub struct GroupInfo {
    /// Its name; the same on all members, unique in the job.
    pub name: String,
    /// This rank's position in the group.
    pub rank: Rank,
    /// Global rank of each member, in group order.
    pub members: Vec<Rank>,
    /// Deadline of every call.
    pub timeout: Duration,
    /// Bucket of coalesced calls, in bytes.
    pub bucket_bytes: usize,
    /// What is recorded of calls.
    pub recording: Recording,
}

/// Ranks that call collectives together. Every member makes the same calls in the same order.
///
/// Ranks and roots here are positions in the group, from 0. Calls check their arguments before anything leaves the
/// rank. After a transport failure, a timeout or a mismatch the group is poisoned: every later call returns
/// [`Error::Poisoned`] with the cause.
///
/// ```
/// use ryzanstein_process_group::{ProcessGroup, ReduceOp};
///
/// let sums: Vec<f32> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = ProcessGroup::loopback(4)
///         .into_iter()
///         .map(|mut group| {
///             scope.spawn(move || {
///                 let mut x = [group.rank().0 as f32; 3];
///                 group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
///                 x[0]
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|r| r.join().unwrap()).collect()
/// });
/// assert_eq!(sums, [6.0; 4]);
/// ```
#[derive(Debug)]
pub struct ProcessGroup {
    info: GroupInfo,
    kind: BackendKind,
    memory: Memory,
    device: Option<Device>,
    engine: Arc<Engine>,
    worker: Option<Worker>,
    collectives: u64,
    monitored: u64,
    sent: HashMap<Rank, u64>,
    received: HashMap<Rank, u64>,
}

impl ProcessGroup {
    /// Puts a group on a backend. Managers do this; by hand it is for tests and for backends of one's own.
    ///
    /// Through `store`, ranks tell each other why they gave up where their links no longer can.
    pub fn new(info: GroupInfo, backend: Box<dyn Backend>, store: Option<Arc<dyn Store>>) -> Self {
        let world_size = info.members.len();
        let global = info.members[info.rank.index()].0;
        let profile =
            Arc::new(Profile::new(&info.name, global, world_size, info.recording, backend.timings()));
        let (kind, memory, device) = (backend.kind(), backend.memory(), backend.device().cloned());
        let core = Mutex::new(Core { backend, failed: None, last: None, timeout: info.timeout, world_size });
        let last_words = store.map(|store| LastWords {
            store,
            group: info.name.clone(),
            rank: info.members[info.rank.index()],
        });
        let engine =
            Arc::new(Engine { core, queued: Mutex::new(0), idle: Condvar::new(), profile, last_words });
        Self {
            info,
            kind,
            memory,
            device,
            engine,
            worker: None,
            collectives: 0,
            monitored: 0,
            sent: HashMap::new(),
            received: HashMap::new(),
        }
    }

    /// The ranks of a group whose members are threads of this process, with default settings: element `r` is rank `r`.
    pub fn loopback(world_size: usize) -> Vec<Self> {
        let hub = LoopbackHub::new();
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let members: Vec<Rank> = Rank::all(world_size).collect();
        Rank::all(world_size)
            .map(|rank| {
                let backend = hub.join("loopback", rank, &members);
                let info = GroupInfo {
                    name: "loopback".into(),
                    rank,
                    members: members.clone(),
                    timeout: Duration::from_secs(60),
                    bucket_bytes: 25 << 20,
                    recording: Recording { record: true, threshold: Duration::MAX, every: Duration::MAX },
                };
                Self::new(info, Box::new(backend), Some(Arc::clone(&store)))
            })
            .collect()
    }

    /// This rank's position in the group.
    pub fn rank(&self) -> Rank {
        self.info.rank
    }

    /// Number of members.
    pub fn world_size(&self) -> usize {
        self.info.members.len()
    }

    /// Global ranks of the members, in group order.
    pub fn members(&self) -> &[Rank] {
        &self.info.members
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// What carries the calls.
    pub fn backend(&self) -> BackendKind {
        self.kind
    }

    /// Where the buffers of its calls must be.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The GPU whose memory that is, if it is one's.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// What has been measured so far.
    pub fn profile(&self) -> Arc<Profile> {
        Arc::clone(&self.engine.profile)
    }

    /// Changes the deadline of later calls.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.wait_idle();
        self.info.timeout = timeout;
        lock(&self.engine.core).timeout = timeout;
    }

    /// Paths that calls of this group may take.
    pub fn paths(&self) -> Vec<Path> {
        lock(&self.engine.core).backend.paths()
    }

    /// Makes later calls take one path (every rank must do the same), or lets the backend choose again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the backend has no such path.
    pub fn force_path(&mut self, path: Option<Path>) -> Result<()> {
        self.wait_idle();
        lock(&self.engine.core).backend.force(path)
    }

    /// The newest call, for whoever has to say what a rank was doing when it failed.
    pub fn last_call(&self) -> Option<LastCall> {
        lock(&self.engine.core).last
    }

    /// Why the group cannot be used any more, if so.
    pub fn failure(&self) -> Option<Arc<Error>> {
        lock(&self.engine.core).failed.clone()
    }

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
        self.check_memory(operation, view.memory())?;
        let (signature, sequence) = self.message(operation, to, view.dtype(), view.count())?;
        self.wait_idle();
        self.engine.run(signature, sequence, Buffers::OutOfPlace(Some(view), None))
    }

    /// Receives one message from one rank.
    pub fn recv(&mut self, buffer: &mut (impl BufferMut + ?Sized), from: Rank) -> Result<()> {
        let view = buffer.view_mut();
        let operation = Operation::Recv { from };
        self.check_memory(operation, view.memory())?;
        let (signature, sequence) = self.message(operation, from, view.dtype(), view.count())?;
        self.wait_idle();
        self.engine.run(signature, sequence, Buffers::OutOfPlace(None, Some(view)))
    }

    /// Waits until every member has come.
    pub fn barrier(&mut self) -> Result<()> {
        let signature = Signature { operation: Operation::Barrier, dtype: DType::U8, count: 0 };
        let sequence = self.next();
        self.wait_idle();
        self.engine.run(signature, sequence, Buffers::InPlace(None))
    }

    /// Waits until everything that this rank has enqueued on its GPU is done: collectives, copies and kernels. Ends at the
    /// group's timeout at the latest, with the ranks that are missing. On host memory nothing is left to wait for but
    /// asynchronous calls.
    pub fn synchronize(&mut self) -> Result<()> {
        self.wait_idle();
        self.engine.synchronize()
    }

    // ---- asynchronous ----------------------------------------------------------------------------------------

    /// [`all_reduce`](Self::all_reduce) on the group's worker. Later calls of the group come after it.
    pub fn all_reduce_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        op: ReduceOp,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::AllReduce(op), buffer)
    }

    /// [`broadcast`](Self::broadcast) on the group's worker.
    pub fn broadcast_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        root: Rank,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::Broadcast { root }, buffer)
    }

    /// [`all_gather`](Self::all_gather) on the group's worker.
    pub fn all_gather_async<B: BufferMut + Send + 'static>(&mut self, buffer: B) -> Result<Work<B>> {
        self.in_place_async(Operation::AllGather, buffer)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) on the group's worker.
    pub fn reduce_scatter_async<B: BufferMut + Send + 'static>(
        &mut self,
        buffer: B,
        op: ReduceOp,
    ) -> Result<Work<B>> {
        self.in_place_async(Operation::ReduceScatter(op), buffer)
    }

    /// [`all_to_all`](Self::all_to_all) on the group's worker.
    pub fn all_to_all_async<B: BufferMut + Send + 'static>(&mut self, buffer: B) -> Result<Work<B>> {
        self.in_place_async(Operation::AllToAll, buffer)
    }

    /// [`send`](Self::send) on the group's worker.
    pub fn send_async<B: Buffer + Send + 'static>(&mut self, buffer: B, to: Rank) -> Result<Work<B>> {
        let view = buffer.view();
        let operation = Operation::Send { to };
        self.check_memory(operation, view.memory())?;
        let (signature, sequence) = self.message(operation, to, view.dtype(), view.count())?;
        if self.device.is_some() {
            let ticket = self.engine.start(signature, sequence, Buffers::OutOfPlace(Some(view), None))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |engine, buffer| {
            engine.run(signature, sequence, Buffers::OutOfPlace(Some(buffer.view()), None))
        })
    }

    /// [`recv`](Self::recv) on the group's worker: every later call of the group waits for the message.
    pub fn recv_async<B: BufferMut + Send + 'static>(
        &mut self,
        mut buffer: B,
        from: Rank,
    ) -> Result<Work<B>> {
        let view = buffer.view();
        let operation = Operation::Recv { from };
        self.check_memory(operation, view.memory())?;
        let (signature, sequence) = self.message(operation, from, view.dtype(), view.count())?;
        if self.device.is_some() {
            let ticket =
                self.engine.start(signature, sequence, Buffers::OutOfPlace(None, Some(buffer.view_mut())))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |engine, buffer| {
            engine.run(signature, sequence, Buffers::OutOfPlace(None, Some(buffer.view_mut())))
        })
    }

    fn in_place_async<B: BufferMut + Send + 'static>(
        &mut self,
        operation: Operation,
        mut buffer: B,
    ) -> Result<Work<B>> {
        let view = buffer.view();
        self.check_memory(operation, view.memory())?;
        let signature = self.signature(operation, view.dtype(), view.count())?;
        let sequence = self.next();
        if self.device.is_some() {
            let ticket = self.engine.start(signature, sequence, Buffers::InPlace(Some(buffer.view_mut())))?;
            return Ok(Work::on_stream(buffer, ticket));
        }
        self.spawn(buffer, move |engine, buffer| {
            engine.run(signature, sequence, Buffers::InPlace(Some(buffer.view_mut())))
        })
    }

    fn spawn<B: Send + 'static>(
        &mut self,
        mut buffer: B,
        run: impl FnOnce(&Engine, &mut B) -> Result<()> + Send + 'static,
    ) -> Result<Work<B>> {
        let (sender, work) = Work::new();
        let job: Job = Box::new(move |engine| {
            let result = run(engine, &mut buffer);
            // Nobody may be waiting any more; the buffer is then freed here.
            let _ = sender.send((buffer, result));
        });
        if self.worker.is_none() {
            self.worker = Some(Worker::spawn(Arc::clone(&self.engine), &self.info)?);
        }
        *lock(&self.engine.queued) += 1;
        let jobs = self.worker.as_ref().and_then(|w| w.jobs.as_ref());
        if jobs.is_none_or(|jobs| jobs.send(job).is_err()) {
            *lock(&self.engine.queued) -= 1;
            return Err(Error::Transport("the worker of this group has died".into()));
        }
        Ok(work)
    }

    fn wait_idle(&self) {
        if self.worker.is_none() {
            return;
        }
        let mut queued = lock(&self.engine.queued);
        while *queued > 0 {
            queued = self.engine.idle.wait(queued).unwrap_or_else(PoisonError::into_inner);
        }
    }

    // ---- checks ----------------------------------------------------------------------------------------------

    fn next(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives
    }

    fn in_place(&mut self, operation: Operation, buffer: ViewMut<'_>) -> Result<()> {
        self.check_memory(operation, buffer.memory())?;
        let signature = self.signature(operation, buffer.dtype(), buffer.count())?;
        let sequence = self.next();
        self.wait_idle();
        self.engine.run(signature, sequence, Buffers::InPlace(Some(buffer)))
    }

    /// The signature of a call whose whole array (of all ranks' chunks, where chunked) has `total` elements.
    fn signature(&self, operation: Operation, dtype: DType, total: usize) -> Result<Signature> {
        let n = self.world_size();
        if let Some(root) = operation.root() {
            self.check_rank(operation, root)?;
        }
        let mut count = total;
        if operation.is_chunked() {
            if !total.is_multiple_of(n) {
                return Err(Error::invalid(format!(
                    "{operation} cuts its buffer into one chunk for each of the {n} ranks of group `{}`; \
                     {total} elements do not divide by {n}",
                    self.info.name
                )));
            }
            count = total / n;
        }
        Ok(Signature { operation, dtype, count })
    }

    fn out_of_place(
        &mut self,
        operation: Operation,
        input: Option<View<'_>>,
        output: Option<ViewMut<'_>>,
    ) -> Result<()> {
        for memory in [input.as_ref().map(View::memory), output.as_ref().map(ViewMut::memory)] {
            memory.map_or(Ok(()), |memory| self.check_memory(operation, memory))?;
        }
        let n = self.world_size();
        let me = self.info.rank;
        // How many chunks the input and the output hold, and who must pass them.
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
            let Some((dtype, count)) = view else { return Ok(None) };
            if !count.is_multiple_of(chunks) {
                return Err(Error::invalid(format!(
                    "the {what} of {operation} holds one chunk for each of the {n} ranks of group `{}`; \
                     {count} elements do not divide by {n}",
                    self.info.name
                )));
            }
            Ok(Some((dtype, count / chunks)))
        };
        let read = shape(input.as_ref().map(|v| (v.dtype(), v.count())), inputs, "input")?;
        let written = shape(output.as_ref().map(|v| (v.dtype(), v.count())), outputs, "output")?;
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
        if let Some(root) = operation.root() {
            self.check_rank(operation, root)?;
        }
        let sequence = self.next();
        self.wait_idle();
        let buffers = Buffers::OutOfPlace(input, output);
        self.engine.run(Signature { operation, dtype, count }, sequence, buffers)
    }

    fn message(
        &mut self,
        operation: Operation,
        peer: Rank,
        dtype: DType,
        count: usize,
    ) -> Result<(Signature, u64)> {
        self.check_rank(operation, peer)?;
        if peer == self.info.rank {
            return Err(Error::invalid(format!("{operation}: a rank cannot exchange messages with itself")));
        }
        let counters =
            if matches!(operation, Operation::Send { .. }) { &mut self.sent } else { &mut self.received };
        let sequence = counters.entry(peer).or_default();
        *sequence += 1;
        Ok((Signature { operation, dtype, count }, *sequence))
    }

    fn check_memory(&self, operation: Operation, memory: Memory) -> Result<()> {
        if memory == self.memory {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{operation}: the buffer is in {memory}, and the backend `{}` of group `{}` works on {}; copy it there, or \
             choose another process_group.backend",
            self.kind, self.info.name, self.memory
        )))
    }

    fn check_rank(&self, operation: Operation, rank: Rank) -> Result<()> {
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

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            // Closing the queue ends the worker after the operations in it, each of which has a deadline.
            drop(worker.jobs.take());
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
