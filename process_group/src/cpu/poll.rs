//! Waits for descriptors.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

/// Waits until a descriptor has news, or for at most this time.
///
/// # Errors
/// Those of the system, but for an interruption.
pub(super) fn poll_for(descriptors: &mut [PollFd<'_>], most: Duration) -> io::Result<()> {
    match poll(descriptors, Some(&timespec(most))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}
