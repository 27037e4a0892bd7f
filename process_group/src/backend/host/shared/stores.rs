//! Whether a writer's ordinary stores are slow.
//!
//! An ordinary store leaves the line in a cache, where a reader that shares this cache finds it. If the reader's processor has another
//! cache, the store first takes the line away from it: on such a machine 32 KiB take 14 µs to write, and 0.9 µs past the cache (by
//! non-temporal stores). Where both share a cache, stores past it make messages up to twice as slow. Virtual machines do not tell which
//! processors share one, and move; so writers time their ordinary stores, again and again.

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
    are_slow: bool,
    /// The pieces until this phase ends.
    left: u32,
    /// In a trial, the nanoseconds a byte of its quickest piece.
    trial: Option<f64>,
}

impl Default for Stores {
    fn default() -> Self {
        Self { are_slow: false, left: TRIAL, trial: Some(f64::INFINITY) }
    }
}

impl Stores {
    /// Whether ordinary stores were slow in the last trial.
    pub(super) fn are_slow(&self) -> bool {
        self.are_slow
    }

    /// Whether the next piece is to be written by ordinary stores and timed.
    pub(super) fn is_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// A piece of [`TIMED_FROM`] bytes or more was written, in this time if it was timed. Returns whether a trial has ended.
    pub(super) fn note(&mut self, bytes: usize, took: Option<Duration>) -> bool {
        if let (Some(quickest), Some(took)) = (&mut self.trial, took) {
            *quickest = quickest.min(took.as_nanos() as f64 / bytes as f64);
        }
        self.left -= 1;
        if self.left > 0 {
            return false;
        }
        let ended = self.trial.take();
        *self = match ended {
            Some(quickest) => Self { are_slow: quickest > SLOW, left: SETTLED, trial: None },
            None => Self { are_slow: self.are_slow, ..Self::default() },
        };
        ended.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether each of the next pieces is part of a trial, or comes after one that found ordinary stores slow, if an ordinary one takes as
    /// long as `ordinary` says.
    fn pieces(stores: &mut Stores, count: u32, ordinary: impl Fn(u32) -> Duration) -> Vec<(bool, bool)> {
        let piece = |at| {
            let was = (stores.is_trial(), stores.are_slow());
            stores.note(32 << 10, was.0.then(|| ordinary(at)));
            was
        };
        (0..count).map(piece).collect()
    }

    const ROUND: u32 = TRIAL + SETTLED;

    #[test]
    fn a_trial_finds_out_whether_ordinary_stores_are_slow() {
        let (slow, quick) = (Duration::from_micros(14), Duration::from_micros(2));
        let round = |trial, settled| {
            [vec![(true, trial); TRIAL as usize], vec![(false, settled); SETTLED as usize]].concat()
        };
        let mut stores = Stores::default();
        for _ in 0..10 {
            assert_eq!(pieces(&mut stores, ROUND, |_| quick), round(false, false));
        }
        assert_eq!(pieces(&mut stores, ROUND, |_| slow), round(false, true));
        assert_eq!(pieces(&mut stores, ROUND, |_| slow), round(true, true));
        // The ranks have moved to processors with one cache.
        assert_eq!(pieces(&mut stores, ROUND, |_| quick), round(true, false));
    }

    #[test]
    fn a_lost_processor_is_not_a_slow_store() {
        let mut stores = Stores::default();
        let took = |at| Duration::from_micros(if at % TRIAL == 1 { 2 } else { 4000 });
        assert!(pieces(&mut stores, 3 * ROUND, took).iter().all(|(_, are_slow)| !are_slow));
    }
}
