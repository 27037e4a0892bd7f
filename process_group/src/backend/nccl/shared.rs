//! What the caller's thread and the watcher of one communicator share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::NcclError;
use super::timings::Flights;
use crate::device::symbols::{Handle, text};
use crate::device::{Device, Nccl};
use crate::error::{Error, Result};
use crate::roster::Member;

pub(super) const IN_PROGRESS: i32 = 7;
/// How long a caller whose call has expired waits for the watcher to find out who is missing.
pub(super) const VERDICT: Duration = Duration::from_secs(3);
/// How long the end of a communicator may take before it is left to itself.
const RETIREMENT: Duration = Duration::from_secs(5);

/// What a caller asks of the watcher.
pub(super) enum Request {
    /// Give up: tell the others this.
    Abort(Error),
    /// A wait has come to its deadline: find out who is missing, and give up.
    Expire { what: String, waited: Duration, sequence: u64 },
}

/// One communicator of NCCL.
pub(super) struct Shared {
    pub(super) nccl: Nccl,
    pub(super) device: Device,
    pub(super) group: String,
    /// In group order.
    pub(super) members: Vec<Member>,
    /// This rank's position.
    pub(super) position: usize,
    /// Held while a function of NCCL runs on it. None before it is made and after it has been given up.
    pub(super) communicator: Mutex<Option<Handle>>,
    /// Whether `failure` is there.
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    failure_known: Condvar,
    /// Collectives enqueued so far.
    pub(super) sequence: AtomicU64,
    pub(super) request: Mutex<Option<Request>>,
    pub(super) stop: AtomicBool,
    pub(super) flights: Mutex<Flights>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(
        nccl: Nccl,
        device: &Device,
        group: &str,
        members: &[&Member],
        position: usize,
    ) -> Self {
        Self {
            nccl,
            device: device.clone(),
            group: group.into(),
            members: members.iter().map(|m| (*m).clone()).collect(),
            position,
            communicator: Mutex::new(None),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            failure_known: Condvar::new(),
            sequence: AtomicU64::new(0),
            request: Mutex::new(None),
            stop: AtomicBool::new(false),
            flights: Mutex::default(),
        }
    }

    /// Errors once the communicator has failed.
    pub(super) fn check(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(lock(&self.failure)
            .clone()
            .unwrap_or_else(|| Error::Transport("the communicator has failed".into())))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Makes this the failure unless there is one. Callers come back with it.
    pub(super) fn fail(&self, error: Error) -> bool {
        let mut failure = lock(&self.failure);
        if failure.is_some() {
            return false;
        }
        *failure = Some(error);
        self.failed.store(true, Ordering::Release);
        self.failure_known.notify_all();
        true
    }

    /// Asks the watcher to find out who is missing, and waits for its verdict.
    pub(super) fn expire(&self, what: String, waited: Duration, sequence: u64) -> Error {
        lock(&self.request).get_or_insert(Request::Expire { what: what.clone(), waited, sequence });
        let until = Instant::now() + VERDICT;
        let mut failure = lock(&self.failure);
        loop {
            if let Some(error) = &*failure {
                return error.clone();
            }
            let now = Instant::now();
            if now >= until {
                return Error::Timeout { what, waited, missing: Vec::new() };
            }
            failure = self
                .failure_known
                .wait_timeout(failure, until - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// NCCL's error for this code, with its own words.
    #[cold]
    pub(super) fn error(&self, call: &'static str, code: i32, communicator: Handle) -> Error {
        // SAFETY: any code is accepted, and a null communicator too; what is returned is text of the library.
        let (words, last) = unsafe {
            (text((self.nccl.ncclGetErrorString)(code)), text((self.nccl.ncclGetLastError)(communicator)))
        };
        Error::Nccl(NcclError { call, code, text: words, last })
    }

    /// Waits until NCCL is done with what `call` began on a communicator that does not block.
    ///
    /// Never sits inside NCCL: it asks again and again, and leaves at the deadline or once the group has failed.
    pub(super) fn settle(
        &self,
        call: &'static str,
        code: i32,
        communicator: Handle,
        deadline: Instant,
    ) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if code != IN_PROGRESS {
            return Err(self.error(call, code, communicator));
        }
        let started = Instant::now();
        loop {
            self.check()?;
            let mut state = 0;
            // SAFETY: the communicator is held by the caller; the pointer is to a live integer.
            let code = unsafe { (self.nccl.ncclCommGetAsyncError)(communicator, &raw mut state) };
            match (code, state) {
                (0, 0) => return Ok(()),
                (0, IN_PROGRESS) => {}
                (0, state) => return Err(self.error(call, state, communicator)),
                (code, _) => return Err(self.error("ncclCommGetAsyncError", code, communicator)),
            }
            let waited = started.elapsed();
            if Instant::now() >= deadline {
                let what = format!("{call} of group `{}`", self.group);
                return Err(Error::Timeout { what, waited, missing: Vec::new() });
            }
            if waited < Duration::from_millis(1) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Waits until `done`, the deadline, or a failure. At the deadline it finds out who is missing and gives up.
    pub(super) fn wait(
        &self,
        what: impl Fn() -> String,
        deadline: Instant,
        mut done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let started = Instant::now();
        loop {
            self.check()?;
            if done()? {
                // What an aborted collective left behind looks done.
                return self.check();
            }
            let waited = started.elapsed();
            if Instant::now() >= deadline {
                return Err(self.expire(what(), waited, self.sequence.load(Ordering::Acquire)));
            }
            if waited < Duration::from_micros(500) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Ends a communicator on a thread that is left to itself if NCCL does not come back from it.
    pub(super) fn retire(self: &Arc<Self>, handle: Handle, in_good_order: bool) {
        let shared = Arc::clone(self);
        let done = Arc::new((Mutex::new(false), Condvar::new()));
        let told = Arc::clone(&done);
        let thread = std::thread::Builder::new().name(format!("ryz-end-{}", self.group)).spawn(move || {
            if let Err(error) = shared.device.bind() {
                tracing::debug!(%error, "a communicator is left unended");
            } else {
                shared.end(handle, in_good_order);
            }
            *lock(&told.0) = true;
            told.1.notify_all();
        });
        if thread.is_err() {
            return;
        }
        let ended = lock(&done.0);
        let (ended, _) = done
            .1
            .wait_timeout_while(ended, RETIREMENT, |ended| !*ended)
            .unwrap_or_else(PoisonError::into_inner);
        if !*ended {
            tracing::warn!(
                group = self.group,
                "NCCL does not come back from ending a communicator; it is left"
            );
        }
    }

    fn end(&self, handle: Handle, in_good_order: bool) {
        if in_good_order {
            // SAFETY: this thread alone has the communicator now.
            let code = unsafe { (self.nccl.ncclCommFinalize)(handle) };
            if self
                .settle(
                    "ncclCommFinalize",
                    if code == 0 { IN_PROGRESS } else { code },
                    handle,
                    Instant::now() + RETIREMENT,
                )
                .is_ok()
            {
                // SAFETY: finalised, and used by nobody any more.
                let _ = unsafe { (self.nccl.ncclCommDestroy)(handle) };
                return;
            }
        }
        // SAFETY: this thread alone has the communicator now; aborting is allowed in any state.
        let _ = unsafe { (self.nccl.ncclCommAbort)(handle) };
    }
}
