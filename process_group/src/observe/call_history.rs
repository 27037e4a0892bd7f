//! The newest calls of a group, in memory that is allocated once.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::backend::Completion;
use crate::error::Error;
use crate::observe::activity::{CurrentCall, GroupActivity};
use crate::observe::record::{CallRecord, Failure, GroupRecord, Outcome};
use crate::paths::Path;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;

/// Maximum number of calls that are looked at for a heartbeat, since calls wait meanwhile.
const LOOKED_AT: usize = 4096;

/// The newest calls of a group, with the outcome of each.
#[derive(Clone, Debug)]
pub(crate) struct CallHistory {
    /// Number of calls that are kept.
    capacity: usize,
    /// Oldest first.
    newest: VecDeque<RecordedCall>,
    /// Number of calls so far.
    begun: u64,
    /// Number of calls that have ended.
    ended: u64,
    failure: Option<Failure>,
}

/// A call, or the calls of one replay, as a [`CallRecord`] describes them.
#[derive(Clone, Copy, Debug)]
struct RecordedCall {
    number: u64,
    calls: u64,
    fingerprint: CallFingerprint,
    path: Option<Path>,
    begun: Instant,
    ended: Option<Instant>,
    outcome: Outcome,
}

impl CallHistory {
    /// Creates a history that keeps this many calls; 0 keeps none.
    pub(crate) fn new(capacity: usize) -> Self {
        anchor();
        Self { capacity, newest: VecDeque::with_capacity(capacity), begun: 0, ended: 0, failure: None }
    }

    /// Records the start of a call, or of `calls` calls of a replay.
    pub(crate) fn begin(&mut self, fingerprint: &CallFingerprint, number: u64, calls: u64, at: Instant) {
        if self.capacity == 0 {
            return;
        }
        if self.newest.len() == self.capacity {
            self.newest.pop_front();
        }
        self.newest.push_back(RecordedCall {
            number,
            calls,
            fingerprint: *fingerprint,
            path: None,
            begun: at,
            ended: None,
            outcome: Outcome::InProgress,
        });
        self.begun += 1;
    }

    /// Records that the oldest call in progress has returned.
    pub(crate) fn end(&mut self, completion: Completion, at: Instant) {
        let outcome = match completion {
            Completion { captured: true, .. } => Outcome::Captured,
            Completion { enqueued: true, .. } => Outcome::Enqueued,
            _ => Outcome::Done,
        };
        self.end_as(Some(completion.path), outcome, at);
    }

    /// Records that all calls in progress have ended with an error.
    pub(crate) fn fail(&mut self, at: Instant) {
        while self.ended < self.begun {
            self.end_as(None, Outcome::Failed, at);
        }
    }

    /// Records that the group cannot be used any more.
    pub(crate) fn give_up(&mut self, error: &Error) {
        self.failure.get_or_insert_with(|| Failure::new(error));
    }

    pub(crate) const fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Ends the oldest call in progress, if there is one.
    fn end_as(&mut self, path: Option<Path>, outcome: Outcome, at: Instant) {
        let in_progress = (self.begun - self.ended) as usize;
        if in_progress == 0 {
            return;
        }
        self.ended += 1;
        // A group of many calls may have replaced its first ones.
        let index = self.newest.len().checked_sub(in_progress);
        if let Some(call) = index.and_then(|index| self.newest.get_mut(index)) {
            (call.path, call.outcome, call.ended) = (path, outcome, Some(at));
        }
    }

    /// Returns the record of the group with this name and these members.
    pub(crate) fn record(self, name: &str, members: &[Rank]) -> GroupRecord {
        GroupRecord {
            name: name.to_owned(),
            members: members.to_vec(),
            overwritten: self.begun - self.newest.len() as u64,
            failure: self.failure,
            calls: self.newest.into_iter().map(RecordedCall::record).collect(),
        }
    }

    /// Returns the activity at `now` of the group with this name and number of members, as far as its newest calls tell it.
    pub(crate) fn activity(&self, name: &str, size: usize, now: Instant) -> GroupActivity {
        let (mut begun, mut operation, mut ended, mut current) = (None, None, None, None);
        let newest = self.newest.iter().rev().take(LOOKED_AT);
        for call in newest.filter(|call| call.outcome != Outcome::Captured) {
            let is_current = call.outcome == Outcome::InProgress;
            if is_current {
                current = Some(call);
            }
            if !call.fingerprint.operation.is_point_to_point() {
                let last = call.number.saturating_add(call.calls).saturating_sub(1);
                if begun.is_none() {
                    (begun, operation) = (Some(last), Some(call.fingerprint.operation));
                }
                if !is_current {
                    // Calls return in the order of their starts, so all older ones have returned.
                    ended = Some(last);
                    break;
                }
            }
        }
        if ended.is_none() && self.begun == self.newest.len().min(LOOKED_AT) as u64 && self.capacity > 0 {
            (begun, ended) = (begun.or(Some(0)), Some(0));
        }
        let current = current.map(|call| {
            let elapsed = now.saturating_duration_since(call.begun);
            CurrentCall::new(call.number, call.fingerprint.operation, elapsed)
        });
        GroupActivity {
            name: name.to_owned(),
            size,
            failed: self.has_failed(),
            begun,
            operation: operation.map(|operation| operation.name().to_owned()),
            ended,
            current,
            ..GroupActivity::default()
        }
    }
}

impl RecordedCall {
    fn record(self) -> CallRecord {
        CallRecord {
            number: self.number,
            calls: self.calls,
            fingerprint: self.fingerprint,
            path: self.path.map(|path| path.to_string()),
            enqueued_ns: unix_ns(self.begun),
            returned_ns: self.ended.map(unix_ns),
            outcome: self.outcome,
        }
    }
}

/// Returns the readings of this process's two clocks at one moment.
fn anchor() -> (Instant, u64) {
    static ANCHOR: OnceLock<(Instant, u64)> = OnceLock::new();
    *ANCHOR.get_or_init(|| {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        (Instant::now(), wall)
    })
}

/// Returns the nanoseconds since 1970.
pub(super) fn unix_ns(at: Instant) -> u64 {
    let (instant, wall) = anchor();
    wall + at.saturating_duration_since(instant).as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::schedule::Algorithm;
    use crate::types::dtype::DType;
    use crate::types::operation::Operation;

    const DONE: Completion = Completion {
        path: Path::Tcp(Algorithm::Direct),
        enqueued: false,
        captured: false,
        waited: Duration::ZERO,
    };

    fn gather(count: usize) -> CallFingerprint {
        CallFingerprint::new(Operation::Gather { root: Rank(3) }, DType::BF16, count)
    }

    fn record_of(history: &CallHistory) -> GroupRecord {
        history.clone().record("world", &[Rank(0), Rank(1)])
    }

    fn begin(history: &mut CallHistory, number: u64) {
        history.begin(&gather(number as usize), number, 1, Instant::now());
    }

    #[test]
    fn the_newest_calls_are_kept_with_what_became_of_them() {
        let mut history = CallHistory::new(3);
        for number in 1..=4 {
            begin(&mut history, number);
            history.end(DONE, Instant::now());
        }
        begin(&mut history, 5);
        let record = record_of(&history);
        assert_eq!((record.overwritten, record.calls.len()), (2, 3));
        let [third, _, fifth] = &record.calls[..] else { panic!("{record:?}") };
        assert_eq!((third.number, third.fingerprint, third.outcome), (3, gather(3), Outcome::Done));
        assert_eq!(third.path.as_deref(), Some("tcp/direct"));
        assert!(third.returned_ns >= Some(third.enqueued_ns));
        assert_eq!((fifth.number, fifth.outcome, fifth.returned_ns), (5, Outcome::InProgress, None));
        history.fail(Instant::now());
        assert_eq!(record_of(&history).calls[2].outcome, Outcome::Failed);
    }

    #[test]
    fn more_calls_at_once_than_are_kept_end_well() {
        let mut history = CallHistory::new(2);
        for number in 1..=5 {
            begin(&mut history, number);
        }
        for _ in 1..=5 {
            history.end(Completion { enqueued: true, ..DONE }, Instant::now());
        }
        let record = record_of(&history);
        assert!(record.calls.iter().all(|call| call.outcome == Outcome::Enqueued), "{record:?}");
        assert_eq!(record.calls.iter().map(|call| call.number).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn activity_is_that_of_collectives_and_of_the_oldest_call_that_has_not_returned() {
        let at = |history: &CallHistory| history.activity("world", 2, Instant::now());
        let mut history = CallHistory::new(8);
        assert_eq!((at(&history).begun, at(&history).ended, at(&history).current), (Some(0), Some(0), None));
        let message = CallFingerprint { operation: Operation::Send { to: Rank(1) }, ..gather(1) };
        begin(&mut history, 1);
        history.end(DONE, Instant::now());
        history.begin(&message, 7, 1, Instant::now());
        let sending = at(&history);
        assert_eq!((sending.begun, sending.ended), (Some(1), Some(1)));
        let sent = sending.current.expect("a message");
        assert_eq!((sent.number, sent.operation.as_str(), sent.is_message), (7, "send", true));
        begin(&mut history, 2);
        assert_eq!((at(&history).begun, at(&history).ended), (Some(2), Some(1)));
        assert_eq!(at(&history).current.map(|call| call.number), Some(7), "the oldest");
        history.fail(Instant::now());
        assert_eq!((at(&history).ended, at(&history).current), (Some(2), None));
        // A replay of three calls.
        history.begin(&gather(1), 3, 3, Instant::now());
        history.end(Completion { enqueued: true, ..DONE }, Instant::now());
        assert_eq!((at(&history).begun, at(&history).ended), (Some(5), Some(5)));
        for number in 1..=8 {
            history.begin(&message, number, 1, Instant::now());
            history.end(DONE, Instant::now());
        }
        assert_eq!((at(&history).begun, at(&history).ended), (None, None), "messages have replaced it");
    }

    #[test]
    fn a_history_without_room_keeps_nothing() {
        let mut history = CallHistory::new(0);
        begin(&mut history, 1);
        history.end(DONE, Instant::now());
        history.fail(Instant::now());
        assert!(record_of(&history).calls.is_empty());
        assert_eq!(history.activity("world", 1, Instant::now()).begun, None);
    }
}
