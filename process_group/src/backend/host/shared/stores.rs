//! Whether a writer's stores go past its cache.
//!
//! An ordinary store leaves the line in a cache, where a reader that shares this cache finds it. If the reader's processor has another
//! cache, the store first takes the line away from it: on such a machine 32 KiB take 14 µs to write, and 0.9 µs past the cache. Where
//! both share a cache, stores past it make messages twice as slow. Virtual machines do not tell which processors share one, and
//! move; so writers time their ordinary stores, again and again.

use std::time::Duration;

/// Pieces that are timed, of at least this many bytes.
pub(super) const TIMED_FROM: usize = 4 << 10;
/// Nanoseconds a byte from which ordinary stores are slow: between 0.1, shared and with a source in memory, and 0.43, not shared.
const SLOW: f64 = 0.3;
/// Pieces of one trial. Its quickest counts, as a thread may lose its processor in any.
const TRIAL: u32 = 4;
/// Pieces from one trial to the next.
const SETTLED: u32 = 256;

/// What a writer knows of its stores into one ring.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Stores {
    past_cache: bool,
    /// The pieces until this phase ends.
    left: u32,
    /// In a trial, the nanoseconds a byte of its quickest piece.
    trial: Option<f64>,
}

impl Default for Stores {
    fn default() -> Self {
        Self { past_cache: false, left: TRIAL, trial: Some(f64::INFINITY) }
    }
}

impl Stores {
    /// Whether the next piece goes past the cache.
    pub(super) fn go_past_cache(&self) -> bool {
        self.past_cache
    }

    /// Whether the next piece is to be timed.
    pub(super) fn is_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// A piece of [`TIMED_FROM`] bytes or more was written, in this time if it was timed.
    pub(super) fn note(&mut self, bytes: usize, took: Option<Duration>) {
        if let (Some(quickest), Some(took)) = (&mut self.trial, took) {
            *quickest = quickest.min(took.as_nanos() as f64 / bytes as f64);
        }
        self.left -= 1;
        if self.left == 0 {
            *self = match self.trial {
                Some(quickest) => Self { past_cache: quickest > SLOW, left: SETTLED, trial: None },
                None => Self::default(),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of the next pieces went past the cache, if an ordinary one takes as long as `ordinary` says.
    fn pieces(stores: &mut Stores, count: u32, ordinary: impl Fn(u32) -> Duration) -> Vec<bool> {
        let piece = |at| {
            let went = stores.go_past_cache();
            let took = stores.is_trial().then(|| ordinary(at));
            stores.note(32 << 10, took);
            went
        };
        (0..count).map(piece).collect()
    }

    #[test]
    fn stores_go_past_the_cache_while_ordinary_ones_are_slow() {
        let (slow, quick) = (Duration::from_micros(14), Duration::from_micros(2));
        let mut stores = Stores::default();
        assert!(pieces(&mut stores, 10 * (TRIAL + SETTLED), |_| quick).iter().all(|past| !past));
        let past = pieces(&mut stores, TRIAL + SETTLED, |_| slow);
        assert_eq!(past, [vec![false; TRIAL as usize], vec![true; SETTLED as usize]].concat());
        // The ranks have moved to processors with one cache.
        assert!(pieces(&mut stores, TRIAL + SETTLED, |_| quick).iter().all(|past| !past));
    }

    #[test]
    fn a_lost_processor_is_not_a_slow_store() {
        let mut stores = Stores::default();
        let took = |at| Duration::from_micros(if at % TRIAL == 1 { 2 } else { 4000 });
        assert!(pieces(&mut stores, 3 * (TRIAL + SETTLED), took).iter().all(|past| !past));
    }
}
