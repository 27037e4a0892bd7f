//! The time at which an operation is given up.

use std::time::{Duration, Instant};

/// The maximum timeout of the configuration: adding it to the present time is always possible.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Returns the end of `timeout`, which a caller may have set to [`Duration::MAX`] to wait forever.
pub(crate) fn after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(LONGEST)
}
