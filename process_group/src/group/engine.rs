//! What runs the calls of a group: one backend, one call at a time, on the caller's thread or on the group's worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::SyncOnDrop;

use super::GroupInfo;
use crate::backend::nccl::Captured;
use crate::backend::{Backend, Completion, Path, Ticket};
use crate::buffer::{Memory, View, ViewMut};
use crate::call::Call;
use crate::deadline;
use crate::device::{Stream, tracked};
use crate::error::{Error, Result};
use crate::operation::Signature;
use crate::profile::Profile;
use crate::rank::Rank;
use crate::store::{Store, group_key};

pub(super) struct Engine {
    pub(super) core: Mutex<Core>,
    /// Operations given to the worker and not done. Calls of the owner's thread come after all of them.
    pub(super) queued: Mutex<usize>,
    pub(super) idle: Condvar,
    pub(super) profile: Arc<Profile>,
    pub(super) last_words: Option<LastWords>,
    // Behind the core, whose backend ends with the last of its calls.
    pub(super) _closing: Closing,
}

/// Lets the profile take in the last times when the backend has ended.
pub(super) struct Closing(pub(super) Arc<Profile>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// How long a rank that lost another looks for what that one had to say.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(150);

/// Why a rank gave up, left where the others find it. A broken link cannot carry it.
pub(super) struct LastWords {
    pub(super) store: Arc<dyn Store>,
    pub(super) group: String,
    pub(super) rank: Rank,
}

impl LastWords {
    fn key(&self, rank: Rank) -> String {
        group_key("last-words", &self.group, rank)
    }

    /// What a rank that was lost had to say. A store that is lost too is not waited for.
    fn of(&self, rank: Rank) -> Option<String> {
        let (store, key) = (Arc::clone(&self.store), self.key(rank));
        let (sender, answer) = mpsc::channel();
        let look = move || {
            let _ = sender.send(store.get(&key, Instant::now() + LAST_WORDS));
        };
        std::thread::Builder::new().name("ryz-last-words".into()).spawn(look).ok()?;
        let reason = answer.recv_timeout(2 * LAST_WORDS).ok()?.ok()?;
        Some(String::from_utf8_lossy(&reason).into_owned())
    }

    /// Leaves this rank's reason; one that it was told of too, since who loses this rank cannot know that it only passed it on.
    fn leave(&self, error: &Error) {
        // The error counts; that it could not be told is no news to whoever has lost the store.
        let _ = self.store.set(&self.key(self.rank), error.to_string().as_bytes());
    }
}

pub(super) struct Core {
    pub(super) backend: Box<dyn Backend>,
    pub(super) failed: Option<Arc<Error>>,
    /// The newest call that reached the backend: number, when, what.
    pub(super) last: Option<LastCall>,
    pub(super) timeout: Duration,
    pub(super) world_size: usize,
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
    /// How it went; `None` while it is under way, and when it failed.
    pub path: Option<Path>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) jobs: Option<mpsc::Sender<Job>>,
    pub(super) thread: Option<JoinHandle<()>>,
}

pub(super) type Job = Box<dyn FnOnce(&Engine) + Send>;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// One call, done or enqueued when this returns.
    pub(super) fn run(&self, signature: Signature, sequence: u64, buffers: Buffers<'_>) -> Result<()> {
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        let outcome =
            core.ordered(buffers, false, |core, buffers| core.submit(signature, sequence, buffers, started));
        let completion = self.judge(core, outcome, signature, sequence)?;
        core.went(completion.path);
        self.note(&signature, completion, started);
        Ok(())
    }

    /// One call that was queued under its signature, with buffers that lend their elements once more: they must be what they
    /// were. The others wait for the call by then, so a buffer that has changed fails the group.
    pub(super) fn run_queued(&self, signature: Signature, sequence: u64, buffers: Buffers<'_>) -> Result<()> {
        {
            let core = &mut *lock(&self.core);
            core.check()?;
            if let Err(error) = buffers.check(&signature, core.world_size, core.backend.memory()) {
                return Err(self.fail(core, error));
            }
        }
        self.run(signature, sequence, buffers)
    }

    /// Several calls, which the backend may take together.
    pub(super) fn run_all(&self, mut calls: Vec<(Signature, u64, Buffers<'_>)>) -> Result<()> {
        let Some(first) = calls.first().map(|c| (c.0, c.1)) else { return Ok(()) };
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        // Dropped when all have been enqueued, which the end of the group does.
        let streams = core.streams(false, calls.iter().any(|call| call.2.is_tracked()));
        let tracked = calls.iter_mut().filter(|_| streams.is_some());
        let ordered: Result<Vec<_>> = tracked.map(|call| call.2.order(streams.as_ref())).collect();
        let (ordered, begun) = match ordered {
            Ok(ordered) => (ordered, core.check().and_then(|()| core.backend.begin())),
            Err(error) => (Vec::new(), Err(error)),
        };
        let mut done = Vec::with_capacity(calls.len());
        let outcome = begun.and_then(|()| {
            let mut outcome = Ok(());
            for (signature, sequence, buffers) in calls {
                outcome = outcome.and_then(|()| {
                    let completion = core.submit(signature, sequence, buffers, started)?;
                    done.push((signature, completion));
                    Ok(())
                });
            }
            // What was begun is ended, whatever became of it.
            let deadline = core.deadline(started);
            let ended = core.backend.end(deadline);
            outcome.and(ended)
        });
        drop(ordered);
        let outcome = outcome.map(|()| Completion { path: Path::Local, enqueued: false, captured: false });
        self.judge(core, outcome, first.0, first.1)?;
        for (signature, completion) in done {
            core.went(completion.path);
            self.note(&signature, completion, started);
        }
        Ok(())
    }

    /// Begins a call on the group's own stream of a GPU.
    pub(super) fn start(
        &self,
        signature: Signature,
        sequence: u64,
        buffers: Buffers<'_>,
    ) -> Result<Box<dyn Ticket>> {
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        if core.is_alone(&signature) {
            let outcome = core
                .ordered(buffers, false, |core, buffers| core.submit(signature, sequence, buffers, started));
            let completion = self.judge(core, outcome, signature, sequence)?;
            core.went(completion.path);
            self.note(&signature, completion, started);
            return Ok(Box::new(Done));
        }
        core.last = Some(LastCall { sequence, started, signature, path: None });
        let deadline = core.deadline(started);
        let outcome = core.check().and_then(|()| {
            core.ordered(buffers, true, |core, buffers| {
                core.backend.start(buffers.call(signature, sequence, deadline))
            })
        });
        let (outcome, ticket) = match outcome {
            Ok((completion, ticket)) => (Ok(completion), Some(ticket)),
            Err(error) => (Err(error), None),
        };
        let completion = self.judge(core, outcome, signature, sequence)?;
        core.went(completion.path);
        self.note(&signature, completion, started);
        Ok(ticket.unwrap_or_else(|| Box::new(Done)))
    }

    /// From `true` to `false`, calls are captured into a graph.
    pub(super) fn record(&self, recording: bool) -> Option<Arc<Captured>> {
        lock(&self.core).backend.record(recording)
    }

    /// Repeats captured calls, the last of which is collective number `sequence`.
    pub(super) fn replay<E: From<Error>>(
        &self,
        captured: Option<&Arc<Captured>>,
        sequence: u64,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let core = &mut *lock(&self.core);
        core.check()?;
        let Some(captured) = captured else { return launch() };
        let started = Instant::now();
        let (signature, _) = *captured.counts().last().unwrap_or(&(NOTHING, 0));
        let (mut launch, mut said) = (Some(launch), Ok(()));
        let outcome = core.backend.replay(captured, core.deadline(started), &mut || {
            // Its errors are not the group's.
            said = launch.take().map_or(Ok(()), |launch| launch());
            said.is_ok()
        });
        let outcome = outcome.map(|()| Completion { path: Path::Nccl, enqueued: true, captured: false });
        self.judge(core, outcome, signature, sequence)?;
        said?;
        core.last = Some(LastCall { sequence, started, signature, path: Some(Path::Nccl) });
        self.profile.record_replay(captured.counts(), Path::Nccl);
        Ok(())
    }

    /// Waits until what has been enqueued is done.
    pub(super) fn synchronize(&self) -> Result<()> {
        let core = &mut *lock(&self.core);
        let outcome = core.check().and_then(|()| core.backend.synchronize(core.deadline(Instant::now())));
        let (signature, sequence) = core.last.map_or((NOTHING, 0), |l| (l.signature, l.sequence));
        let outcome = outcome.map(|()| Completion { path: Path::Local, enqueued: false, captured: false });
        self.judge(core, outcome, signature, sequence).map(drop)
    }

    /// Lets the others know that this rank makes no more calls.
    pub(super) fn leave(&self) {
        lock(&self.core).backend.leave();
    }

    /// Waits until the calls of all members are known to have been the same.
    pub(super) fn settle(&self, deadline: Instant) -> Result<()> {
        let core = &mut *lock(&self.core);
        let outcome = core.backend.settle(deadline);
        let (signature, sequence) = core.last.map_or((NOTHING, 0), |l| (l.signature, l.sequence));
        let outcome = outcome.map(|()| Completion { path: Path::Local, enqueued: false, captured: false });
        self.judge(core, outcome, signature, sequence).map(drop)
    }

    fn note(&self, signature: &Signature, completion: Completion, started: Instant) {
        if completion.captured {
            // Nothing is done yet: each launch counts.
        } else if completion.enqueued {
            self.profile.record_enqueued(signature, completion.path, started);
        } else {
            self.profile.record(signature, completion.path, started);
        }
    }

    /// What becomes of the group after a call.
    fn judge(
        &self,
        core: &mut Core,
        outcome: Result<Completion>,
        signature: Signature,
        sequence: u64,
    ) -> Result<Completion> {
        let error = match outcome {
            Ok(completion) => return Ok(completion),
            // Refused before it left the rank, or failed before.
            Err(error) if error.is_recoverable() || matches!(error, Error::Poisoned(_)) => return Err(error),
            Err(error) => error,
        };
        tracing::debug!(%error, call = %signature, sequence, "collective failed");
        Err(self.fail(core, error))
    }

    /// Gives the group up: tells the others, and refuses every later call. Returns the error, or the one it came from.
    fn fail(&self, core: &mut Core, error: Error) -> Error {
        let words = self.last_words.as_ref();
        let found = match error {
            Error::PeerLost { rank, .. } => {
                words.and_then(|words| words.of(rank)).map(|reason| (rank, reason))
            }
            _ => None,
        };
        let is_known = found.is_some();
        let error = found.map_or(error, |(rank, reason)| Error::PeerAborted { rank, reason });
        // The links first: they carry the reason at once, where the store may have to be waited for.
        core.backend.abort(&error);
        core.failed = Some(Arc::new(error.clone()));
        if let Some(words) = words.filter(|_| !is_known) {
            words.leave(&error);
        }
        error
    }

    /// Gives the group up for an error that came from beside its calls. Returns it.
    pub(super) fn abort(&self, error: Error) -> Error {
        let core = &mut *lock(&self.core);
        if core.failed.is_some() { error } else { self.fail(core, error) }
    }

    /// What a call on the worker ends with when code under it has panicked.
    pub(super) fn panicked(&self, panic: &(dyn Any + Send)) -> Error {
        let text = panic.downcast_ref::<&str>().copied();
        let text =
            text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        self.abort(Error::Transport(format!("an asynchronous call panicked on this rank: {text}")))
    }
}

/// Stands in errors and logs for a call that there was not.
const NOTHING: Signature =
    Signature { operation: crate::Operation::Barrier, dtype: crate::DType::U8, count: 0 };

/// A call that was done at once.
struct Done;

impl Ticket for Done {
    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn follow(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Core {
    /// When a call that began then is given up.
    fn deadline(&self, started: Instant) -> Instant {
        deadline::after(started, self.timeout)
    }

    fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |cause| Err(Error::Poisoned(Arc::clone(cause))))
    }

    /// Says of the newest call how it went.
    fn went(&mut self, path: Path) {
        if let Some(last) = &mut self.last {
            last.path = Some(path);
        }
    }

    /// The compute stream and, `aside` or not, the one on which calls are enqueued, if they must be ordered there.
    fn streams(&self, aside: bool, is_tracked: bool) -> Option<(Stream, Stream)> {
        let compute = is_tracked.then(|| self.backend.device()).flatten()?.stream();
        let on = if aside { self.backend.side().unwrap_or(compute) } else { compute };
        Some((compute.clone(), on.clone()))
    }

    /// Has a call come behind what else uses its slices of cudarc, and what uses them next behind it.
    fn ordered<'a, R>(
        &mut self,
        mut buffers: Buffers<'a>,
        aside: bool,
        enqueue: impl FnOnce(&mut Self, Buffers<'a>) -> Result<R>,
    ) -> Result<R> {
        let Some(streams) = self.streams(aside, buffers.is_tracked()) else { return enqueue(self, buffers) };
        let _until_enqueued = buffers.order(Some(&streams))?;
        enqueue(self, buffers)
    }

    fn is_alone(&self, signature: &Signature) -> bool {
        self.world_size == 1 && !signature.operation.is_point_to_point()
    }

    fn submit(
        &mut self,
        signature: Signature,
        sequence: u64,
        buffers: Buffers<'_>,
        started: Instant,
    ) -> Result<Completion> {
        self.check()?;
        self.last = Some(LastCall { sequence, started, signature, path: None });
        let call = buffers.call(signature, sequence, self.deadline(started));
        if self.is_alone(&signature) {
            // Every operation is at most a copy: all reductions of one value are the value.
            if let (Some(input), Some(output)) = (call.input, call.output) {
                self.backend.copy(input, output)?;
            }
            return Ok(Completion { path: Path::Local, enqueued: false, captured: false });
        }
        self.backend.submit(call)
    }
}

/// What a call reads and writes.
pub(super) enum Buffers<'a> {
    InPlace(Option<ViewMut<'a>>),
    OutOfPlace(Option<View<'a>>, Option<ViewMut<'a>>),
}

impl<'a> Buffers<'a> {
    /// Refuses what is not that of the signature: of a call in place, or of a message.
    fn check(&self, signature: &Signature, world_size: usize, memory: Memory) -> Result<()> {
        let chunks = if signature.operation.is_chunked() { world_size } else { 1 };
        let (input, output) = match self {
            Self::InPlace(buffer) => (None, buffer.as_ref()),
            Self::OutOfPlace(input, output) => (*input, output.as_ref()),
        };
        for view in input.into_iter().chain(output.map(ViewMut::as_view)) {
            let there = (view.dtype(), view.count(), view.memory());
            if there != (signature.dtype, signature.count * chunks, memory) {
                return Err(Error::invalid(format!(
                    "the buffer of an asynchronous {} held {} {} in {memory} when it was handed over, and lends {} {} in \
                     {} now; a buffer must lend the same elements every time",
                    signature.operation,
                    signature.count * chunks,
                    signature.dtype,
                    there.1,
                    there.0,
                    there.2
                )));
            }
        }
        Ok(())
    }

    fn is_tracked(&self) -> bool {
        let (input, output) = match self {
            Self::InPlace(buffer) => (&None, buffer),
            Self::OutOfPlace(input, output) => (input, output),
        };
        let output = output.as_ref().and_then(|o| o.as_view().slice());
        output.is_some() || input.and_then(|i| i.slice()).is_some()
    }

    /// Orders slices of cudarc on the second of two streams, the first being the compute stream. What is enqueued there until
    /// the result is dropped uses them.
    fn order<'s>(&mut self, streams: Option<&'s (Stream, Stream)>) -> Result<[Option<SyncOnDrop<'s>>; 2]>
    where
        'a: 's,
    {
        let Some((compute, on)) = streams.filter(|_| self.is_tracked()) else { return Ok([None, None]) };
        let (input, output) = match self {
            Self::InPlace(buffer) => (None, buffer.as_mut()),
            Self::OutOfPlace(input, output) => (input.as_mut(), output.as_mut()),
        };
        let slices =
            [input.as_ref().and_then(|i| i.slice()), output.as_ref().and_then(|o| o.as_view().slice())];
        slices.into_iter().flatten().try_for_each(|slice| tracked::check(slice, compute))?;
        let ordered = [
            input.and_then(|input| input.order(on.cudarc())),
            output.and_then(|output| output.order(on.cudarc())),
        ];
        tracked::outcome(on)?;
        Ok(ordered)
    }

    fn call(self, signature: Signature, sequence: u64, deadline: Instant) -> Call<'a> {
        let (in_place, input, output) = match self {
            Self::InPlace(buffer) => (true, None, buffer),
            Self::OutOfPlace(input, output) => (false, input, output),
        };
        Call { signature, sequence, deadline, in_place, input, output }
    }
}

impl Worker {
    pub(super) fn spawn(engine: Arc<Engine>, info: &GroupInfo) -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("ryz-{}-{}", info.name, info.rank))
            .spawn(move || {
                for job in queue {
                    let _queued = Queued(&engine);
                    // What panics here is the drop of a buffer that nobody waits for; those behind it go on.
                    let _ = catch_unwind(AssertUnwindSafe(|| job(&engine)));
                }
            })
            .map_err(|e| Error::Transport(format!("cannot start the group's worker thread: {e}")))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

/// An operation given to the worker, counted until it is over, however that comes.
struct Queued<'a>(&'a Engine);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        *lock(&self.0.queued) -= 1;
        self.0.idle.notify_all();
    }
}
