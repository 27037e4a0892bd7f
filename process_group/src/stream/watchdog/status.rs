//! The state that a group's caller, its watchdog and its communicator share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::core::{GroupMembers, Unverified};
use crate::error::{Error, Result};
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Time for which a wait polls without pause: a pass of a large model takes less, and a sleep costs more than its length.
const SPIN: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);

/// The members of a group, its failure, and whether a caller is inside the library.
pub(crate) struct Status {
    pub(crate) members: Arc<GroupMembers>,
    /// True if `verdict.failure` is set.
    failed: AtomicBool,
    verdict: Mutex<Verdict>,
    changed: Condvar,
    /// The calls that the GPU has not done.
    pending: Mutex<Option<Pending>>,
    /// Members that have sent a message.
    here: Vec<AtomicBool>,
    /// Numbers of the newest entry into the library, and of the newest that has returned.
    entered: AtomicU64,
    exited: AtomicU64,
    /// True if the watchdog has been asked to give up.
    pub(super) requested: AtomicBool,
    /// True if the watchdog is to end.
    pub(super) stop: AtomicBool,
}

/// The newest enqueued call, while the GPU is not known to have done all. It is the newest, not the oldest: the driver may not
/// report finished calls while the caller is blocked in it, and the rank that has not made the newest call is the one waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pending {
    /// The number of the newest collective.
    pub(crate) number: u64,
    /// The call; none for several calls.
    pub(crate) call: Option<CallFingerprint>,
    /// Time at which it was enqueued.
    pub(crate) enqueued: Instant,
}

#[derive(Default)]
struct Verdict {
    failure: Option<Error>,
    verified: Option<Result<Unverified>>,
}

impl Status {
    pub(crate) fn new(members: GroupMembers) -> Self {
        let GroupMembers { all, position, .. } = &members;
        Self {
            failed: AtomicBool::new(false),
            verdict: Mutex::default(),
            changed: Condvar::new(),
            pending: Mutex::default(),
            here: (0..all.len()).map(|member| AtomicBool::new(member == *position)).collect(),
            entered: AtomicU64::new(0),
            exited: AtomicU64::new(0),
            requested: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            members: Arc::new(members),
        }
    }

    /// Sets the calls that the GPU has not done.
    pub(super) fn set_pending(&self, pending: Option<Pending>) {
        *lock(&self.pending) = pending;
    }

    /// Returns the calls that the GPU had not done when the watchdog last looked, some hundredths of a second ago.
    pub(crate) fn pending(&self) -> Option<Pending> {
        *lock(&self.pending)
    }

    /// Notes a message of this member.
    pub(super) fn heard_from(&self, position: usize) {
        self.here[position].store(true, Ordering::Release);
    }

    /// Returns the members that have sent no message.
    pub(crate) fn absent(&self) -> Vec<Rank> {
        let members = self.members.all.iter().zip(&self.here);
        members.filter(|(_, here)| !here.load(Ordering::Acquire)).map(|(member, _)| member.rank).collect()
    }

    /// Returns an error once the group has failed.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.has_failed() {
            return Ok(());
        }
        let failure = lock(&self.verdict).failure.clone();
        Err(failure.unwrap_or_else(|| Error::Transport("the group has failed".into())))
    }

    pub(crate) fn has_failed(&self) -> bool {
        // Ordered with entries and exits: see `enter`.
        self.failed.load(Ordering::SeqCst)
    }

    /// Sets this failure unless there is one. Callers return with it.
    pub(super) fn fail(&self, error: Error) -> bool {
        let mut verdict = lock(&self.verdict);
        if verdict.failure.is_some() {
            return false;
        }
        verdict.failure = Some(error);
        self.failed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
        true
    }

    /// Waits for the failure, which may still come.
    pub(crate) fn failure_within(&self, patience: Duration) -> Option<Error> {
        let verdict = self
            .changed
            .wait_timeout_while(lock(&self.verdict), patience, |verdict| verdict.failure.is_none())
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        verdict.failure.clone()
    }

    pub(super) fn verified(&self, outcome: Result<Unverified>) {
        lock(&self.verdict).verified = Some(outcome);
        self.changed.notify_all();
    }

    /// Waits until calls have been compared, or the group has failed.
    pub(super) fn verified_by(&self, deadline: Instant) -> Result<Unverified> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let is_open = |verdict: &mut Verdict| verdict.failure.is_none() && verdict.verified.is_none();
        let mut verdict = self
            .changed
            .wait_timeout_while(lock(&self.verdict), patience, is_open)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        if let Some(failure) = &verdict.failure {
            return Err(failure.clone());
        }
        let silent = || Err(Error::Transport("the group's watchdog does not answer".into()));
        verdict.verified.take().unwrap_or_else(silent)
    }

    /// Marks a caller as inside the library until the result is dropped. The caller must [`check`](Self::check) after this: either
    /// it sees a failure, or the thread that fails the group sees it inside.
    pub(super) fn enter(&self) -> Inside<'_> {
        let number = self.entered.load(Ordering::Relaxed) + 1;
        self.entered.store(number, Ordering::SeqCst);
        Inside { status: self, number }
    }

    /// Returns the number of the newest entry that has returned.
    pub(super) fn exits(&self) -> u64 {
        self.exited.load(Ordering::SeqCst)
    }

    /// Returns true if a caller is inside the library. Once the group has failed and this is `false`, no caller enters any more.
    pub(crate) fn is_inside(&self) -> bool {
        self.entered.load(Ordering::SeqCst) > self.exited.load(Ordering::SeqCst)
    }

    /// Polls until `done` or a failure. At the deadline returns the time that has passed.
    pub(super) fn poll(
        &self,
        deadline: Instant,
        mut done: impl FnMut() -> Result<bool>,
    ) -> Result<Result<(), Duration>> {
        let started = Instant::now();
        loop {
            self.check()?;
            if done()? {
                // The results of an aborted collective look complete.
                return self.check().map(Ok);
            }
            let waited = started.elapsed();
            if Instant::now() >= deadline {
                return Ok(Err(waited));
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// A caller inside the library.
pub(crate) struct Inside<'a> {
    status: &'a Status,
    number: u64,
}

impl Inside<'_> {
    pub(super) const fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.status.exited.store(self.number, Ordering::SeqCst);
    }
}
