//! What a watchdog watches, and how it ends.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::status::Status;
use crate::error::Error;

/// How long the end of a communicator may take before it is left to itself.
const RETIREMENT: Duration = Duration::from_secs(5);

/// What a watchdog watches: the library that moves a group's data.
pub(crate) trait Monitored: Send + Sync {
    /// An error that the library has found by itself.
    fn async_error(&self) -> Option<Error>;

    /// Ends it in good order, behind all calls. May block for as long as the library does.
    fn finalize(&self);

    /// Whether all calls are over, as [`finalize`](Self::finalize) has found.
    fn is_drained(&self) -> bool;

    /// Ends it by force: kernels and callers that wait inside the library come out. May block for as long as the library
    /// does. Called once the group has failed, or has been finalized.
    fn abort(&self);
}

/// Ends a communicator by force, on a thread that is left to itself if the library does not come back.
pub(super) fn retire(status: &Arc<Status>, monitored: &Arc<dyn Monitored>) {
    if !in_time(status, monitored, |monitored| monitored.abort()) {
        let group = &status.members.group;
        tracing::warn!(group, "a communicator could not be ended in time; it is left to itself");
    }
}

/// Whether that is done in time.
pub(super) fn in_time(status: &Arc<Status>, monitored: &Arc<dyn Monitored>, end: fn(&dyn Monitored)) -> bool {
    let monitored = Arc::clone(monitored);
    let (done, is_done) = mpsc::channel();
    let name = format!("ryz-end-{}", status.members.group);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        end(&*monitored);
        let _ = done.send(());
    });
    thread.is_ok() && is_done.recv_timeout(RETIREMENT).is_ok()
}
