//! One call of a ring: words that one thread writes and any thread reads, without a lock.
//!
//! The stamp is odd while the words change, and never takes the same value twice. A reader keeps its copy if the stamp was even
//! before the copy and is the same after it. `tests/slot.rs` has loom run every interleaving of this file.

use super::atomic::{AtomicU64, Ordering, TRIES, fence, spin_loop};

/// Number, fingerprint (two words), begin, end, and the state: calls, path and outcome.
pub(super) const WORDS: usize = 6;

/// A slot, one cache line long.
#[derive(Default, Debug)]
#[repr(align(64))]
pub(super) struct Slot {
    /// `4 × call + 1` to `4 × call + 4`: being started, started, being finished, finished. 0 in an unused slot.
    stamp: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Slot {
    /// Changes words; meanwhile the stamp is `stamp + 1`.
    pub(super) fn write(&self, stamp: u64, words: &[(usize, u64)]) {
        self.stamp.store(stamp, Ordering::Relaxed);
        fence(Ordering::Release);
        for (index, word) in words {
            self.words[*index].store(*word, Ordering::Relaxed);
        }
        self.stamp.store(stamp + 1, Ordering::Release);
    }

    /// Returns a word, for the thread that writes.
    pub(super) fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }

    /// Returns the words of call `call`, if the slot still contains them.
    pub(super) fn read(&self, call: u64) -> Option<[u64; WORDS]> {
        for _ in 0..TRIES {
            let stamp = self.stamp.load(Ordering::Acquire);
            if stamp.checked_sub(1).map(|stamp| stamp / 4) != Some(call) {
                return None;
            }
            let words = std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if stamp.is_multiple_of(2) && self.stamp.load(Ordering::Relaxed) == stamp {
                return Some(words);
            }
            spin_loop();
        }
        None
    }
}
