//! The time for which a rank looks for news without sleeping.

use std::time::{Duration, Instant};

/// Number of looks without news after which ranks that share memory compare their processors: more than an exchange between
/// ranks that run at the same time takes.
pub(super) const COMPARE_AFTER: u32 = 32;
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPolicy {
    /// Time since the last news.
    pub(super) limit: Duration,
    /// True if the rank yields its processor in between, because ranks share it.
    pub(super) yields: bool,
}

impl SpinPolicy {
    /// Returns true if the rank is to look again at once, which it does until `until` at most. `shares_processor` is true if
    /// another rank needs this one's processor.
    pub(super) fn look_again(&self, idle_since: Instant, until: Instant, shares_processor: bool) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(idle_since) >= self.limit || now >= until {
            return false;
        }
        if self.yields || shares_processor {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        true
    }
}
