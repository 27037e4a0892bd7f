//! The time for which a rank looks for news without sleeping.

use std::time::{Duration, Instant};

/// Time for which a rank without news keeps its processor if there is one for each rank. Then it yields: another program may need
/// the processor, or the scheduler may have put the peer there. Much less is too short: two ranks on one processor yield to each
/// other for milliseconds while another processor is idle, and each yield gives a computing program a whole time slice.
const ALONE: Duration = Duration::from_micros(20);

#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPolicy {
    /// Time since the last news.
    pub(super) limit: Duration,
    /// True if the rank yields its processor in between, because ranks share it.
    pub(super) yields: bool,
}

impl SpinPolicy {
    /// Returns true if the rank is to look again at once, which it does until `until` at most.
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
