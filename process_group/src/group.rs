//! A process group: the one place where calls are checked, numbered, timed and recorded.

mod objects;

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::backend::loopback::LoopbackHub;
use crate::backend::{Backend, Path};
use crate::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::call::{Call, Operation, ReduceOp, Signature};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::profile::{Profile, Recording};
use crate::rank::Rank;
use crate::roster::BackendKind;
use crate::store::Store;
use crate::work::Work;

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
    pub slow: Recording,
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
    engine: Arc<Engine>,
    worker: Option<Worker>,
    collectives: u64,
    sent: HashMap<Rank, u64>,
    received: HashMap<Rank, u64>,
}

struct Engine {
    core: Mutex<Core>,
    /// Operations given to the worker and not done. Calls of the owner's thread come after all of them.
    queued: Mutex<usize>,
    idle: Condvar,
    profile: Arc<Profile>,
    last_words: Option<LastWords>,
}

/// How long a rank that lost another looks for what that one had to say.
const LAST_WORDS: Duration = Duration::from_millis(150);

/// Why a rank gave up, left where the others find it. A broken link cannot carry it.
struct LastWords {
    store: Arc<dyn Store>,
    group: String,
    rank: Rank,
}

impl LastWords {
    /// Leaves this rank's reason, or finds the one of the rank that was lost.
    fn exchange(&self, error: Error) -> Error {
        let key = |rank: Rank| format!("last-words/{}/{rank}", self.group);
        let error = match error {
            Error::PeerLost { rank, .. } => match self.store.get(&key(rank), Instant::now() + LAST_WORDS) {
                Ok(reason) => {
                    return Error::PeerAborted {
                        rank,
                        reason: String::from_utf8_lossy(&reason).into_owned(),
                    };
                }
                Err(_) => error,
            },
            Error::PeerAborted { .. } => return error,
            own => own,
        };
        // The error counts; that it could not be told is no news to whoever has lost the store.
        let _ = self.store.set(&key(self.rank), error.to_string().as_bytes());
        error
    }
}

struct Core {
    backend: Box<dyn Backend>,
    failed: Option<Arc<Error>>,
    /// The newest call that reached the backend: number, when, what.
    last: Option<LastCall>,
    timeout: Duration,
    world_size: usize,
}

/// The newest call of a group.
#[derive(Clone, Copy, Debug)]
pub struct LastCall {
    /// Its number in the group (for messages: in the pair and direction), from 1.
    pub sequence: u64,
    /// When it began.
    pub started: Instant,
    /// What it was.
    pub signature: Signature,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Worker {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce(&Engine) + Send>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    fn run(&self, signature: Signature, sequence: u64, buffers: Buffers<'_>) -> Result<()> {
        let core = &mut *lock(&self.core);
        if let Some(cause) = &core.failed {
            return Err(Error::Poisoned(Arc::clone(cause)));
        }
        let started = Instant::now();
        let (in_place, input, output) = match buffers {
            Buffers::InPlace(buffer) => (true, None, buffer),
            Buffers::OutOfPlace(input, output) => (false, input, output),
        };
        core.last = Some(LastCall { sequence, started, signature });
        if core.world_size == 1 && !signature.operation.is_point_to_point() {
            alone(input, output);
            self.profile.record(&signature, Path::Local, started);
            return Ok(());
        }
        let call = Call { signature, sequence, deadline: started + core.timeout, in_place, input, output };
        match core.backend.submit(call) {
            Ok(completion) => {
                self.profile.record(&signature, completion.path, started);
                Ok(())
            }
            Err(error) => {
                let error = match &self.last_words {
                    Some(words) => words.exchange(error),
                    None => error,
                };
                tracing::debug!(%error, call = %signature, sequence, "collective failed");
                core.backend.abort(&error);
                core.failed = Some(Arc::new(error.clone()));
                Err(error)
            }
        }
    }
}

/// What a call reads and writes.
enum Buffers<'a> {
    InPlace(Option<ViewMut<'a>>),
    OutOfPlace(Option<View<'a>>, Option<ViewMut<'a>>),
}

/// In a group of one, every operation is at most a copy: all reductions of one value are the value.
fn alone(input: Option<View<'_>>, output: Option<ViewMut<'_>>) {
    if let (Some(input), Some(mut output)) = (input, output) {
        output.bytes().copy_from_slice(input.bytes());
    }
}

impl ProcessGroup {
    /// Puts a group on a backend. Managers do this; by hand it is for tests and for backends of one's own.
    ///
    /// Through `store`, ranks tell each other why they gave up where their links no longer can.
    pub fn new(info: GroupInfo, backend: Box<dyn Backend>, store: Option<Arc<dyn Store>>) -> Self {
        let world_size = info.members.len();
        let profile =
            Arc::new(Profile::new(&info.name, info.members[info.rank.index()].0, world_size, info.slow));
        let kind = backend.kind();
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
            engine,
            worker: None,
            collectives: 0,
            sent: HashMap::new(),
            received: HashMap::new(),
        }
    }

    /// The ranks of a group whose members are threads of this process, with default settings: element `r` is rank `r`.
    pub fn loopback(world_size: usize) -> Vec<Self> {
        let hub = LoopbackHub::new();
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
                    slow: Recording { record: true, threshold: Duration::MAX, every: Duration::MAX },
                };
                Self::new(info, Box::new(backend), None)
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
        let (signature, sequence) = self.message(Operation::Send { to }, to, view.dtype(), view.count())?;
        self.wait_idle();
        self.engine.run(signature, sequence, Buffers::OutOfPlace(Some(view), None))
    }

    /// Receives one message from one rank.
    pub fn recv(&mut self, buffer: &mut (impl BufferMut + ?Sized), from: Rank) -> Result<()> {
        let view = buffer.view_mut();
        let (signature, sequence) =
            self.message(Operation::Recv { from }, from, view.dtype(), view.count())?;
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
        let (signature, sequence) = self.message(Operation::Send { to }, to, view.dtype(), view.count())?;
        self.spawn(buffer, move |engine, buffer| {
            engine.run(signature, sequence, Buffers::OutOfPlace(Some(buffer.view()), None))
        })
    }

    /// [`recv`](Self::recv) on the group's worker: every later call of the group waits for the message.
    pub fn recv_async<B: BufferMut + Send + 'static>(&mut self, buffer: B, from: Rank) -> Result<Work<B>> {
        let view = buffer.view();
        let (signature, sequence) =
            self.message(Operation::Recv { from }, from, view.dtype(), view.count())?;
        self.spawn(buffer, move |engine, buffer| {
            engine.run(signature, sequence, Buffers::OutOfPlace(None, Some(buffer.view_mut())))
        })
    }

    fn in_place_async<B: BufferMut + Send + 'static>(
        &mut self,
        operation: Operation,
        buffer: B,
    ) -> Result<Work<B>> {
        let view = buffer.view();
        let signature = self.signature(operation, view.dtype(), view.count())?;
        let sequence = self.next();
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

    // ---- many tensors in few messages ------------------------------------------------------------------------

    /// [`all_reduce`](Self::all_reduce) of many buffers with few messages: neighbours of one type share buckets of
    /// the configured size. Every rank passes the same types and lengths in the same order.
    pub fn all_reduce_coalesced(&mut self, buffers: &mut [&mut dyn BufferMut], op: ReduceOp) -> Result<()> {
        let shapes: Vec<(DType, usize)> =
            buffers.iter().map(|b| b.view()).map(|v| (v.dtype(), v.bytes().len())).collect();
        let mut packed = AlignedBytes::default();
        for bucket in buckets(&shapes, self.info.bucket_bytes) {
            let dtype = shapes[bucket.start].0;
            if bucket.len() == 1 {
                self.in_place(Operation::AllReduce(op), buffers[bucket.start].view_mut())?;
                continue;
            }
            let total = shapes[bucket.clone()].iter().map(|s| s.1).sum();
            let bytes = packed.first(total);
            let mut at = 0;
            for buffer in &buffers[bucket.clone()] {
                let from = buffer.view();
                bytes[at..at + from.bytes().len()].copy_from_slice(from.bytes());
                at += from.bytes().len();
            }
            self.in_place(Operation::AllReduce(op), ViewMut::from_bytes(dtype, bytes)?)?;
            let mut at = 0;
            for buffer in &mut buffers[bucket] {
                let mut to = buffer.view_mut();
                let length = to.bytes().len();
                to.bytes().copy_from_slice(&packed.first(total)[at..at + length]);
                at += length;
            }
        }
        Ok(())
    }

    // ---- checks ----------------------------------------------------------------------------------------------

    fn next(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives
    }

    fn in_place(&mut self, operation: Operation, buffer: ViewMut<'_>) -> Result<()> {
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

impl Worker {
    fn spawn(engine: Arc<Engine>, info: &GroupInfo) -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("ryz-{}-{}", info.name, info.rank))
            .spawn(move || {
                for job in queue {
                    job(&engine);
                    *lock(&engine.queued) -= 1;
                    engine.idle.notify_all();
                }
            })
            .map_err(|e| Error::Transport(format!("cannot start the group's worker thread: {e}")))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

/// Neighbours of one type, joined while they fit a bucket. Every buffer is in exactly one range.
fn buckets(shapes: &[(DType, usize)], limit: usize) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    let mut filled = 0;
    for (index, (dtype, bytes)) in shapes.iter().enumerate() {
        match ranges.last_mut() {
            Some(range) if shapes[range.start].0 == *dtype && filled + bytes <= limit => {
                range.end = index + 1;
                filled += bytes;
            }
            _ => {
                ranges.push(index..index + 1);
                filled = *bytes;
            }
        }
    }
    ranges
}

/// Bytes aligned for every element type, grown and never shrunk.
#[derive(Default)]
pub(crate) struct AlignedBytes {
    words: Vec<u64>,
}

impl AlignedBytes {
    /// The first `length` bytes; their content is whatever was there.
    pub(crate) fn first(&mut self, length: usize) -> &mut [u8] {
        let words = length.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        &mut bytemuck::cast_slice_mut(&mut self.words)[..length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_types_apart_and_sizes_below_the_limit() {
        let shapes =
            [(DType::F32, 40), (DType::F32, 40), (DType::F32, 40), (DType::F16, 10), (DType::F16, 200)];
        assert_eq!(buckets(&shapes, 100), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(buckets(&[], 100), []);
    }
}
