//! The watchdog of one rank's end of a group: detects lost ranks, errors that the library found and calls that take too long, and
//! then ends the group, so that no kernel and no caller waits forever.
//!
//! [`core`] decides, without a socket, clock, thread or GPU. [`driver`] is the thread around it; [`observer`] is the thread that
//! queries the GPU. [`Status`] is the state that the driver shares with the caller. Callers report their calls through a channel
//! and lock nothing.

mod core;
mod driver;
mod monitored;
mod observer;
mod status;

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use self::core::GroupMembers;
pub(super) use self::core::{Called, CallerEvent};
use self::driver::{Driver, Report};
pub(crate) use self::monitored::Monitored;
use self::monitored::{abort_in_time, in_time};
use self::observer::Observer;
use self::status::Inside;
pub(crate) use self::status::{Pending, Status};
use super::control_mesh::ControlMesh;
use crate::device::{Event, Stream};
use crate::error::{Error, Result};
use crate::types::rank::{self, Rank};
use crate::types::sync::lock;

/// Timeout for the watchdog's verdict on an expired call.
const VERDICT: Duration = Duration::from_secs(3);

/// Timeout for the kernels of a closed group to end.
const DRAIN: Duration = Duration::from_secs(10);

/// One rank's watchdog.
pub(crate) struct Watchdog {
    status: Arc<Status>,
    monitored: Monitored,
    reports: Sender<Report>,
    /// Marks for reuse.
    free: Mutex<Receiver<Arc<Event>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Watchdog {
    /// Starts the watchdog. `stream` is the group's first stream; `mesh` connects the members of `status`.
    pub(in crate::stream) fn spawn(
        status: Arc<Status>,
        mesh: ControlMesh,
        monitored: Monitored,
        stream: Stream,
    ) -> Result<Self> {
        let (reports, inbox) = mpsc::channel();
        let (reuse, free) = mpsc::channel();
        let failed = |error| Error::system("cannot start a thread of the group's watchdog")(error);
        let observer =
            Observer::spawn(&status.members.group, monitored.clone(), stream, reuse).map_err(failed)?;
        let driver = Driver::new(Arc::clone(&status), mesh, monitored.clone(), observer, inbox);
        let thread = std::thread::Builder::new()
            .name(format!("ryz-watch-{}", status.members.group))
            .spawn(move || driver.run())
            .map_err(failed)?;
        let (free, thread) = (Mutex::new(free), Mutex::new(Some(thread)));
        Ok(Self { status, monitored, reports, free, thread })
    }

    /// Returns the state that the watchdog shares with callers.
    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.status
    }

    /// Returns an error once the group has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.status.check()
    }

    /// Reports an event of the caller's thread.
    pub(super) fn report(&self, event: CallerEvent) {
        // The driver has ended once the group is closed: the event is irrelevant then.
        let _ = self.reports.send(Report::Caller(event));
    }

    /// Reports a mark after all calls so far of a stream. A mark to `reuse` is returned once it has been reached.
    pub(super) fn report_mark(&self, stream: usize, event: Arc<Event>, reuse: bool) {
        let _ = self.reports.send(Report::Mark { stream, event, reuse });
    }

    /// Returns a reached mark, for reuse.
    pub(super) fn free_mark(&self) -> Option<Arc<Event>> {
        lock(&self.free).try_recv().ok()
    }

    /// Marks the caller as inside the library until the result is dropped. `event` makes the reported event from the number of the
    /// entry.
    ///
    /// # Errors
    /// Once the group has failed: nothing of the library may be used any more.
    pub(super) fn enter(&self, event: impl FnOnce(u64) -> CallerEvent) -> Result<Inside<'_>> {
        let inside = self.status.enter();
        self.report(event(inside.number()));
        self.status.check()?;
        Ok(inside)
    }

    /// Waits until `done`, the deadline, or a failure. At the deadline the watchdog identifies the missing rank, which can only be
    /// `peer` if there is one, and gives the group up.
    pub(super) fn wait(
        &self,
        what: impl Fn() -> String,
        peer: Option<Rank>,
        deadline: Instant,
        done: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let Err(waited) = self.status.poll(deadline, done)? else { return Ok(()) };
        let what = what();
        self.request(CallerEvent::Expire { what: what.clone(), waited, peer });
        let timeout = || Error::Timeout { what, waited, missing: Vec::new() };
        Err(self.status.failure_within(VERDICT).unwrap_or_else(timeout))
    }

    /// Gives the group up: tells the other members the reason, and ends the communicator, from the watchdog's thread. Never blocks.
    pub(crate) fn abort(&self, why: &Error) {
        if !self.status.has_failed() {
            self.request(CallerEvent::Abort(why.clone()));
        }
    }

    fn request(&self, event: CallerEvent) {
        self.status.requested.store(true, Ordering::Release);
        self.report(event);
    }

    /// Announces that this rank makes no more calls: the other members may learn how many it has made.
    pub(crate) fn announce_exit(&self) {
        self.report(CallerEvent::Leaving);
    }

    /// Waits until the calls of all members have been compared, at most until the deadline, at which it warns. All members do so
    /// after [`announce_exit`](Self::announce_exit).
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other calls, or fewer than another member's; [`Error::PeerLost`] names a member that has made
    /// fewer; [`Error::PeerAborted`] contains the finding of another member. Any other failure of the group, too.
    pub(crate) fn verify_calls(&self, deadline: Instant) -> Result<()> {
        self.report(CallerEvent::VerifyCalls { deadline });
        let late = deadline + VERDICT;
        let unverified = self.status.verified_by(late)?;
        if !unverified.is_empty() {
            let (group, ranks) = (&self.status.members.group, rank::list(&unverified));
            tracing::warn!(group, ranks, "their calls have not been compared with this rank's in time");
        }
        Ok(())
    }

    /// Waits until the watchdog has given up, as requested.
    fn await_failure(&self) {
        if self.status.requested.load(Ordering::Acquire) {
            let _ = self.status.failure_within(VERDICT);
        }
    }

    /// Ends the group, in good order unless it has failed, once `is_done` reports that its kernels are done.
    pub(crate) fn close_when(&self, is_done: impl FnMut() -> Result<bool>) {
        let Some(thread) = lock(&self.thread).take() else { return };
        // The other members must still learn of a failure that the watchdog has not handled, which then ends the group.
        self.await_failure();
        self.announce_exit();
        let is_past = matches!(self.status.poll(Instant::now() + DRAIN, is_done), Ok(Ok(())));
        let is_over = is_past && in_time(&self.status, &self.monitored, |m| m.nccl.finalize());
        let is_cut_off = !self.monitored.nccl.is_drained();
        if is_cut_off {
            // Aborted work may look done to the other members: they must be told before.
            self.abort(&Error::Transport("it leaves the group in the middle of a call".into()));
            self.await_failure();
        }
        self.status.stop.store(true, Ordering::Release);
        let _ = thread.join();
        if !is_over || is_cut_off {
            // After a failure, parts of the communicator may have been made after the group was given up.
            abort_in_time(&self.status, &self.monitored);
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.close_when(|| Ok(true));
    }
}
