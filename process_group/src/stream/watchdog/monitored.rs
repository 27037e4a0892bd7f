//! The object that a watchdog monitors, and its end.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::status::Status;
use crate::error::Error;

/// Time for the end of a communicator, after which it is abandoned.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The library that moves a group's data, as a watchdog monitors it.
pub(crate) trait Monitored: Send + Sync {
    /// Returns an error that the library reports.
    fn async_error(&self) -> Option<Error>;

    /// Ends it in good order, after all calls. May block for as long as the library does.
    fn finalize(&self);

    /// Returns true if all calls have ended, as [`finalize`](Self::finalize) has found.
    fn is_drained(&self) -> bool;

    /// Ends it by force: kernels and callers that wait inside the library return. May block for as long as the library does. Called
    /// once the group has failed, or has been finalized.
    fn abort(&self);
}

/// Ends a communicator by force, on a thread that is abandoned if the library does not return.
pub(super) fn abort_in_time(status: &Arc<Status>, monitored: &Arc<dyn Monitored>) {
    if !in_time(status, monitored, |monitored| monitored.abort()) {
        let group = &status.members.group;
        tracing::warn!(group, "a communicator could not be ended in time; it is left to itself");
    }
}

/// Returns true if that is done in time.
pub(super) fn in_time(status: &Arc<Status>, monitored: &Arc<dyn Monitored>, end: fn(&dyn Monitored)) -> bool {
    let monitored = Arc::clone(monitored);
    let (done, is_done) = mpsc::channel();
    let name = format!("ryz-end-{}", status.members.group);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        end(&*monitored);
        let _ = done.send(());
    });
    thread.is_ok() && is_done.recv_timeout(END_TIMEOUT).is_ok()
}
