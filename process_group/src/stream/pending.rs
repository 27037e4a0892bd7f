//! Calls that are enqueued on a stream and not known to be done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::messages::PeerSet;
use crate::types::operation::CallFingerprint;

/// Time for which the newest calls of a stream may stay without a mark: their caller may not make another call.
const UNMARKED: Duration = Duration::from_millis(10);

/// A call that is waited for, or several before one mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PendingCall {
    /// The newest of them; none if they are of different kinds.
    pub(super) call: Option<CallFingerprint>,
    /// The number of the newest.
    pub(super) sequence: u64,
    /// Number of the group's collectives up to here, for comparison with the other members' progress.
    pub(super) collectives: u64,
    /// The peers of messages among them.
    pub(super) peers: PeerSet,
    /// Time at which the oldest was enqueued.
    pub(super) enqueued: Instant,
    /// Time by which the oldest must be done.
    pub(super) deadline: Instant,
}

impl PendingCall {
    /// Merges this call with a newer one that is waited for together with it.
    pub(super) fn merge(self, newer: Self) -> Self {
        let call = match (self.call, newer.call) {
            // A message waits for one rank, a collective for all.
            (Some(a), Some(b))
                if a.operation == b.operation
                    || !a.operation.is_point_to_point() && !b.operation.is_point_to_point() =>
            {
                Some(b)
            }
            _ => None,
        };
        let peers = self.peers.union(newer.peers);
        let collectives = self.collectives.max(newer.collectives);
        Self { call, enqueued: self.enqueued, deadline: self.deadline, peers, collectives, ..newer }
    }
}

/// The pending calls of one stream, in the order they were enqueued.
#[derive(Default, Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct PendingCalls {
    /// The calls with a mark after each, oldest first.
    marked: VecDeque<PendingCall>,
    unmarked: Option<Unmarked>,
    /// Number of calls so far.
    calls: u64,
    /// True if a late mark has been requested.
    placing: bool,
}

#[derive(Clone, Copy, Debug)]
struct Unmarked {
    pending: PendingCall,
    /// Time at which the newest was enqueued.
    newest: Instant,
}

impl PendingCalls {
    pub(super) fn push(&mut self, call: PendingCall) {
        self.calls += 1;
        let pending = self.unmarked.map_or(call, |unmarked| unmarked.pending.merge(call));
        self.unmarked = Some(Unmarked { pending, newest: call.enqueued });
    }

    /// Notes a mark after all calls so far. Returns `false` if all of them had one.
    pub(super) fn mark(&mut self) -> bool {
        let Some(Unmarked { pending, .. }) = self.unmarked.take() else { return false };
        self.marked.push_back(pending);
        true
    }

    /// Requests, once, a mark after the newest calls when they have been without one for some time. Returns the number of calls so
    /// far.
    pub(super) fn wants_mark(&mut self, now: Instant) -> Option<u64> {
        let is_quiet = |unmarked: &Unmarked| now.saturating_duration_since(unmarked.newest) >= UNMARKED;
        if self.placing || !self.unmarked.as_ref().is_some_and(is_quiet) {
            return None;
        }
        self.placing = true;
        Some(self.calls)
    }

    /// Notes that the requested mark after `calls` calls was placed at about `now`. Returns `false` if a newer call has come.
    pub(super) fn mark_late(&mut self, calls: u64, now: Instant) -> bool {
        self.placing = false;
        if calls != self.calls {
            return false;
        }
        let Some(Unmarked { mut pending, .. }) = self.unmarked.take() else { return false };
        // The work before the mark may by now be anything: the calls may be done, and messages that no rank receives may be
        // buffered. It has as much time as the calls had.
        pending.peers = pending.peers.receives();
        pending.deadline = now + pending.deadline.saturating_duration_since(pending.enqueued);
        self.marked.push_back(pending);
        true
    }

    /// Notes that the requested mark could not be placed.
    pub(super) fn mark_failed(&mut self) {
        self.placing = false;
    }

    /// Notes that the oldest `marks` marks have been reached.
    pub(super) fn complete(&mut self, marks: usize) {
        self.marked.drain(..marks.min(self.marked.len()));
    }

    /// Notes that the stream is idle.
    pub(super) fn clear(&mut self) {
        self.marked.clear();
        self.unmarked = None;
    }

    /// Returns the newest calls that are not known to be done.
    pub(super) fn newest(&self) -> Option<PendingCall> {
        self.unmarked.map(|unmarked| unmarked.pending).or_else(|| self.marked.back().copied())
    }

    /// Returns the oldest calls that are not known to be done.
    pub(super) fn oldest(&self) -> Option<PendingCall> {
        // Nothing is known of calls without a mark: messages that this rank sends may be buffered.
        let unmarked = || {
            let Unmarked { pending, .. } = self.unmarked?;
            Some(PendingCall { peers: pending.peers.receives(), ..pending })
        };
        self.marked.front().copied().or_else(unmarked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{Operation, ReduceOp};
    use crate::types::rank::Rank;
    use proptest::prelude::*;

    fn call(operation: Operation, sequence: u64, enqueued: Instant) -> PendingCall {
        let call = CallFingerprint::new(operation, DType::F32, 1);
        let peers = PeerSet::of(&call);
        let deadline = enqueued + Duration::from_secs(30);
        PendingCall { call: Some(call), sequence, collectives: sequence, peers, enqueued, deadline }
    }

    const SUM: Operation = Operation::AllReduce(ReduceOp::Sum);

    #[test]
    fn calls_in_front_of_one_mark_have_the_oldest_deadline_and_the_newest_number() {
        let (start, mut pending) = (Instant::now(), PendingCalls::default());
        let at = |ms: u64| start + Duration::from_millis(ms);
        pending.push(call(SUM, 1, at(0)));
        pending.push(call(Operation::Barrier, 2, at(5)));
        assert!(pending.mark());
        assert!(!pending.mark(), "there is nothing to mark");
        let oldest = pending.oldest().unwrap();
        assert_eq!((oldest.sequence, oldest.enqueued, oldest.deadline), (2, at(0), at(30_000)));
        assert_eq!(oldest.call.unwrap().operation, Operation::Barrier);
        pending.push(call(Operation::Recv { from: Rank(1) }, 1, at(6)));
        pending.push(call(SUM, 3, at(7)));
        pending.complete(1);
        assert_eq!(
            pending.oldest().unwrap().call,
            None,
            "a message and a collective wait for different ranks"
        );
    }

    #[test]
    fn a_late_mark_is_asked_for_once_and_dropped_when_a_newer_call_has_come() {
        let (start, mut pending) = (Instant::now(), PendingCalls::default());
        pending.push(call(Operation::Send { to: Rank(1) }, 1, start));
        assert_eq!(pending.wants_mark(start + UNMARKED / 2), None);
        assert_eq!(pending.wants_mark(start + UNMARKED), Some(1));
        assert_eq!(pending.wants_mark(start + 2 * UNMARKED), None, "it has been asked for");
        pending.push(call(SUM, 1, start + 2 * UNMARKED));
        assert!(!pending.mark_late(1, start + 2 * UNMARKED));
        assert_eq!(pending.wants_mark(start + 3 * UNMARKED), Some(2));
        pending.mark_failed();
        assert_eq!(pending.wants_mark(start + 3 * UNMARKED), Some(2));
        assert!(pending.mark_late(2, start + 4 * UNMARKED));
        let oldest = pending.oldest().unwrap();
        assert_eq!(oldest.deadline, start + 4 * UNMARKED + Duration::from_secs(30));
        assert_eq!(oldest.peers, PeerSet::default(), "what it sends may be buffered");
    }

    proptest! {
        /// Compares with a list of (call, following mark) that forgets nothing.
        #[test]
        fn exactly_the_calls_behind_the_last_reached_mark_are_pending(
            steps in proptest::collection::vec((0..4u8, 1..3usize), 0..60),
        ) {
            let (start, mut pending) = (Instant::now(), PendingCalls::default());
            let (mut calls, mut marks, mut reached) = (Vec::<(u64, Option<usize>)>::new(), 0, 0);
            for (step, count) in steps {
                match step {
                    0 | 1 => {
                        let sequence = calls.len() as u64 + 1;
                        pending.push(call(SUM, sequence, start + Duration::from_micros(sequence)));
                        calls.push((sequence, None));
                    }
                    2 => {
                        let unmarked: Vec<_> = calls.iter_mut().filter(|(_, mark)| mark.is_none()).collect();
                        prop_assert_eq!(pending.mark(), !unmarked.is_empty());
                        if !unmarked.is_empty() {
                            marks += 1;
                            for (_, mark) in unmarked {
                                *mark = Some(marks);
                            }
                        }
                    }
                    _ => {
                        let count = count.min(marks - reached);
                        pending.complete(count);
                        reached += count;
                    }
                }
                let left: Vec<_> = calls.iter().filter(|(_, mark)| mark.is_none_or(|mark| mark > reached)).collect();
                let oldest = pending.oldest();
                prop_assert_eq!(oldest.is_some(), !left.is_empty());
                if let (Some(oldest), Some((first, mark))) = (oldest, left.first()) {
                    prop_assert_eq!(oldest.enqueued, start + Duration::from_micros(*first));
                    let newest = left.iter().filter(|(_, other)| other == mark).map(|(sequence, _)| *sequence).max();
                    prop_assert_eq!(Some(oldest.sequence), newest);
                }
            }
        }
    }
}
