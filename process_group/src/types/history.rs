//! The newest collectives of a rank.

/// Number of remembered calls. A rank gets ahead of its peers only as far as its messages fit the links' buffers, or its enqueued
/// work fits the GPU's queue.
pub(crate) const REMEMBERED: u64 = 4096;

/// A value for each of the newest calls, by the call's number.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct History<T> {
    calls: Vec<(u64, T)>,
}

impl<T> Default for History<T> {
    fn default() -> Self {
        Self { calls: Vec::new() }
    }
}

impl<T: Copy> History<T> {
    pub(crate) fn push(&mut self, sequence: u64, what: T) {
        let slot = (sequence % REMEMBERED) as usize;
        if slot >= self.calls.len() {
            // Numbers begin at 1 and are consecutive; entries that fill a gap have number 0, which no call has.
            self.calls.resize(slot + 1, (0, what));
        }
        self.calls[slot] = (sequence, what);
    }

    pub(crate) fn get(&self, sequence: u64) -> Option<T> {
        let (number, what) = self.calls.get((sequence % REMEMBERED) as usize)?;
        (*number == sequence && sequence > 0).then_some(*what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_remembered_by_their_numbers() {
        let mut history = History::default();
        assert_eq!(history.get(0), None);
        for sequence in 2..=REMEMBERED + 2 {
            history.push(sequence, sequence * 10);
        }
        for (sequence, found) in [(0, None), (1, None), (2, None), (3, Some(30)), (REMEMBERED + 3, None)] {
            assert_eq!(history.get(sequence), found, "{sequence}");
        }
        assert_eq!(history.get(REMEMBERED + 2), Some((REMEMBERED + 2) * 10));
    }
}
