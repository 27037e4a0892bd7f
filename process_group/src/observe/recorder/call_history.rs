//! The newest calls of a group, in memory that is allocated once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::activity::{CurrentCall, GroupActivity};
use super::record::{CallRecord, Failure, GroupRecord, Outcome};
use crate::backend::Completion;
use crate::error::Error;
use crate::observe::profile::CallSummary;
use crate::paths::Path;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;
use crate::types::sync::lock;

/// Maximum number of calls that are looked at for a heartbeat, since calls wait meanwhile.
const LOOKED_AT: usize = 4096;

/// The history that the group shares with the readers of its record.
#[derive(Debug)]
pub(crate) struct CallHistory {
    name: String,
    members: Vec<Rank>,
    /// Locked for the moment of a read or a write, and not while a call waits.
    calls: Mutex<Calls>,
    failure: OnceLock<Failure>,
}

#[derive(Debug)]
struct Calls {
    /// Oldest first.
    newest: VecDeque<RecordedCall>,
    /// Number of calls so far.
    begun: u64,
    /// Number of calls that have ended.
    ended: u64,
}

/// A call, or the calls of one replay, as a [`CallRecord`] describes them.
#[derive(Clone, Copy, Debug)]
struct RecordedCall {
    number: u64,
    calls: u64,
    fingerprint: CallFingerprint,
    path: Option<Path>,
    begun_ns: u64,
    ended_ns: u64,
    outcome: Outcome,
}

impl CallHistory {
    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    pub(super) fn record(&self) -> GroupRecord {
        let (begun, newest) = {
            let calls = lock(&self.calls);
            (calls.begun, calls.newest.clone())
        };
        let calls: Vec<CallRecord> = newest.into_iter().map(RecordedCall::record).collect();
        GroupRecord {
            name: self.name.clone(),
            members: self.members.clone(),
            failure: self.failure.get().cloned(),
            overwritten: begun - calls.len() as u64,
            calls,
        }
    }

    /// Returns the activity of the group at `now`, in nanoseconds since 1970.
    pub(super) fn activity(&self, now: u64, summary: CallSummary) -> GroupActivity {
        let mut activity = GroupActivity {
            name: self.name.clone(),
            size: self.members.len(),
            failed: self.has_failed(),
            begun: None,
            operation: None,
            ended: None,
            current: None,
            calls: summary.calls,
            recent: summary.recent,
        };
        let calls = lock(&self.calls);
        let newest = calls.newest.iter().rev().take(LOOKED_AT);
        for call in newest.filter(|call| call.outcome != Outcome::Captured) {
            let operation = call.fingerprint.operation;
            let is_current = call.outcome == Outcome::InProgress;
            if is_current {
                let elapsed = Duration::from_nanos(now.saturating_sub(call.begun_ns));
                activity.current = Some(CurrentCall { number: call.number, operation, elapsed });
            }
            if !operation.is_point_to_point() {
                let last = call.number.saturating_add(call.calls).saturating_sub(1);
                if activity.begun.is_none() {
                    (activity.begun, activity.operation) = (Some(last), Some(operation));
                }
                if !is_current {
                    activity.ended = Some(last);
                    // Calls return in the order of their starts, so all older ones have returned.
                    return activity;
                }
            }
        }
        if calls.begun == calls.newest.len().min(LOOKED_AT) as u64 && calls.newest.capacity() > 0 {
            activity.begun = activity.begun.or(Some(0));
            activity.ended = Some(0);
        }
        activity
    }
}

impl RecordedCall {
    fn record(self) -> CallRecord {
        CallRecord {
            number: self.number,
            calls: self.calls,
            fingerprint: self.fingerprint,
            path: self.path.map(|path| path.to_string()),
            enqueued_ns: self.begun_ns,
            returned_ns: (self.outcome != Outcome::InProgress).then_some(self.ended_ns),
            outcome: self.outcome,
        }
    }
}

/// The writer's end of a history.
#[derive(Debug)]
pub(crate) struct Recorder {
    history: Arc<CallHistory>,
    /// Number of calls that are kept.
    capacity: usize,
    /// The time of the first reading, by both clocks.
    anchor: (Instant, u64),
}

impl Recorder {
    /// Creates a recorder that keeps this many calls; 0 keeps none.
    pub(crate) fn new(name: &str, members: &[Rank], capacity: usize) -> Self {
        let history = Arc::new(CallHistory {
            name: name.to_owned(),
            members: members.to_vec(),
            calls: Mutex::new(Calls { newest: VecDeque::with_capacity(capacity), begun: 0, ended: 0 }),
            failure: OnceLock::new(),
        });
        Self { history, capacity, anchor: anchor() }
    }

    pub(crate) const fn history(&self) -> &Arc<CallHistory> {
        &self.history
    }

    /// Records the start of a call, or of `calls` calls of a replay.
    pub(crate) fn begin(&mut self, fingerprint: &CallFingerprint, number: u64, calls: u64, at: Instant) {
        if self.capacity == 0 {
            return;
        }
        let (fingerprint, begun_ns) = (*fingerprint, since(self.anchor, at));
        let call = RecordedCall {
            number,
            calls,
            fingerprint,
            path: None,
            begun_ns,
            ended_ns: 0,
            outcome: Outcome::InProgress,
        };
        let mut calls = lock(&self.history.calls);
        if calls.newest.len() == self.capacity {
            calls.newest.pop_front();
        }
        calls.newest.push_back(call);
        calls.begun += 1;
    }

    /// Records that the oldest call in progress has returned.
    pub(crate) fn end(&mut self, completion: Completion, at: Instant) {
        if self.capacity == 0 {
            return;
        }
        let outcome = match completion {
            Completion { captured: true, .. } => Outcome::Captured,
            Completion { enqueued: true, .. } => Outcome::Enqueued,
            _ => Outcome::Done,
        };
        lock(&self.history.calls).end(Some(completion.path), outcome, since(self.anchor, at));
    }

    /// Records that all calls in progress have ended with an error.
    pub(crate) fn fail(&mut self, at: Instant) {
        let mut calls = lock(&self.history.calls);
        while calls.ended < calls.begun {
            calls.end(None, Outcome::Failed, since(self.anchor, at));
        }
    }

    /// Records that the group cannot be used any more.
    pub(crate) fn give_up(&self, error: &Error) {
        let _ = self.history.failure.set(Failure::new(error));
    }
}

impl Calls {
    /// Ends the oldest call in progress, if there is one.
    fn end(&mut self, path: Option<Path>, outcome: Outcome, ended_ns: u64) {
        let in_progress = (self.begun - self.ended) as usize;
        if in_progress == 0 {
            return;
        }
        self.ended += 1;
        // A group of many calls may have replaced its first ones.
        let index = self.newest.len().checked_sub(in_progress);
        if let Some(call) = index.and_then(|index| self.newest.get_mut(index)) {
            (call.path, call.outcome, call.ended_ns) = (path, outcome, ended_ns);
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

fn since((instant, wall): (Instant, u64), at: Instant) -> u64 {
    wall + at.saturating_duration_since(instant).as_nanos() as u64
}

/// Returns the nanoseconds since 1970.
pub(super) fn unix_ns(at: Instant) -> u64 {
    since(anchor(), at)
}

#[cfg(test)]
mod tests {
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
        CallFingerprint { operation: Operation::Gather { root: Rank(3) }, dtype: DType::BF16, count }
    }

    fn begin(recorder: &mut Recorder, number: u64) {
        recorder.begin(&gather(number as usize), number, 1, Instant::now());
    }

    #[test]
    fn the_newest_calls_are_kept_with_what_became_of_them() {
        let mut recorder = Recorder::new("world", &[Rank(0), Rank(1)], 3);
        for number in 1..=4 {
            begin(&mut recorder, number);
            recorder.end(DONE, Instant::now());
        }
        begin(&mut recorder, 5);
        let record = recorder.history().record();
        assert_eq!((record.overwritten, record.calls.len()), (2, 3));
        let [third, _, fifth] = &record.calls[..] else { panic!("{record:?}") };
        assert_eq!((third.number, third.fingerprint, third.outcome), (3, gather(3), Outcome::Done));
        assert_eq!(third.path.as_deref(), Some("tcp/direct"));
        assert!(third.returned_ns >= Some(third.enqueued_ns));
        assert_eq!((fifth.number, fifth.outcome, fifth.returned_ns), (5, Outcome::InProgress, None));
        recorder.fail(Instant::now());
        assert_eq!(recorder.history().record().calls[2].outcome, Outcome::Failed);
    }

    #[test]
    fn more_calls_at_once_than_are_kept_end_well() {
        let mut recorder = Recorder::new("world", &[Rank(0)], 2);
        for number in 1..=5 {
            begin(&mut recorder, number);
        }
        for _ in 1..=5 {
            recorder.end(Completion { enqueued: true, ..DONE }, Instant::now());
        }
        let record = recorder.history().record();
        assert!(record.calls.iter().all(|call| call.outcome == Outcome::Enqueued), "{record:?}");
        assert_eq!(record.calls.iter().map(|call| call.number).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn activity_is_that_of_collectives_and_of_the_oldest_call_that_has_not_returned() {
        let at = |recorder: &Recorder| {
            recorder.history().activity(unix_ns(Instant::now()), CallSummary::default())
        };
        let mut recorder = Recorder::new("world", &[Rank(0), Rank(1)], 8);
        assert_eq!(
            (at(&recorder).begun, at(&recorder).ended, at(&recorder).current),
            (Some(0), Some(0), None)
        );
        let message = CallFingerprint { operation: Operation::Send { to: Rank(1) }, ..gather(1) };
        begin(&mut recorder, 1);
        recorder.end(DONE, Instant::now());
        recorder.begin(&message, 7, 1, Instant::now());
        let sending = at(&recorder);
        assert_eq!((sending.begun, sending.ended), (Some(1), Some(1)));
        assert_eq!(sending.current.map(|call| (call.number, call.operation)), Some((7, message.operation)));
        begin(&mut recorder, 2);
        assert_eq!((at(&recorder).begun, at(&recorder).ended), (Some(2), Some(1)));
        assert_eq!(at(&recorder).current.map(|call| call.number), Some(7), "the oldest");
        recorder.fail(Instant::now());
        assert_eq!((at(&recorder).ended, at(&recorder).current), (Some(2), None));
        // A replay of three calls.
        recorder.begin(&gather(1), 3, 3, Instant::now());
        recorder.end(Completion { enqueued: true, ..DONE }, Instant::now());
        assert_eq!((at(&recorder).begun, at(&recorder).ended), (Some(5), Some(5)));
        for number in 1..=8 {
            recorder.begin(&message, number, 1, Instant::now());
            recorder.end(DONE, Instant::now());
        }
        assert_eq!((at(&recorder).begun, at(&recorder).ended), (None, None), "messages have replaced it");
    }

    #[test]
    fn a_recorder_without_room_keeps_nothing() {
        let mut recorder = Recorder::new("world", &[Rank(0)], 0);
        begin(&mut recorder, 1);
        recorder.end(DONE, Instant::now());
        recorder.fail(Instant::now());
        assert!(recorder.history().record().calls.is_empty());
        assert_eq!(recorder.history().activity(0, CallSummary::default()).begun, None);
    }
}
