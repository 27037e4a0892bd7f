//! Whether the stores of a link's ends go past their caches.
//!
//! An ordinary store leaves the line in a cache, where a reader that shares this cache finds it. If the reader's processor has another
//! cache, the store first takes the line away from it: on such a machine 32 KiB take 14 µs to write, and 0.9 µs past the cache (by
//! non-temporal stores). Where both share a cache, stores past it make messages up to twice as slow. Virtual machines do not tell which
//! processors share one, and move; so writers time their ordinary stores, again and again.
//!
//! Each end tells the other what it found. If one end's stores are slow, the two share no cache. The other's stores may still be quick: then
//! the reads of what they leave are slow.

use std::time::Duration;

/// Pieces that are timed, of at least this many bytes.
pub(super) const TIMED_FROM: usize = 4 << 10;
/// Nanoseconds a byte from which ordinary stores are slow: between 0.1, shared and with a source in memory, and 0.43, not shared.
const SLOW: f64 = 0.3;
/// Pieces of one trial. Its quickest counts, as a thread may lose its processor in any.
const TRIAL: u32 = 4;
/// Pieces from one trial to the next.
const SETTLED: u32 = 256;

/// An end's ordinary stores are slow.
const ARE_SLOW: u32 = 1;
/// An end's stores go past its cache.
const PAST_CACHE: u32 = 2;
/// The rest of a finding counts the trials.
const ONE_TRIAL: u32 = 4;
/// The peer's finding expires after this many trials of this end. A peer that writes nothing makes no new ones.
const VALID_FOR: u32 = 2;

/// What a writer knows of its stores into one ring.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Stores {
    /// What the peer is to know.
    finding: u32,
    /// The peer's finding, and the trials since it was new.
    theirs: (u32, u32),
    /// The pieces until this phase ends.
    left: u32,
    /// In a trial, the nanoseconds a byte of its quickest piece.
    trial: Option<f64>,
}

impl Default for Stores {
    fn default() -> Self {
        Self { finding: 0, theirs: (0, 0), left: TRIAL, trial: Some(f64::INFINITY) }
    }
}

/// Whether the stores of an end with this finding go past its cache.
pub(super) fn goes_past_cache(finding: u32) -> bool {
    finding & PAST_CACHE != 0
}

impl Stores {
    /// Whether the next piece goes past the cache.
    pub(super) fn go_past_cache(&self) -> bool {
        self.trial.is_none() && goes_past_cache(self.finding)
    }

    /// Whether the next piece is to be timed.
    pub(super) fn is_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// Counts a piece of [`TIMED_FROM`] bytes or more. `took` is its time in a trial, `theirs` the peer's finding. After a trial, returns
    /// the finding for the peer.
    pub(super) fn note(
        &mut self,
        bytes: usize,
        took: Option<Duration>,
        theirs: impl FnOnce() -> u32,
    ) -> Option<u32> {
        if let (Some(quickest), Some(took)) = (&mut self.trial, took) {
            *quickest = quickest.min(took.as_nanos() as f64 / bytes as f64);
        }
        self.left -= 1;
        if self.left > 0 {
            return None;
        }
        let Some(quickest) = self.trial.take() else {
            (self.left, self.trial) = (TRIAL, Some(f64::INFINITY));
            return None;
        };
        self.left = SETTLED;
        let theirs = theirs();
        let age = if theirs == self.theirs.0 { self.theirs.1.saturating_add(1) } else { 0 };
        self.theirs = (theirs, age);
        let are_slow = quickest > SLOW;
        let is_theirs_slow = theirs & ARE_SLOW != 0 && age < VALID_FOR;
        let bits = u32::from(are_slow) * ARE_SLOW + u32::from(are_slow || is_theirs_slow) * PAST_CACHE;
        self.finding = (self.finding / ONE_TRIAL).wrapping_add(1).wrapping_mul(ONE_TRIAL) | bits;
        Some(self.finding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK_PIECE: Duration = Duration::from_micros(2);
    const SLOW_PIECE: Duration = Duration::from_micros(14);
    const ROUND: u32 = TRIAL + SETTLED;

    /// Which of the next pieces go past the cache, if an ordinary one takes as long as `ordinary` says. Checks that trials do not.
    fn pieces(stores: &mut Stores, theirs: u32, count: u32, ordinary: impl Fn(u32) -> Duration) -> Vec<bool> {
        let piece = |at| {
            let goes = stores.go_past_cache();
            assert!(!(goes && stores.is_trial()));
            let took = stores.is_trial().then(|| ordinary(at));
            stores.note(32 << 10, took, || theirs);
            goes
        };
        (0..count).map(piece).collect()
    }

    /// The pieces of one round, of which all but the trial go past the cache.
    fn past() -> Vec<bool> {
        (0..ROUND).map(|at| at >= TRIAL).collect()
    }

    #[test]
    fn stores_go_past_the_cache_while_ordinary_ones_are_slow() {
        let mut stores = Stores::default();
        assert!(pieces(&mut stores, 0, 10 * ROUND, |_| QUICK_PIECE).iter().all(|past| !past));
        assert_eq!(pieces(&mut stores, 0, ROUND, |_| SLOW_PIECE), past());
        // The ranks have moved to processors with one cache.
        assert!(pieces(&mut stores, 0, ROUND, |_| QUICK_PIECE).iter().all(|past| !past));
    }

    #[test]
    fn a_lost_processor_is_not_a_slow_store() {
        let mut stores = Stores::default();
        let took = |at| if at % TRIAL == 1 { QUICK_PIECE } else { Duration::from_millis(4) };
        assert!(pieces(&mut stores, 0, 3 * ROUND, took).iter().all(|past| !past));
    }

    #[test]
    fn slow_stores_of_the_peer_count_until_it_stops_writing() {
        let mut stores = Stores::default();
        for round in 0..10 {
            let trials_of_peer: u32 = round.min(4);
            let seen = pieces(&mut stores, trials_of_peer * ONE_TRIAL + ARE_SLOW, ROUND, |_| QUICK_PIECE);
            let expected = if round < 4 + VALID_FOR { past() } else { vec![false; ROUND as usize] };
            assert_eq!(seen, expected, "round {round}");
        }
    }

    #[test]
    fn both_ends_return_to_their_caches() {
        let (mut one, mut other) = (Stores::default(), Stores::default());
        for (took, goes) in
            [(SLOW_PIECE, true), (QUICK_PIECE, false), (SLOW_PIECE, true), (QUICK_PIECE, false)]
        {
            // Only one end's stores are slow. Each sees what the other found before.
            for _ in 0..3 {
                let (a, b) = (one.finding, other.finding);
                pieces(&mut one, b, ROUND, |_| took);
                pieces(&mut other, a, ROUND, |_| QUICK_PIECE);
            }
            assert_eq!([one.finding, other.finding].map(goes_past_cache), [goes, goes]);
        }
    }
}
