//! When to give up.

use std::time::{Duration, Instant};

/// As long as the longest timeout of the configuration: adding it to the present time is always possible.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The end of `timeout`, which a caller may have given as [`Duration::MAX`] to wait for good.
pub(crate) fn after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(LONGEST)
}
