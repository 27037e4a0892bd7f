//! What runs the calls of a group: one backend, one call at a time, on the caller's thread or on the group's worker.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::GroupInfo;
use crate::backend::{Backend, Path};
use crate::buffer::{View, ViewMut};
use crate::call::{Call, Signature};
use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::rank::Rank;
use crate::store::Store;

pub(super) struct Engine {
    pub(super) core: Mutex<Core>,
    /// Operations given to the worker and not done. Calls of the owner's thread come after all of them.
    pub(super) queued: Mutex<usize>,
    pub(super) idle: Condvar,
    pub(super) profile: Arc<Profile>,
    pub(super) last_words: Option<LastWords>,
}

/// How long a rank that lost another looks for what that one had to say.
const LAST_WORDS: Duration = Duration::from_millis(150);

/// Why a rank gave up, left where the others find it. A broken link cannot carry it.
pub(super) struct LastWords {
    pub(super) store: Arc<dyn Store>,
    pub(super) group: String,
    pub(super) rank: Rank,
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
            // Of others too: who loses this rank cannot know that it only passed a reason on.
            other => other,
        };
        // The error counts; that it could not be told is no news to whoever has lost the store.
        let _ = self.store.set(&key(self.rank), error.to_string().as_bytes());
        error
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
    pub(super) fn run(&self, signature: Signature, sequence: u64, buffers: Buffers<'_>) -> Result<()> {
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
pub(super) enum Buffers<'a> {
    InPlace(Option<ViewMut<'a>>),
    OutOfPlace(Option<View<'a>>, Option<ViewMut<'a>>),
}

/// In a group of one, every operation is at most a copy: all reductions of one value are the value.
fn alone(input: Option<View<'_>>, output: Option<ViewMut<'_>>) {
    if let (Some(input), Some(mut output)) = (input, output) {
        output.bytes().copy_from_slice(input.bytes());
    }
}

impl Worker {
    pub(super) fn spawn(engine: Arc<Engine>, info: &GroupInfo) -> Result<Self> {
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
