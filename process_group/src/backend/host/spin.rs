//! How long to look for news without sleeping.

use std::time::{Duration, Instant};

/// How long a rank keeps its processor although it has no news, where each has one. Then it yields, as other programs may need
/// the processor, or the scheduler may have put the peer on it. Not sooner: with 1 µs, two ranks that the scheduler had put on
/// one processor stayed there for 10 to 25 ms, yielding to each other, while the second was idle; and where another program
/// computed on each processor, a yield gave it a whole time slice of 4 ms (Linux 6.18).
const ALONE: Duration = Duration::from_micros(20);

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
