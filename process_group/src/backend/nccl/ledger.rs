//! Which collectives a rank has made. NCCL compares nothing: ranks whose calls differ get wrong values, or wait for ever. So
//! watchers tell each other how far they are, with a digest of all calls up to there, and compare it with their own.

use std::time::{Duration, Instant};

use crate::backend::history::{History, REMEMBERED};
use crate::operation::Signature;
use crate::wire::signature;

/// This rank's collectives: how many, their digest, and which the newest are.
#[derive(Default, Debug)]
pub(super) struct Ledger {
    newest: Claim,
    history: History<(Signature, u64)>,
}

/// What a rank says it has called: the number of its newest collective, and the digest of all up to it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Claim {
    pub(super) sequence: u64,
    pub(super) digest: u64,
}

impl Ledger {
    pub(super) fn note(&mut self, call: Signature) {
        let digest = add(self.newest.digest, &call);
        self.newest = Claim { sequence: self.newest.sequence + 1, digest };
        self.history.push(self.newest.sequence, (call, digest));
    }

    pub(super) fn newest(&self) -> Claim {
        self.newest
    }

    fn digest(&self, sequence: u64) -> Option<u64> {
        Some(self.history.get(sequence)?.1)
    }

    /// The call of this number, if it is remembered.
    pub(super) fn call(&self, sequence: u64) -> Option<Signature> {
        Some(self.history.get(sequence)?.0)
    }

    /// Those of these calls that are remembered, and the number of the first.
    fn calls(&self, first: u64, last: u64) -> (u64, Vec<Signature>) {
        if first > last {
            return (first, Vec::new());
        }
        let oldest = last.saturating_sub(REMEMBERED - 1).max(first);
        let is_remembered = |sequence: &u64| self.history.get(*sequence).is_some();
        let first = (oldest..=last).find(is_remembered).unwrap_or(last);
        (first, (first..=last).map_while(|sequence| Some(self.history.get(sequence)?.0)).collect())
    }

    /// The first of another rank's calls, numbered from `first`, that differs from this rank's: its number, this rank's and
    /// the other's.
    pub(super) fn difference(&self, first: u64, theirs: &[Signature]) -> Option<(u64, Signature, Signature)> {
        (0u64..).zip(theirs).find_map(|(index, theirs)| {
            let sequence = first.checked_add(index)?;
            let (mine, _) = self.history.get(sequence)?;
            (mine != *theirs).then_some((sequence, mine, *theirs))
        })
    }
}

/// As the hash tables of Rust's compiler mix words: rotate, xor, multiply by an odd number.
fn add(digest: u64, call: &Signature) -> u64 {
    const FACTOR: u64 = 0x517c_c1b7_2722_0a95;
    let bytes = signature::pack(call);
    let (words, _) = bytes.as_chunks::<8>();
    words
        .iter()
        .fold(digest, |digest, word| (digest.rotate_left(5) ^ u64::from_le_bytes(*word)).wrapping_mul(FACTOR))
}

/// What is known of the other members' calls.
#[derive(Debug)]
pub(super) struct Comparison {
    /// What each member claims and has not been compared yet.
    claims: Vec<Option<Claim>>,
    /// Up to which call each member's are known to be this rank's.
    agreed: Vec<u64>,
    /// How many collectives a member has made that makes no more.
    last: Vec<Option<u64>>,
    /// Calls that a member has told, and the number of the first: who has left cannot be asked.
    calls: Vec<(u64, Vec<Signature>)>,
    /// The number of the newest collective that the others have been told of.
    told: u64,
    /// Since when the claim of a member is known to differ, and up to which call.
    disputed: Option<(Instant, usize, u64)>,
}

/// What a comparison comes to.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Finding {
    /// The others do not know yet how far this rank is.
    News(Claim),
    /// Somebody has called something else: this rank's calls, from this number on, by which whoever has compares.
    Dispute(u64, Vec<Signature>),
    /// The call of this number is another one than this member's: this rank's, and that member's.
    Different(usize, (u64, Signature, Signature)),
    /// Nobody has found out which call it is: the member, and the number up to which one differs.
    Unknown(usize, u64),
}

/// Whether members that make no more collectives have made the same.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Same,
    /// A call of a member differs, and which it is has still to be found out.
    Disputed,
    /// These members have not said what their last was, or it has not been compared.
    Open(Vec<usize>),
    /// A member has made so many, which is more.
    More(usize, u64),
}

impl Comparison {
    pub(super) fn new(members: usize) -> Self {
        let (claims, agreed, last) = (vec![None; members], vec![0; members], vec![None; members]);
        Self { claims, agreed, last, calls: vec![(1, Vec::new()); members], told: 0, disputed: None }
    }

    /// Takes what a member claims.
    pub(super) fn claimed(&mut self, position: usize, claim: Claim) {
        let pending = &mut self.claims[position];
        if pending.is_none_or(|pending| pending.sequence < claim.sequence) {
            *pending = Some(claim);
        }
    }

    /// Takes what a member claims that makes no more collectives.
    pub(super) fn ended(&mut self, position: usize, claim: Claim) {
        self.claimed(position, claim);
        self.last[position] = Some(claim.sequence);
    }

    /// Takes calls that a member tells, from this number on.
    pub(super) fn heard(&mut self, position: usize, first: u64, calls: &[Signature]) {
        let known = &mut self.calls[position];
        if known.0.checked_add(known.1.len() as u64) != Some(first) {
            *known = (first, Vec::new());
        }
        known.1.extend(calls);
    }

    /// Of the member at `me`, which makes no more: the calls that others may not have compared with theirs, and the number of the
    /// first.
    pub(super) fn parting(&self, ledger: &Ledger, me: usize) -> (u64, Vec<Signature>) {
        let others = self.agreed.iter().enumerate().filter(|(position, _)| *position != me);
        let agreed = others.map(|(_, agreed)| *agreed).min().unwrap_or(0);
        ledger.calls(agreed + 1, ledger.newest().sequence)
    }

    /// A member that makes no more collectives and has made fewer than so many, and how many.
    pub(super) fn short_of(&self, made: u64) -> Option<(usize, u64)> {
        let mut ended = self.last.iter().enumerate();
        ended.find_map(|(position, last)| last.filter(|last| *last < made).map(|last| (position, last)))
    }

    /// Whether somebody's calls differ, and which it is has still to be found out.
    pub(super) fn is_disputed(&self) -> bool {
        self.disputed.is_some()
    }

    /// Whether all others, who like the member at `me` make no more, have made the same `made` collectives.
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

    /// Compares claims with this rank's calls, as far as it has come. A claim about calls that are forgotten by now counts for
    /// nothing.
    pub(super) fn compare(&mut self, ledger: &Ledger, now: Instant, patience: Duration) -> Vec<Finding> {
        let mut found = Vec::new();
        let newest = ledger.newest();
        if newest.sequence > self.told {
            let known = std::mem::replace(&mut self.told, newest.sequence);
            found.push(Finding::News(newest));
            // Who has told its calls, and has left, says nothing about the new ones.
            for (position, (first, theirs)) in self.calls.iter().enumerate() {
                let next = (known + 1).max(*first);
                let theirs = theirs.get((next - first) as usize..).unwrap_or_default();
                if let Some(difference) = ledger.difference(next, theirs) {
                    found.push(Finding::Different(position, difference));
                    return found;
                }
            }
        }
        if let Some((since, position, sequence)) = self.disputed {
            if now - since > patience {
                found.push(Finding::Unknown(position, sequence));
            }
            return found;
        }
        for (position, claim) in self.claims.iter_mut().enumerate() {
            let Some(Claim { sequence, digest }) = claim.take_if(|c| c.sequence <= newest.sequence) else {
                continue;
            };
            match ledger.digest(sequence) {
                Some(mine) if mine == digest => self.agreed[position] = self.agreed[position].max(sequence),
                Some(_) => {
                    self.disputed = Some((now, position, sequence));
                    let (first, calls) = ledger.calls(self.agreed[position] + 1, sequence);
                    found.push(Finding::Dispute(first, calls));
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
    use crate::dtype::DType;
    use crate::operation::{Operation, ReduceOp};
    use proptest::prelude::*;

    const PATIENCE: Duration = Duration::from_millis(500);

    fn call(count: usize) -> Signature {
        Signature { operation: Operation::AllReduce(ReduceOp::Sum), dtype: DType::F32, count }
    }

    fn made(calls: impl IntoIterator<Item = usize>) -> Ledger {
        let mut ledger = Ledger::default();
        for count in calls {
            ledger.note(call(count));
        }
        ledger
    }

    fn compare(comparison: &mut Comparison, ledger: &Ledger) -> Vec<Finding> {
        comparison.compare(ledger, Instant::now(), PATIENCE)
    }

    proptest! {
        #[test]
        fn the_first_difference_is_found_wherever_it_is(
            mut counts in proptest::collection::vec(0usize..4, 1..6000), at: proptest::sample::Index,
            asked in 1u64..6000,
        ) {
            let mine = made(counts.iter().copied());
            let at = at.index(counts.len());
            counts[at] += 7;
            let theirs = made(counts.iter().copied());
            let asked = asked.min(counts.len() as u64);
            let mut comparison = Comparison::new(2);
            let claimed = made(counts[..asked as usize].iter().copied()).newest();
            comparison.claimed(1, claimed);
            let found = compare(&mut comparison, &mine);
            prop_assert_eq!(&found[0], &Finding::News(mine.newest()));
            let forgotten = asked + REMEMBERED <= mine.newest().sequence;
            if asked <= at as u64 || forgotten {
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(comparison.agreed[1], if forgotten { 0 } else { asked });
                return Ok(());
            }
            prop_assert_eq!(comparison.agreed[1], 0);
            let Finding::Dispute(first, calls) = &found[1] else { panic!("{found:?}") };
            let number = at as u64 + 1;
            let known = number >= *first && number + REMEMBERED > theirs.newest().sequence;
            let difference = known.then(|| (number, call(counts[at]), call(counts[at] - 7)));
            prop_assert_eq!(theirs.difference(*first, calls), difference);
            prop_assert_eq!((first + calls.len() as u64, theirs.difference(u64::MAX - 1, calls)), (asked + 1, None));
        }
    }

    #[test]
    fn a_rank_that_is_behind_compares_when_it_has_come_as_far() {
        let theirs = made([1, 2, 3]);
        let mut comparison = Comparison::new(2);
        comparison.claimed(1, theirs.newest());
        let mut mine = made([1, 2]);
        assert_eq!(compare(&mut comparison, &mine), [Finding::News(mine.newest())]);
        assert_eq!(compare(&mut comparison, &mine), []);
        mine.note(call(4));
        let found = compare(&mut comparison, &mine);
        assert_eq!(found[1], Finding::Dispute(1, vec![call(1), call(2), call(4)]));
        // Once is enough, and somebody has to find it.
        assert_eq!(compare(&mut comparison, &mine), []);
        let later = Instant::now() + 2 * PATIENCE;
        assert_eq!(comparison.compare(&mine, later, PATIENCE), [Finding::Unknown(1, 3)]);
    }

    #[test]
    fn a_member_that_has_left_is_held_to_the_calls_it_has_told() {
        let theirs = made(1..=200);
        // It knows of 150 that they are the same.
        let mut its = Comparison::new(2);
        its.claimed(0, made(1..=150).newest());
        compare(&mut its, &theirs);
        let (first, calls) = its.parting(&theirs, 1);
        assert_eq!((first, calls.len(), calls[0]), (151, 50, call(151)));
        let mut comparison = Comparison::new(2);
        // In two parts, behind older ones.
        comparison.heard(1, 20, &[call(20), call(21)]);
        comparison.heard(1, 151, &calls[..30]);
        comparison.heard(1, 181, &calls[30..]);
        comparison.ended(1, theirs.newest());
        assert_eq!(comparison.calls[1], (151, calls));
        // This rank is behind, calls the same, and then something else, long before it has come as far.
        let mut mine = made(1..=182);
        assert_eq!(compare(&mut comparison, &mine), [Finding::News(mine.newest())]);
        mine.note(call(1));
        let found = compare(&mut comparison, &mine);
        assert_eq!(found[1..], [Finding::Different(1, (183, call(1), call(183)))]);
    }

    #[test]
    fn a_member_that_leaves_tells_what_anybody_may_not_have_compared() {
        let mine = made(0..10_000);
        let first_of = |claims: [usize; 2]| {
            let mut comparison = Comparison::new(3);
            for (position, count) in [0, 2].into_iter().zip(claims) {
                comparison.claimed(position, made(0..count).newest());
            }
            compare(&mut comparison, &mine);
            let (first, calls) = comparison.parting(&mine, 1);
            assert_eq!(first + calls.len() as u64, 10_001);
            first
        };
        assert_eq!(first_of([9_000, 9_990]), 9_001);
        assert_eq!(first_of([10_000, 10_000]), 10_001);
        // No more than it remembers.
        assert_eq!(first_of([5, 10_000]), 10_001 - REMEMBERED);
        let none = Comparison::new(1).parting(&Ledger::default(), 0);
        assert!(none.1.is_empty(), "{none:?}");
    }

    #[test]
    fn what_was_agreed_on_is_not_told_again() {
        let (mine, theirs) = (made([1, 2, 5]), made([1, 2, 3]));
        let mut comparison = Comparison::new(2);
        comparison.claimed(1, made([1, 2]).newest());
        assert_eq!(compare(&mut comparison, &mine), [Finding::News(mine.newest())]);
        comparison.claimed(1, theirs.newest());
        assert_eq!(compare(&mut comparison, &mine), [Finding::Dispute(3, vec![call(5)])]);
    }

    #[test]
    fn the_last_claim_counts_whatever_comes_after_it() {
        let (mine, before) = (made([1, 2, 3]), made([1, 2]).newest());
        let mut comparison = Comparison::new(2);
        // Both in one batch, the newer first.
        comparison.ended(1, mine.newest());
        comparison.claimed(1, before);
        compare(&mut comparison, &mine);
        assert_eq!(comparison.verdict(0, 3), Verdict::Same);
        comparison.claimed(1, before);
        compare(&mut comparison, &mine);
        assert_eq!(comparison.verdict(0, 3), Verdict::Same);
    }

    #[test]
    fn members_that_make_no_more_have_made_the_same_more_fewer_or_others() {
        let mine = made([1, 2, 3]);
        let verdict = |ended: Option<Ledger>| {
            let mut comparison = Comparison::new(3);
            comparison.ended(0, mine.newest());
            match ended {
                Some(ledger) => comparison.ended(2, ledger.newest()),
                None => comparison.claimed(2, mine.newest()),
            }
            compare(&mut comparison, &mine);
            (comparison.verdict(1, 3), comparison.short_of(3), comparison.is_disputed())
        };
        assert_eq!(verdict(Some(made([1, 2, 3]))), (Verdict::Same, None, false));
        // It may call more yet.
        assert_eq!(verdict(None), (Verdict::Open(vec![2]), None, false));
        assert_eq!(verdict(Some(made([1, 2, 3, 4]))), (Verdict::More(2, 4), None, false));
        assert_eq!(verdict(Some(made([1, 2]))), (Verdict::Open(vec![2]), Some((2, 2)), false));
        assert_eq!(verdict(Some(made([1, 5, 3]))), (Verdict::Disputed, None, true));
        // Which call differs is still to be said, whatever the numbers are.
        let mut both = Comparison::new(3);
        both.claimed(1, made([1, 5, 3]).newest());
        both.ended(2, made([1, 2, 3, 4]).newest());
        compare(&mut both, &mine);
        assert_eq!(both.verdict(0, 3), Verdict::Disputed);
        // Nobody has called anything.
        let mut none = Comparison::new(2);
        assert_eq!(none.verdict(0, 0), Verdict::Open(vec![1]));
        none.ended(1, Claim::default());
        assert_eq!(compare(&mut none, &Ledger::default()), []);
        assert_eq!(none.verdict(0, 0), Verdict::Same);
        assert_eq!(Comparison::new(1).verdict(0, 7), Verdict::Same);
    }

    #[test]
    fn a_claim_about_forgotten_calls_counts_for_nothing() {
        let mine = made(0..10_000);
        let mut comparison = Comparison::new(2);
        comparison.claimed(1, Claim { sequence: 5, digest: 0 });
        assert_eq!(compare(&mut comparison, &mine), [Finding::News(mine.newest())]);
    }
}
