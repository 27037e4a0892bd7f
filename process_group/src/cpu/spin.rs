//! The time for which a rank looks for news without sleeping.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Number of looks without news after which ranks that share memory compare their processors: more than an exchange between
/// ranks that run at the same time takes.
pub(super) const COMPARE_AFTER: u32 = 32;

/// The polling of a waiting rank before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPolicy {
    /// Maximum time to poll since the last news.
    pub(super) limit: Duration,
    /// True if the rank yields its processor between polls, because ranks share it.
    pub(super) yields: bool,
}

impl SpinPolicy {
    /// Spins or yields once and returns true. Returns false if the rank has polled for `limit`, or until `until`: it sleeps then.
    /// `shares_processor` is true if another rank needs this one's processor.
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

/// Moves this thread from processor `own` to one that it may use and that is not `taken`. Returns false if there is none.
///
/// The scheduler itself moves it only to a processor that idles: never while other programs keep all of them busy. Only the move
/// is wanted, so the thread may use all of them again when it is done.
pub(super) fn leave_processor(own: usize, taken: &[usize]) -> bool {
    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let mut others = allowed;
    // A peer's word may be any number.
    for processor in taken.iter().chain([&own]).filter(|processor| **processor < CpuSet::MAX_CPU) {
        others.unset(*processor);
    }
    let moved = others.count() > 0 && sched_setaffinity(None, &others).is_ok();
    if moved && let Err(error) = sched_setaffinity(None, &allowed) {
        tracing::warn!(%error, "a thread that left a processor shared with another rank may not use it again");
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_leaves_its_processor_may_still_use_all() {
        let allowed = sched_getaffinity(None).unwrap();
        let moved = leave_processor(rustix::thread::sched_getcpu(), &[]);
        assert_eq!(moved, allowed.count() > 1);
        assert_eq!(sched_getaffinity(None).unwrap(), allowed);
        let all: Vec<usize> = (0..2 * CpuSet::MAX_CPU).collect();
        assert!(!leave_processor(0, &all), "every processor is taken");
        assert_eq!(sched_getaffinity(None).unwrap(), allowed);
    }
}
