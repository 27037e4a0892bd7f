//! Finds ranks whose calls differ.
//!
//! The libraries that run collectives on a GPU compare nothing: ranks whose calls differ get wrong values, or wait
//! forever. So ranks send each other the heads of their logs. A rank that has reached the same call compares the two digests.
//! If they differ, the rank sends its calls since the last matching head. The rank that finds the divergence reports it.

use std::time::{Duration, Instant};

use super::call_log::{CallLog, Divergence, LogHead};
use crate::types::operation::CallFingerprint;

/// Timeout for a rank to report which call diverged.
const ANSWERS: Duration = Duration::from_millis(500);

/// The knowledge of the other members' calls.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct DesyncDetector {
    /// The newest head of each member that has not been compared yet.
    heads: Vec<Option<LogHead>>,
    /// The call up to which each member's log is known to equal this rank's.
    agreed: Vec<u64>,
    /// Total number of collectives of each member that makes no more.
    last: Vec<Option<u64>>,
    /// Calls that a member has sent, and the number of the first: a member that has left cannot be asked.
    calls: Vec<(u64, Vec<CallFingerprint>)>,
    /// The number of the newest collective that the other ranks have been told of.
    told: u64,
    /// The member whose head differs, the time since when that is known, and the last call to which it applies.
    disputed: Option<(Instant, usize, u64)>,
}

/// The result of a comparison.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Finding {
    /// The other members do not have this head yet.
    NewHead(LogHead),
    /// Some call differs: this rank's calls from this number on, for the other members to find out which.
    Disputed(u64, Vec<CallFingerprint>),
    /// The call that this member made differs from this rank's.
    Diverged(usize, Divergence),
    /// No rank has found out which call of this member differs; it is one up to this number.
    Unresolved(usize, u64),
}

/// The comparison of all members that make no more collectives.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// All have made the same.
    Same,
    /// A call of a member differs, and it is not known yet which one.
    Disputed,
    /// These members have not sent their last head, or it has not been compared.
    Open(Vec<usize>),
    /// This member has made more: this is their number.
    More(usize, u64),
}

impl DesyncDetector {
    pub(super) fn new(members: usize) -> Self {
        let (heads, agreed, last) = (vec![None; members], vec![0; members], vec![None; members]);
        Self { heads, agreed, last, calls: vec![(1, Vec::new()); members], told: 0, disputed: None }
    }

    /// Stores the head of a member's log.
    pub(super) fn head(&mut self, position: usize, head: LogHead) {
        let pending = &mut self.heads[position];
        if pending.is_none_or(|pending| pending.sequence < head.sequence) {
            *pending = Some(head);
        }
    }

    /// Stores the last head of a member that makes no more collectives.
    pub(super) fn last_head(&mut self, position: usize, head: LogHead) {
        self.head(position, head);
        self.last[position] = Some(head.sequence);
    }

    /// Stores calls that a member has made, from this number on.
    pub(super) fn calls(&mut self, position: usize, first: u64, calls: &[CallFingerprint]) {
        let known = &mut self.calls[position];
        if known.0.checked_add(known.1.len() as u64) != Some(first) {
            *known = (first, Vec::new());
        }
        known.1.extend(calls);
    }

    /// For a rank at `me` that makes no more calls: returns the calls that a member may not have compared, and the number of the
    /// first.
    pub(super) fn uncompared(&self, log: &CallLog, me: usize) -> (u64, Vec<CallFingerprint>) {
        let others = self.agreed.iter().enumerate().filter(|(position, _)| *position != me);
        let agreed = others.map(|(_, agreed)| *agreed).min().unwrap_or(0);
        log.calls(agreed + 1, log.head().sequence)
    }

    /// Returns a member that makes no more collectives and has made fewer than `made`, with their number.
    pub(super) fn short_of(&self, made: u64) -> Option<(usize, u64)> {
        let mut ended = self.last.iter().enumerate();
        ended.find_map(|(position, last)| last.filter(|last| *last < made).map(|last| (position, last)))
    }

    /// Returns true if some call differs, and it is not known yet which one.
    pub(super) fn is_disputed(&self) -> bool {
        self.disputed.is_some()
    }

    /// Compares the totals of all other members, which like the member at `me` make no more calls, with `made` collectives.
    pub(super) fn verdict(&self, me: usize, made: u64) -> Verdict {
        if self.is_disputed() {
            return Verdict::Disputed;
        }
        let mut open = Vec::new();
        for position in (0..self.last.len()).filter(|position| *position != me) {
            match self.last[position] {
                Some(last) if last > made => return Verdict::More(position, last),
                Some(last) if last == made && self.agreed[position] == made => {}
                _ => open.push(position),
            }
        }
        if open.is_empty() { Verdict::Same } else { Verdict::Open(open) }
    }

    /// Compares the members' heads with this rank's log, as far as the log reaches. Drops a head that the log no longer contains.
    pub(super) fn compare(&mut self, log: &CallLog, now: Instant) -> Vec<Finding> {
        let mut found = Vec::new();
        let head = log.head();
        if head.sequence > self.told {
            let known = std::mem::replace(&mut self.told, head.sequence);
            found.push(Finding::NewHead(head));
            // A member that has left has sent its calls, and sends nothing about the new ones.
            for (position, (first, theirs)) in self.calls.iter().enumerate() {
                let next = (known + 1).max(*first);
                let theirs = theirs.get((next - first) as usize..).unwrap_or_default();
                if let Some(divergence) = log.divergence(next, theirs) {
                    found.push(Finding::Diverged(position, divergence));
                    return found;
                }
            }
        }
        if let Some((since, position, sequence)) = self.disputed {
            if now.saturating_duration_since(since) > ANSWERS {
                found.push(Finding::Unresolved(position, sequence));
            }
            return found;
        }
        for (position, pending) in self.heads.iter_mut().enumerate() {
            let Some(LogHead { sequence, digest }) = pending.take_if(|h| h.sequence <= head.sequence) else {
                continue;
            };
            match log.digest(sequence) {
                Some(mine) if mine == digest => self.agreed[position] = self.agreed[position].max(sequence),
                Some(_) => {
                    self.disputed = Some((now, position, sequence));
                    let (first, calls) = log.calls(self.agreed[position] + 1, sequence);
                    found.push(Finding::Disputed(first, calls));
                    break;
                }
                None => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::history::REMEMBERED;
    use crate::types::operation::{Operation, ReduceOp};
    use proptest::prelude::*;

    fn call(count: usize) -> CallFingerprint {
        CallFingerprint::new(Operation::AllReduce(ReduceOp::Sum), DType::F32, count)
    }

    fn log_of(calls: impl IntoIterator<Item = usize>) -> CallLog {
        let mut log = CallLog::default();
        for count in calls {
            log.push(call(count));
        }
        log
    }

    fn compare(detector: &mut DesyncDetector, log: &CallLog) -> Vec<Finding> {
        detector.compare(log, Instant::now())
    }

    proptest! {
        #[test]
        fn the_first_divergence_is_found_wherever_it_is(
            mut counts in proptest::collection::vec(0usize..4, 1..6000), at: proptest::sample::Index,
            asked in 1u64..6000,
        ) {
            let mine = log_of(counts.iter().copied());
            let at = at.index(counts.len());
            counts[at] += 7;
            let theirs = log_of(counts.iter().copied());
            let asked = asked.min(counts.len() as u64);
            let mut detector = DesyncDetector::new(2);
            detector.head(1, log_of(counts[..asked as usize].iter().copied()).head());
            let found = compare(&mut detector, &mine);
            prop_assert_eq!(&found[0], &Finding::NewHead(mine.head()));
            let forgotten = asked + REMEMBERED <= mine.head().sequence;
            if asked <= at as u64 || forgotten {
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(detector.agreed[1], if forgotten { 0 } else { asked });
                return Ok(());
            }
            prop_assert_eq!(detector.agreed[1], 0);
            let Finding::Disputed(first, calls) = &found[1] else { panic!("{found:?}") };
            let sequence = at as u64 + 1;
            let known = sequence >= *first && sequence + REMEMBERED > theirs.head().sequence;
            let divergence = known
                .then(|| Divergence { sequence, mine: call(counts[at]), theirs: call(counts[at] - 7) });
            prop_assert_eq!(theirs.divergence(*first, calls), divergence);
            prop_assert_eq!((first + calls.len() as u64, theirs.divergence(u64::MAX - 1, calls)), (asked + 1, None));
        }
    }

    #[test]
    fn a_rank_that_is_behind_compares_when_it_has_come_as_far() {
        let theirs = log_of([1, 2, 3]);
        let mut detector = DesyncDetector::new(2);
        detector.head(1, theirs.head());
        let mut mine = log_of([1, 2]);
        assert_eq!(compare(&mut detector, &mine), [Finding::NewHead(mine.head())]);
        assert_eq!(compare(&mut detector, &mine), []);
        mine.push(call(4));
        let found = compare(&mut detector, &mine);
        assert_eq!(found[1], Finding::Disputed(1, vec![call(1), call(2), call(4)]));
        // Once is enough, and one of the ranks has to find it.
        assert_eq!(compare(&mut detector, &mine), []);
        assert_eq!(detector.compare(&mine, Instant::now() + 2 * ANSWERS), [Finding::Unresolved(1, 3)]);
    }

    #[test]
    fn a_member_that_has_left_is_held_to_the_calls_it_has_sent() {
        let theirs = log_of(1..=200);
        // It knows that 150 are the same.
        let mut its = DesyncDetector::new(2);
        its.head(0, log_of(1..=150).head());
        compare(&mut its, &theirs);
        let (first, calls) = its.uncompared(&theirs, 1);
        assert_eq!((first, calls.len(), calls[0]), (151, 50, call(151)));
        let mut detector = DesyncDetector::new(2);
        // The calls come in two parts, after older ones.
        detector.calls(1, 20, &[call(20), call(21)]);
        detector.calls(1, 151, &calls[..30]);
        detector.calls(1, 181, &calls[30..]);
        detector.last_head(1, theirs.head());
        assert_eq!(detector.calls[1], (151, calls));
        // This rank is behind, makes the same calls, and then another call, long before it has reached the head.
        let mut mine = log_of(1..=182);
        assert_eq!(compare(&mut detector, &mine), [Finding::NewHead(mine.head())]);
        mine.push(call(1));
        let divergence = Divergence { sequence: 183, mine: call(1), theirs: call(183) };
        assert_eq!(compare(&mut detector, &mine)[1..], [Finding::Diverged(1, divergence)]);
    }

    #[test]
    fn a_member_that_leaves_sends_what_anybody_may_not_have_compared() {
        let mine = log_of(0..10_000);
        let first_of = |heads: [usize; 2]| {
            let mut detector = DesyncDetector::new(3);
            for (position, count) in [0, 2].into_iter().zip(heads) {
                detector.head(position, log_of(0..count).head());
            }
            compare(&mut detector, &mine);
            let (first, calls) = detector.uncompared(&mine, 1);
            assert_eq!(first + calls.len() as u64, 10_001);
            first
        };
        assert_eq!(first_of([9_000, 9_990]), 9_001);
        assert_eq!(first_of([10_000, 10_000]), 10_001);
        // These are not more than it remembers.
        assert_eq!(first_of([5, 10_000]), 10_001 - REMEMBERED);
        let none = DesyncDetector::new(1).uncompared(&CallLog::default(), 0);
        assert!(none.1.is_empty(), "{none:?}");
    }

    #[test]
    fn calls_that_agreed_are_not_sent_again() {
        let (mine, theirs) = (log_of([1, 2, 5]), log_of([1, 2, 3]));
        let mut detector = DesyncDetector::new(2);
        detector.head(1, log_of([1, 2]).head());
        assert_eq!(compare(&mut detector, &mine), [Finding::NewHead(mine.head())]);
        detector.head(1, theirs.head());
        assert_eq!(compare(&mut detector, &mine), [Finding::Disputed(3, vec![call(5)])]);
    }

    #[test]
    fn the_last_head_counts_whatever_comes_after_it() {
        let (mine, before) = (log_of([1, 2, 3]), log_of([1, 2]).head());
        let mut detector = DesyncDetector::new(2);
        // Both arrive in one batch, the newer first.
        detector.last_head(1, mine.head());
        detector.head(1, before);
        compare(&mut detector, &mine);
        assert_eq!(detector.verdict(0, 3), Verdict::Same);
        detector.head(1, before);
        compare(&mut detector, &mine);
        assert_eq!(detector.verdict(0, 3), Verdict::Same);
    }

    #[test]
    fn members_that_make_no_more_have_made_the_same_more_fewer_or_others() {
        let mine = log_of([1, 2, 3]);
        let verdict = |ended: Option<CallLog>| {
            let mut detector = DesyncDetector::new(3);
            detector.last_head(0, mine.head());
            match ended {
                Some(log) => detector.last_head(2, log.head()),
                None => detector.head(2, mine.head()),
            }
            compare(&mut detector, &mine);
            (detector.verdict(1, 3), detector.short_of(3), detector.is_disputed())
        };
        assert_eq!(verdict(Some(log_of([1, 2, 3]))), (Verdict::Same, None, false));
        // It may still make more calls.
        assert_eq!(verdict(None), (Verdict::Open(vec![2]), None, false));
        assert_eq!(verdict(Some(log_of([1, 2, 3, 4]))), (Verdict::More(2, 4), None, false));
        assert_eq!(verdict(Some(log_of([1, 2]))), (Verdict::Open(vec![2]), Some((2, 2)), false));
        assert_eq!(verdict(Some(log_of([1, 5, 3]))), (Verdict::Disputed, None, true));
        // The differing call is not known yet, whatever the numbers are.
        let mut both = DesyncDetector::new(3);
        both.head(1, log_of([1, 5, 3]).head());
        both.last_head(2, log_of([1, 2, 3, 4]).head());
        compare(&mut both, &mine);
        assert_eq!(both.verdict(0, 3), Verdict::Disputed);
        // No rank has made a call.
        let mut none = DesyncDetector::new(2);
        assert_eq!(none.verdict(0, 0), Verdict::Open(vec![1]));
        none.last_head(1, LogHead::default());
        assert_eq!(compare(&mut none, &CallLog::default()), []);
        assert_eq!(none.verdict(0, 0), Verdict::Same);
        assert_eq!(DesyncDetector::new(1).verdict(0, 7), Verdict::Same);
    }

    #[test]
    fn a_head_that_the_log_has_forgotten_counts_for_nothing() {
        let mine = log_of(0..10_000);
        let mut detector = DesyncDetector::new(2);
        detector.head(1, LogHead { sequence: 5, digest: 0 });
        assert_eq!(compare(&mut detector, &mine), [Finding::NewHead(mine.head())]);
    }
}
