//! The collectives that a rank has called: their number, a digest of all, and the newest ones.

use serde::{Deserialize, Serialize};

use crate::link::wire::fingerprint;
use crate::types::history::{History, REMEMBERED};
use crate::types::operation::CallFingerprint;

/// This rank's collectives in a group, in call order.
#[derive(Default, Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct CallLog {
    head: LogHead,
    history: History<(CallFingerprint, u64)>,
}

/// The extent of a rank's log: the number of its newest collective, and the digest of all up to it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub(super) struct LogHead {
    pub(super) sequence: u64,
    pub(super) digest: u64,
}

impl CallLog {
    pub(super) fn push(&mut self, call: CallFingerprint) {
        let digest = extend(self.head.digest, &call);
        self.head = LogHead { sequence: self.head.sequence + 1, digest };
        self.history.push(self.head.sequence, (call, digest));
    }

    pub(super) fn head(&self) -> LogHead {
        self.head
    }

    /// Returns the digest of the log up to this call, if the log still contains it.
    pub(super) fn digest(&self, sequence: u64) -> Option<u64> {
        Some(self.history.get(sequence)?.1)
    }

    /// Returns the call of this number, if the log still contains it.
    pub(super) fn call(&self, sequence: u64) -> Option<CallFingerprint> {
        Some(self.history.get(sequence)?.0)
    }

    /// Returns the calls from `first` to `last` that the log still contains, with the number of the first of them.
    pub(super) fn calls(&self, first: u64, last: u64) -> (u64, Vec<CallFingerprint>) {
        if first > last {
            return (first, Vec::new());
        }
        let oldest = last.saturating_sub(REMEMBERED - 1).max(first);
        let is_remembered = |sequence: &u64| self.history.get(*sequence).is_some();
        let first = (oldest..=last).find(is_remembered).unwrap_or(last);
        (first, (first..=last).map_while(|sequence| self.call(sequence)).collect())
    }

    /// Returns the first of another rank's calls, numbered from `first`, that differs from this rank's.
    pub(super) fn divergence(&self, first: u64, theirs: &[CallFingerprint]) -> Option<Divergence> {
        (0u64..).zip(theirs).find_map(|(index, theirs)| {
            let sequence = first.checked_add(index)?;
            let mine = self.call(sequence)?;
            (mine != *theirs).then_some(Divergence { sequence, mine, theirs: *theirs })
        })
    }
}

/// The first call in which two ranks differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Divergence {
    /// Its number.
    pub(super) sequence: u64,
    /// The call of this rank.
    pub(super) mine: CallFingerprint,
    /// The call of the other rank.
    pub(super) theirs: CallFingerprint,
}

/// Mixes words as rustc's FxHash does: rotate, xor, multiply by an odd number.
fn extend(digest: u64, call: &CallFingerprint) -> u64 {
    const FACTOR: u64 = 0x517c_c1b7_2722_0a95;
    let bytes = fingerprint::pack(call);
    let (words, _) = bytes.as_chunks::<8>();
    words
        .iter()
        .fold(digest, |digest, word| (digest.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(FACTOR))
}
