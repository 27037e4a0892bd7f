//! Executes the calls of a group: one backend, one call at a time, on the caller's thread or on the group's worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::span::EnteredSpan;

use super::GroupInfo;
use crate::backend::Completion;
use crate::backend::call::{AddNorm, Call, Interrupt};
use crate::device::Event;
use crate::device::buffer::{Memory, View, ViewMut};
use crate::error::{Error, Result};
use crate::factory::AnyBackend;
use crate::membership::store::{Store, group_key};
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::profile::Profile;
use crate::paths::Path;
use crate::stream::{self, StreamCapture, StreamGroup, StreamWork};
use crate::types::deadline;
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, Operation};
use crate::types::panic::panic_message;
use crate::types::rank::Rank;
use crate::types::sync::lock;

pub(super) struct GroupInner {
    pub(super) core: Mutex<Core>,
    /// Operations of the worker that are not done. Calls of the owner's thread come after all of them.
    pub(super) queued: Mutex<usize>,
    pub(super) idle: Condvar,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) profile: Arc<Profile>,
    /// The rank's flight recorder, if a manager made the group.
    pub(super) flight: Option<FlightRecorder>,
    pub(super) abort_reasons: Option<AbortReasons>,
    // Dropped after the core, whose backend ends with the last of its calls.
    pub(super) _closing: Closing,
}

/// Adds the last times to the profile when the backend has ended.
pub(super) struct Closing(pub(super) Arc<Profile>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Time for which a rank that lost another rank looks for the reason that the other has left.
pub(super) const REASON_WAIT: Duration = Duration::from_millis(150);

/// The reason for which a rank gave up, stored where the other ranks find it. A broken link cannot deliver it.
pub(super) struct AbortReasons {
    pub(super) store: Arc<dyn Store>,
    pub(super) group: String,
    pub(super) rank: Rank,
}

impl AbortReasons {
    fn key(&self, rank: Rank) -> String {
        group_key("abort-reason", &self.group, rank)
    }

    /// Returns the reason that a lost rank has left. Does not wait for a store that is lost too.
    fn of(&self, rank: Rank) -> Option<String> {
        let (store, key) = (Arc::clone(&self.store), self.key(rank));
        let (sender, answer) = mpsc::channel();
        let look = move || {
            let _ = sender.send(store.get(&key, Instant::now() + REASON_WAIT));
        };
        std::thread::Builder::new().name("ryz-abort-reason".into()).spawn(look).ok()?;
        let reason = answer.recv_timeout(2 * REASON_WAIT).ok()?.ok()?;
        Some(String::from_utf8_lossy(&reason).into_owned())
    }

    /// Stores this rank's reason; also one that another rank reported, since a rank that loses this rank cannot know that it only
    /// passed the reason on.
    fn publish(&self, error: &Error) {
        // The error itself counts; a failure to store it is no news to a rank that has lost the store.
        let _ = self.store.set(&self.key(self.rank), error.to_string().as_bytes());
    }
}

pub(super) struct Core {
    pub(super) backend: AnyBackend,
    /// The memory in which the buffers of calls must be.
    pub(super) memory: Memory,
    pub(super) failed: Option<Arc<Error>>,
    pub(super) profile: Arc<Profile>,
    pub(super) timeout: Duration,
    pub(super) world_size: usize,
    /// Checked by blocking calls.
    pub(super) interrupt: Arc<Interrupt>,
}

impl std::fmt::Debug for GroupInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupInner").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) jobs: Option<mpsc::Sender<Job>>,
    pub(super) thread: Option<JoinHandle<()>>,
}

pub(super) type Job = Box<dyn FnOnce(&GroupInner) + Send>;

impl GroupInner {
    /// Returns the span of a call for traces. If it is disabled, which is the case unless a program traces at level `debug`, it
    /// costs one comparison.
    fn span(&self, call: &CallFingerprint) -> EnteredSpan {
        let CallFingerprint { operation, dtype, count, .. } = call;
        tracing::debug_span!(
            "collective",
            group = self.profile.group(),
            op = operation.name(),
            dtype = dtype.name(),
            count
        )
        .entered()
    }

    /// Executes one call, which is done or enqueued when this returns.
    pub(super) fn run(
        &self,
        fingerprint: CallFingerprint,
        sequence: u64,
        buffers: Buffers<'_>,
    ) -> Result<()> {
        let _span = self.span(&fingerprint);
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        let outcome = core.submit(fingerprint, sequence, buffers, started, started);
        let completion = self.judge(core, outcome, fingerprint, sequence)?;
        let returned = Instant::now();
        core.end(&fingerprint, completion, started, returned);
        Ok(())
    }

    /// Executes one call that was queued under its fingerprint. Its buffers lend their elements again, and these must be the same
    /// as before. The other ranks already wait for the call, so a buffer that has changed fails the group.
    pub(super) fn run_queued(
        &self,
        fingerprint: CallFingerprint,
        sequence: u64,
        buffers: Buffers<'_>,
    ) -> Result<()> {
        {
            let core = &mut *lock(&self.core);
            core.check()?;
            if let Err(error) = buffers.check(&fingerprint, core.world_size, core.memory) {
                let error = self.fail(core, error);
                self.write_record();
                return Err(error);
            }
        }
        self.run(fingerprint, sequence, buffers)
    }

    /// Executes several calls, which the backend may combine.
    pub(super) fn run_all(&self, calls: Vec<(CallFingerprint, u64, Buffers<'_>)>) -> Result<()> {
        let Some(first) = calls.first().map(|c| (c.0, c.1)) else { return Ok(()) };
        let _span =
            tracing::debug_span!("collectives", group = self.profile.group(), calls = calls.len()).entered();
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        let outcome = core.submit_all(calls, started);
        self.judge(core, outcome, first.0, first.1)
    }

    /// Begins a call on a second stream of the GPU.
    pub(super) fn start(
        &self,
        fingerprint: CallFingerprint,
        sequence: u64,
        buffers: Buffers<'_>,
    ) -> Result<Box<dyn StreamWork>> {
        let _span = self.span(&fingerprint);
        let core = &mut *lock(&self.core);
        let started = Instant::now();
        let outcome = core.start(fingerprint, sequence, buffers, started);
        let (completion, work) = self.judge(core, outcome, fingerprint, sequence)?;
        let returned = Instant::now();
        core.end(&fingerprint, completion, started, returned);
        Ok(work)
    }

    /// Captures the following calls into a graph.
    pub(super) fn begin_capture(&self, is_timed: bool) {
        if let Some(backend) = lock(&self.core).backend.stream_mut() {
            backend.begin_capture(is_timed);
        }
    }

    /// Ends the capture.
    pub(super) fn end_capture(&self) -> Option<Arc<StreamCapture>> {
        lock(&self.core).backend.stream_mut().map(StreamGroup::end_capture)
    }

    /// Repeats captured calls, the last of which is collective number `sequence`.
    pub(super) fn replay<E: From<Error>>(
        &self,
        captured: Option<&Arc<StreamCapture>>,
        sequence: u64,
        launch: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let _span = tracing::debug_span!("replay", group = self.profile.group()).entered();
        let core = &mut *lock(&self.core);
        core.check()?;
        let started = Instant::now();
        let deadline = core.deadline(started);
        let (Some(captured), Some(backend)) = (captured, core.backend.stream_mut()) else { return launch() };
        let (fingerprint, path, _) = *captured.calls().counts().last().unwrap_or(&(NOTHING, Path::Local, 0));
        let calls = captured.calls().collectives().len() as u64;
        core.profile.begin(&fingerprint, sequence + 1 - calls, calls, started);
        let (mut launch, mut said) = (Some(launch), Ok(()));
        let outcome = backend.replay(captured, deadline, &mut || {
            // Errors of the launch are not those of the group.
            said = launch.take().map_or(Ok(()), |launch| launch());
            said.is_ok()
        });
        self.judge(core, outcome, fingerprint, sequence)?;
        if let Err(error) = said {
            core.profile.fail(Instant::now());
            return Err(error);
        }
        core.profile.end_replay(path, captured.calls().counts(), Instant::now());
        Ok(())
    }

    /// Waits until all enqueued work is done.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.wait_for(StreamGroup::synchronize)
    }

    /// Waits for an event on the GPU.
    pub(super) fn synchronize_event(&self, event: &Event) -> Result<()> {
        self.wait_for(|backend, deadline| backend.synchronize_event(event, deadline))
    }

    /// Waits with the group's deadline. Without a GPU there is nothing to wait for.
    fn wait_for(&self, wait: impl FnOnce(&mut StreamGroup, Instant) -> Result<()>) -> Result<()> {
        let core = &mut *lock(&self.core);
        let deadline = core.deadline(Instant::now());
        let outcome = core.check().and_then(|()| match core.backend.stream_mut() {
            Some(backend) => wait(backend, deadline),
            None => Ok(()),
        });
        self.judge_newest(core, outcome)
    }

    /// Tells the other ranks that this rank makes no more calls.
    pub(super) fn announce_exit(&self) {
        if let Some(backend) = lock(&self.core).backend.stream() {
            backend.watchdog().announce_exit();
        }
    }

    /// Waits until the calls of all members are known to have been the same.
    pub(super) fn verify_calls(&self, deadline: Instant) -> Result<()> {
        let core = &mut *lock(&self.core);
        let outcome =
            core.backend.stream().map_or(Ok(()), |backend| backend.watchdog().verify_calls(deadline));
        self.judge_newest(core, outcome)
    }

    /// Decides the state of the group after a call.
    fn judge<R>(
        &self,
        core: &mut Core,
        outcome: Result<R>,
        fingerprint: CallFingerprint,
        sequence: u64,
    ) -> Result<R> {
        let error = match outcome {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        core.profile.fail(Instant::now());
        self.profile.record_error(fingerprint.operation, &error);
        // The call was rejected before the rank sent anything, or the group had failed before.
        if error.is_recoverable() || matches!(error, Error::Poisoned(_)) {
            return Err(error);
        }
        let group = self.profile.group();
        tracing::debug!(group, %error, call = %fingerprint, sequence, "collective failed");
        let error = self.fail(core, error);
        self.write_record();
        Err(error)
    }

    /// As [`judge`](Self::judge), for work that follows the newest call.
    fn judge_newest(&self, core: &mut Core, outcome: Result<()>) -> Result<()> {
        let (fingerprint, sequence) =
            self.profile.last_call().map_or((NOTHING, 0), |last| (last.fingerprint, last.sequence));
        self.judge(core, outcome, fingerprint, sequence)
    }

    /// Gives the group up: tells the other ranks, and rejects every later call. Returns the error, or the one that caused it.
    fn fail(&self, core: &mut Core, error: Error) -> Error {
        // The watchdog of a group on GPUs has links without data, which are never in the middle of a frame: they can carry reasons.
        let reasons = self.abort_reasons.as_ref().filter(|_| core.backend.stream().is_none());
        let found = match error {
            Error::PeerLost { rank, .. } => {
                reasons.and_then(|reasons| reasons.of(rank)).map(|reason| (rank, reason))
            }
            _ => None,
        };
        let error = found.map_or(error, |(rank, reason)| Error::PeerAborted { rank, reason });
        // The links come first: they deliver the reason at once, while the store may cause a wait.
        core.backend.backend_mut().abort(&error);
        core.failed = Some(Arc::new(error.clone()));
        if let Some(reasons) = reasons {
            reasons.publish(&error);
        }
        core.profile.fail(Instant::now());
        core.profile.give_up(&error);
        error
    }

    /// Writes the flight record, if there is a folder for it. Called after all other ranks have been told: a slow disk delays none
    /// of them.
    pub(super) fn write_record(&self) {
        if let Some(flight) = &self.flight {
            flight.failed();
        }
    }

    /// Ends the worker's current call, and every later one. The call ends soon, and holds the lock until then.
    pub(super) fn interrupt(&self, error: &Error) {
        self.interrupt.set(error.clone());
    }

    /// Gives the group up for an error outside its calls. Returns the error. Writes no record: there may be more groups.
    pub(super) fn abort(&self, error: Error) -> Error {
        self.interrupt(&error);
        let core = &mut *lock(&self.core);
        if core.failed.is_some() { error } else { self.fail(core, error) }
    }

    /// Returns the error of a call on the worker in which code has panicked.
    pub(super) fn panicked(&self, panic: &(dyn Any + Send)) -> Error {
        let text = panic_message(panic);
        let error =
            self.abort(Error::Transport(format!("an asynchronous call panicked on this rank: {text}")));
        self.write_record();
        error
    }
}

/// Placeholder in errors and logs before the first call.
const NOTHING: CallFingerprint = CallFingerprint::new(Operation::Barrier, DType::U8, 0);

/// A call that completed at once.
struct Done;

impl StreamWork for Done {
    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn join(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Core {
    /// Returns the time at which a call that began at `started` is given up.
    fn deadline(&self, started: Instant) -> Instant {
        deadline::after(started, self.timeout)
    }

    fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |cause| Err(Error::Poisoned(Arc::clone(cause))))
    }

    /// Notes that a call reaches the backend.
    fn begin(&self, fingerprint: CallFingerprint, sequence: u64, started: Instant) {
        self.profile.begin(&fingerprint, sequence, 1, started);
    }

    /// Notes that the oldest call in progress is done or enqueued.
    fn end(
        &self,
        fingerprint: &CallFingerprint,
        completion: Completion,
        started: Instant,
        returned: Instant,
    ) {
        self.profile.end(fingerprint, completion, started, returned);
    }

    fn is_alone(&self, fingerprint: &CallFingerprint) -> bool {
        self.world_size == 1 && !fingerprint.operation.is_point_to_point()
    }

    /// Executes a call that began at `started`. Its deadline counts from `since`.
    fn submit(
        &mut self,
        fingerprint: CallFingerprint,
        sequence: u64,
        buffers: Buffers<'_>,
        started: Instant,
        since: Instant,
    ) -> Result<Completion> {
        self.check()?;
        self.begin(fingerprint, sequence, started);
        if self.is_alone(&fingerprint) {
            return self.copy(buffers);
        }
        let mut call = buffers.call(fingerprint, sequence, self.deadline(since));
        call.interrupt = Some(Arc::clone(&self.interrupt));
        self.backend.backend_mut().submit(call)
    }

    fn submit_all(
        &mut self,
        calls: Vec<(CallFingerprint, u64, Buffers<'_>)>,
        started: Instant,
    ) -> Result<()> {
        let is_alone = calls.iter().any(|(fingerprint, ..)| self.is_alone(fingerprint));
        if self.backend.stream().is_some() && !is_alone {
            self.check()?;
            for (fingerprint, sequence, _) in &calls {
                self.begin(*fingerprint, *sequence, started);
            }
        }
        if let Some(backend) = self.backend.stream_mut().filter(|_| !is_alone) {
            let deadline = deadline::after(started, self.timeout);
            let fingerprints: Vec<CallFingerprint> = calls.iter().map(|call| call.0).collect();
            let calls = calls
                .into_iter()
                .map(|(fingerprint, sequence, buffers)| buffers.call(fingerprint, sequence, deadline));
            let completions = backend.group(calls.collect(), deadline)?;
            let returned = Instant::now();
            for (fingerprint, completion) in fingerprints.iter().zip(completions) {
                self.end(fingerprint, completion, started, returned);
            }
            return Ok(());
        }
        for (fingerprint, sequence, buffers) in calls {
            let began = Instant::now();
            let completion = self.submit(fingerprint, sequence, buffers, began, started)?;
            self.end(&fingerprint, completion, began, Instant::now());
        }
        Ok(())
    }

    fn start(
        &mut self,
        fingerprint: CallFingerprint,
        sequence: u64,
        buffers: Buffers<'_>,
        started: Instant,
    ) -> Result<(Completion, Box<dyn StreamWork>)> {
        self.check()?;
        self.begin(fingerprint, sequence, started);
        let is_alone = self.is_alone(&fingerprint);
        let timeout = self.timeout;
        match self.backend.stream_mut().filter(|_| !is_alone) {
            Some(backend) => {
                backend.start(buffers.call(fingerprint, sequence, deadline::after(started, timeout)))
            }
            None => Ok((self.copy(buffers)?, Box::new(Done))),
        }
    }

    /// Executes a call in a group of one: every operation is at most a copy, as a reduction of one value is the value.
    fn copy(&self, buffers: Buffers<'_>) -> Result<Completion> {
        if let Buffers::OutOfPlace(Some(input), Some(mut output)) = buffers {
            match self.backend.stream() {
                Some(backend) => stream::copy(backend.device(), input, output)?,
                None => output.host()?.copy_from_slice(input.host()?),
            }
        }
        Ok(Completion { path: Path::Local, enqueued: false, captured: false, waited: Duration::ZERO })
    }
}

/// The input and output of a call.
pub(super) enum Buffers<'a> {
    InPlace(Option<ViewMut<'a>>),
    OutOfPlace(Option<View<'a>>, Option<ViewMut<'a>>),
    /// The terms of a sum, the result, and the operations after the sum.
    AddNorm(View<'a>, ViewMut<'a>, AddNorm<'a>),
}

impl<'a> Buffers<'a> {
    /// Rejects buffers that do not match the fingerprint of a call in place, or of a message.
    fn check(&self, fingerprint: &CallFingerprint, world_size: usize, memory: Memory) -> Result<()> {
        let chunks = if fingerprint.operation.is_chunked() { world_size } else { 1 };
        let (input, output) = match self {
            Self::InPlace(buffer) => (None, buffer.as_ref()),
            Self::AddNorm(terms, ..) => (Some(*terms), None),
            Self::OutOfPlace(input, output) => (*input, output.as_ref()),
        };
        for view in input.into_iter().chain(output.map(ViewMut::as_view)) {
            let there = (view.dtype(), view.count(), view.memory());
            if there != (fingerprint.dtype, fingerprint.count * chunks, memory) {
                return Err(Error::invalid(format!(
                    "the buffer of an asynchronous {} held {} {} in {memory} when it was handed over, and lends {} {} in \
                     {} now; a buffer must lend the same elements every time",
                    fingerprint.operation,
                    fingerprint.count * chunks,
                    fingerprint.dtype,
                    there.1,
                    there.0,
                    there.2
                )));
            }
        }
        Ok(())
    }

    fn call(self, fingerprint: CallFingerprint, sequence: u64, deadline: Instant) -> Call<'a> {
        let (in_place, input, output, add_norm) = match self {
            Self::InPlace(buffer) => (true, None, buffer, None),
            Self::OutOfPlace(input, output) => (false, input, output, None),
            Self::AddNorm(terms, out, add_norm) => (false, Some(terms), Some(out), Some(add_norm)),
        };
        Call { fingerprint, sequence, deadline, in_place, input, output, add_norm, interrupt: None }
    }
}

impl Worker {
    pub(super) fn spawn(engine: Arc<GroupInner>, info: &GroupInfo) -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("ryz-{}-{}", info.name, info.rank))
            .spawn(move || {
                for job in queue {
                    let _queued = Queued(&engine);
                    // The panic comes from the drop of a buffer that no caller waits for; the operations after it continue.
                    let _ = catch_unwind(AssertUnwindSafe(|| job(&engine)));
                }
            })
            .map_err(Error::system("cannot start the group's worker thread"))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

/// An operation of the worker, counted until it ends in any way.
struct Queued<'a>(&'a GroupInner);

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        *lock(&self.0.queued) -= 1;
        self.0.idle.notify_all();
    }
}
