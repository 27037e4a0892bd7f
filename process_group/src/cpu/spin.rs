//! The time for which a rank looks for news without sleeping.

use std::time::{Duration, Instant};

/// Time for which a rank without news keeps its processor if there is one for each rank. Then it yields: another program may need
/// the processor, or the scheduler may have put the peer there. 1 µs is too short (Linux 6.18): two ranks on one processor yielded
/// to each other for 10 to 25 ms while the other processor was idle, and a program that computed on the same processor got a time
/// slice of 4 ms from each yield.
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
