//! How long to look for news without sleeping.

use std::time::{Duration, Instant};

/// How long a rank keeps its processor although it has no news. Other processes may want it, and the peer may be waiting for
/// the same one.
const ALONE: Duration = Duration::from_micros(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct SpinPolicy {
    /// Since the last news.
    pub(super) limit: Duration,
    /// Give the processor to others in between, because ranks share it.
    pub(super) yields: bool,
}

impl SpinPolicy {
    /// Whether to look again at once, as one does until `until` at most.
    pub(super) fn look_again(&self, idle_since: Instant, until: Instant) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(idle_since) >= self.limit || now >= until {
            return false;
        }
        if self.yields || now.saturating_duration_since(idle_since) >= ALONE {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        true
    }
}
