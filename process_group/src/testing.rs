//! What unit tests of several modules share.

use std::sync::mpsc;
use std::time::Duration;

/// Far beyond what any unit test takes, and short enough for one that has failed.
pub(crate) const LATE: Duration = Duration::from_secs(20);

/// What `work` gives, which a mistake would have it never give.
pub(crate) fn in_time<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, result) = mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    result.recv_timeout(LATE).expect("it ends in time")
}
