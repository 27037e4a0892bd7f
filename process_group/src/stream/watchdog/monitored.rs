//! What a watchdog monitors, and its end.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::status::Status;
use crate::error::Error;
use crate::gpu::{AbortWord, NcclComm};

/// Time for the end of a communicator, after which it is abandoned.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What moves a group's data, as a watchdog monitors it: NCCL's communicators, and kernels of this crate that wait for others.
#[derive(Clone)]
pub(crate) struct Monitored {
    pub(crate) nccl: Arc<NcclComm>,
    pub(crate) abort: Arc<AbortWord>,
}

impl Monitored {
    /// Returns an error that NCCL reports, or that of a kernel.
    pub(super) fn async_error(&self) -> Option<Error> {
        self.nccl.async_error().or_else(|| {
            let gave_up = "a kernel has waited an hour for its peers, and nobody ended it";
            self.abort.is_set().then(|| Error::Transport(gave_up.into()))
        })
    }

    /// Ends it by force: kernels and callers that wait inside NCCL return. May block for as long as NCCL does. Called once the group
    /// has failed, or has been finalized.
    fn abort(&self) {
        // This comes first: NCCL waits for earlier work in the stream.
        self.abort.set();
        self.nccl.abort();
    }
}

/// Ends a communicator by force, on a thread that is abandoned if the library does not return.
pub(super) fn abort_in_time(status: &Status, monitored: &Monitored) {
    if !in_time(status, monitored, Monitored::abort) {
        let group = &status.members.group;
        tracing::warn!(group, "a communicator could not be ended in time; it is left to itself");
    }
}

/// Returns true if that is done in time.
pub(super) fn in_time(status: &Status, monitored: &Monitored, end: fn(&Monitored)) -> bool {
    let monitored = monitored.clone();
    let (done, is_done) = mpsc::channel();
    let name = format!("ryz-end-{}", status.members.group);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        end(&monitored);
        let _ = done.send(());
    });
    thread.is_ok() && is_done.recv_timeout(END_TIMEOUT).is_ok()
}
