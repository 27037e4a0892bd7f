//! What the caller's thread and the watcher of one communicator share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::handles::{Calls, Trunk};
use super::ledger::{Comparison, Ledger};
use super::messages::Messages;
use super::timings::{Awaited, Flights};
use crate::device::symbols::{Handle, text};
use crate::device::{Device, Nccl, NcclError};
use crate::error::{Error, Result};
use crate::foreign;
use crate::operation::Signature;
use crate::rank::Rank;
use crate::roster::Member;

/// How long a wait asks without pause: a pass of a large model takes less, and a nap costs more than its length.
const SPIN: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
/// How long a caller whose call has expired waits for the watcher to find out who is missing.
pub(super) const VERDICT: Duration = Duration::from_secs(3);
/// How long the others have to hear that a group is given up. The kernels of this rank that are then ended let theirs go on,
/// with whatever is there for data.
pub(super) const HEARD: Duration = Duration::from_millis(20);
/// How long a caller with whom NCCL has refused a call waits for the watcher to find out who is lost.
const RUMOUR: Duration = Duration::from_millis(300);

/// What a caller asks of the watcher.
#[derive(Clone)]
pub(super) enum Request {
    /// Give up: tell the others this.
    Abort(Error),
    /// A wait has come to its deadline: find out who is missing, and give up.
    Expire { what: String, waited: Duration, sequence: u64, peer: Option<Rank> },
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
    /// Held while others are split off them.
    pub(super) trunk: Mutex<Trunk>,
    pub(super) calls: Mutex<Calls>,
    /// Whether `failure` is there.
    failed: AtomicBool,
    failure: Mutex<Option<Error>>,
    failure_known: Condvar,
    /// Members from which something has been heard.
    here: Vec<AtomicBool>,
    /// Collectives enqueued so far, or about to be.
    pub(super) ledger: Mutex<Ledger>,
    /// Messages between two ranks, likewise.
    pub(super) messages: Mutex<Messages>,
    pub(super) request: Mutex<Option<Request>>,
    /// This rank calls nothing more.
    pub(super) leaves: AtomicBool,
    /// NCCL has ended what calls run on: all of them are over.
    pub(super) calls_are_over: AtomicBool,
    pub(super) stop: AtomicBool,
    /// Whether the members' calls are the same.
    pub(super) comparison: Mutex<Comparison>,
    /// Of the compute stream, and of the one of asynchronous calls.
    pub(super) flights: [Mutex<Flights>; 2],
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
            trunk: Mutex::default(),
            calls: Mutex::default(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            failure_known: Condvar::new(),
            here: (0..members.len()).map(|member| AtomicBool::new(member == position)).collect(),
            ledger: Mutex::default(),
            messages: Mutex::new(Messages::new(members.len())),
            request: Mutex::new(None),
            leaves: AtomicBool::new(false),
            calls_are_over: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            comparison: Mutex::new(Comparison::new(members.len())),
            flights: [Mutex::new(Flights::of_many()), Mutex::new(Flights::of_few())],
        }
    }

    /// Counts a call that is about to be enqueued.
    pub(super) fn note(&self, signature: Signature) {
        if signature.operation.is_point_to_point() {
            lock(&self.messages).note(&signature, 1);
        } else {
            lock(&self.ledger).note(signature);
        }
    }

    /// How many collectives this rank has enqueued.
    pub(super) fn collectives(&self) -> u64 {
        lock(&self.ledger).newest().sequence
    }

    /// Something has been heard from this member.
    pub(super) fn heard_from(&self, position: usize) {
        self.here[position].store(true, Ordering::Release);
    }

    /// Members from which nothing has been heard.
    pub(super) fn absent(&self) -> Vec<Rank> {
        let absent = self.members.iter().zip(&self.here).filter(|(_, here)| !here.load(Ordering::Acquire));
        absent.map(|(member, _)| member.rank).collect()
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

    /// The oldest calls of each stream that are not known to be done; those first that must be done first.
    ///
    /// Who enqueues holds the lock, and may be held up by the GPU: such a caller is found by being inside for too long.
    pub(super) fn oldest(&self) -> Vec<Awaited> {
        let oldest = self.flights.iter().filter_map(|flights| flights.try_lock().ok()?.oldest());
        let mut oldest: Vec<_> = oldest.collect();
        oldest.sort_by_key(|awaited| awaited.deadline);
        oldest
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
    fn expire(&self, what: String, waited: Duration, peer: Option<Rank>) -> Error {
        let sequence = self.collectives();
        lock(&self.request).get_or_insert(Request::Expire { what: what.clone(), waited, sequence, peer });
        self.failure_within(VERDICT).unwrap_or(Error::Timeout { what, waited, missing: Vec::new() })
    }

    /// What a call that NCCL refused fails with: NCCL may notice that a rank is lost before the watcher knows which.
    pub(super) fn refused(&self, error: Error) -> Error {
        self.failure_within(RUMOUR).unwrap_or(error)
    }

    /// The failure, which may still come.
    fn failure_within(&self, patience: Duration) -> Option<Error> {
        let failure = lock(&self.failure);
        let (failure, _) = self
            .failure_known
            .wait_timeout_while(failure, patience, |failure| failure.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        failure.clone()
    }

    /// NCCL's error for this code, with its own words.
    #[cold]
    pub(super) fn error(&self, call: &'static str, code: i32, communicator: Handle) -> Error {
        // SAFETY: any code is accepted, and a null communicator too; what is returned is text of the library.
        let (words, last) = unsafe {
            (
                text(foreign!(nccl, self.nccl.ncclGetErrorString(code code))),
                text(foreign!(nccl, self.nccl.ncclGetLastError(communicator as _))),
            )
        };
        Error::Nccl(NcclError { call, code, text: words, last })
    }

    /// Waits until `done`, the deadline, or a failure. At the deadline it finds out who is missing and gives up; that can
    /// only be `peer` if there is one.
    pub(super) fn wait(
        &self,
        what: impl Fn() -> String,
        peer: Option<Rank>,
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
                return Err(self.expire(what(), waited, peer));
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}
