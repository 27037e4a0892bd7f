//! The newest calls of a group, in memory that is allocated once.
//!
//! One thread writes at a time: [`Recorder`] needs `&mut`, and a group keeps it under the lock that a call holds. Any thread may
//! read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::activity::{CurrentCall, GroupActivity};
use super::record::{CallRecord, Failure, GroupRecord, Outcome};
use super::slot::{Slot, WORDS};
use crate::backend::Completion;
use crate::error::Error;
use crate::link::wire::fingerprint;
use crate::observe::profile::CallSummary;
use crate::paths::{Path, PeerAlgorithm};
use crate::schedule::Algorithm;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;

/// Number of the newest calls that determine the activity of a group.
const NEWEST: u64 = 4096;

/// The history that the group shares with the readers of its record.
#[derive(Debug)]
pub(crate) struct CallHistory {
    name: String,
    members: Vec<Rank>,
    slots: Box<[Slot]>,
    /// Number of calls so far.
    begun: AtomicU64,
    failure: OnceLock<Failure>,
}

impl CallHistory {
    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    pub(super) fn record(&self) -> GroupRecord {
        let begun = self.begun.load(Ordering::Acquire);
        let oldest = begun.saturating_sub(self.slots.len() as u64);
        let calls: Vec<CallRecord> = (oldest..begun)
            .filter_map(|call| decode(self.slots[call as usize % self.slots.len()].read(call)?))
            .collect();
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
        let begun = self.begun.load(Ordering::Acquire);
        let capacity = self.slots.len() as u64;
        let oldest = begun.saturating_sub(capacity.min(NEWEST));
        for call in (oldest..begun).rev() {
            let words = self.slots[call as usize % self.slots.len()].read(call);
            let Some(call) = words.and_then(decode).filter(|call| call.outcome != Outcome::Captured) else {
                continue;
            };
            let operation = call.fingerprint.operation;
            let is_current = call.outcome == Outcome::InProgress;
            if is_current {
                let elapsed = Duration::from_nanos(now.saturating_sub(call.enqueued_ns));
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
        if oldest == 0 && capacity > 0 {
            activity.begun = activity.begun.or(Some(0));
            activity.ended = Some(0);
        }
        activity
    }
}

fn decode([number, a, b, begin, end, state]: [u64; WORDS]) -> Option<CallRecord> {
    let mut packed = [0; fingerprint::BYTES];
    packed[..8].copy_from_slice(&a.to_le_bytes());
    packed[8..].copy_from_slice(&b.to_le_bytes());
    let [outcome, path, ..] = state.to_le_bytes();
    let outcome = *Outcome::ALL.get(usize::from(outcome))?;
    Some(CallRecord {
        number,
        calls: state >> 16,
        fingerprint: fingerprint::unpack(&packed)?,
        path: path_of(path).map(|path| path.to_string()),
        enqueued_ns: begin,
        returned_ns: (outcome != Outcome::InProgress).then_some(end),
        outcome,
    })
}

/// The first number of the schedules through shared memory.
const SHARED: u8 = 64;
/// The first number of the algorithms of this crate's own kernels.
const PEER: u8 = 128;

/// Returns the number of a path, 0 for none.
fn number_of(path: Option<Path>) -> u8 {
    match path {
        None => 0,
        Some(Path::Local) => 1,
        Some(Path::Nccl) => 3,
        Some(Path::SharedMemory(algorithm)) => SHARED + algorithm as u8,
        Some(Path::PeerMemory(algorithm)) => PEER + algorithm as u8,
        Some(Path::Tcp(algorithm)) => 4 + algorithm as u8,
    }
}

fn path_of(number: u8) -> Option<Path> {
    match number {
        1 => Some(Path::Local),
        3 => Some(Path::Nccl),
        SHARED..PEER => Algorithm::ALL.get(usize::from(number - SHARED)).copied().map(Path::SharedMemory),
        PEER.. => PeerAlgorithm::ALL.get(usize::from(number - PEER)).copied().map(Path::PeerMemory),
        tcp => Algorithm::ALL.get(usize::from(tcp).checked_sub(4)?).copied().map(Path::Tcp),
    }
}

/// The writer's end of a ring.
#[derive(Debug)]
pub(crate) struct Recorder {
    ring: Arc<CallHistory>,
    /// The time of the first reading, by both clocks.
    anchor: (Instant, u64),
    /// Number of calls that have ended.
    ended: u64,
    begun: u64,
}

impl Recorder {
    /// Creates a recorder that keeps this many calls; 0 keeps none.
    pub(crate) fn new(name: &str, members: &[Rank], capacity: usize) -> Self {
        let ring = Arc::new(CallHistory {
            name: name.to_owned(),
            members: members.to_vec(),
            slots: (0..capacity).map(|_| Slot::default()).collect(),
            begun: AtomicU64::new(0),
            failure: OnceLock::new(),
        });
        Self { ring, anchor: anchor(), ended: 0, begun: 0 }
    }

    pub(crate) const fn ring(&self) -> &Arc<CallHistory> {
        &self.ring
    }

    /// Records the start of a call, or of `calls` calls of a replay.
    pub(crate) fn begin(&mut self, fingerprint: &CallFingerprint, number: u64, calls: u64, at: Instant) {
        let Some(slot) = self.slot(self.begun) else { return };
        let packed = u128::from_le_bytes(fingerprint::pack(fingerprint));
        slot.write(
            4 * self.begun + 1,
            &[
                (0, number),
                (1, packed as u64),
                (2, (packed >> 64) as u64),
                (3, since(self.anchor, at)),
                (4, 0),
                (5, state(calls, None, Outcome::InProgress)),
            ],
        );
        self.begun += 1;
        self.ring.begun.store(self.begun, Ordering::Release);
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
    pub(crate) fn give_up(&self, error: &Error) {
        let _ = self.ring.failure.set(Failure::new(error));
    }

    fn end_as(&mut self, path: Option<Path>, outcome: Outcome, at: Instant) {
        if self.ended == self.begun {
            return;
        }
        let call = self.ended;
        self.ended += 1;
        // A group of many calls may have replaced its first ones.
        let is_there = self.begun - call <= self.ring.slots.len() as u64;
        let Some(slot) = self.slot(call).filter(|_| is_there) else { return };
        let calls = slot.word(5) >> 16;
        slot.write(4 * call + 3, &[(4, since(self.anchor, at)), (5, state(calls, path, outcome))]);
    }

    fn slot(&self, call: u64) -> Option<&Slot> {
        let slots = &self.ring.slots;
        // Without slots there is no remainder either.
        slots.get((call as usize).checked_rem(slots.len())?)
    }
}

fn state(calls: u64, path: Option<Path>, outcome: Outcome) -> u64 {
    calls << 16 | u64::from(number_of(path)) << 8 | outcome as u64
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
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
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
        let record = recorder.ring().record();
        assert_eq!((record.overwritten, record.calls.len()), (2, 3));
        let [third, _, fifth] = &record.calls[..] else { panic!("{record:?}") };
        assert_eq!((third.number, third.fingerprint, third.outcome), (3, gather(3), Outcome::Done));
        assert_eq!(third.path.as_deref(), Some("tcp/direct"));
        assert!(third.returned_ns >= Some(third.enqueued_ns));
        assert_eq!((fifth.number, fifth.outcome, fifth.returned_ns), (5, Outcome::InProgress, None));
        recorder.fail(Instant::now());
        assert_eq!(recorder.ring().record().calls[2].outcome, Outcome::Failed);
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
        let record = recorder.ring().record();
        assert!(record.calls.iter().all(|call| call.outcome == Outcome::Enqueued), "{record:?}");
        assert_eq!(record.calls.iter().map(|call| call.number).collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn activity_is_that_of_collectives_and_of_the_oldest_call_that_has_not_returned() {
        let at =
            |recorder: &Recorder| recorder.ring().activity(unix_ns(Instant::now()), CallSummary::default());
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
        assert!(recorder.ring().record().calls.is_empty());
        assert_eq!(recorder.ring().activity(0, CallSummary::default()).begun, None);
    }

    #[test]
    fn every_path_has_a_number_of_its_own() {
        let tcp = Algorithm::ALL.map(Path::Tcp);
        let shared = Algorithm::ALL.map(Path::SharedMemory);
        let peer = PeerAlgorithm::ALL.map(Path::PeerMemory);
        let others = [Path::Local, Path::Nccl];
        for path in others.into_iter().chain(tcp).chain(shared).chain(peer) {
            assert_eq!(path_of(number_of(Some(path))), Some(path));
        }
        assert_eq!(path_of(number_of(None)), None);
    }

    #[test]
    fn a_reader_beside_the_writer_sees_whole_calls_only() {
        let mut recorder = Recorder::new("world", &[Rank(0)], 8);
        let (ring, over) = (Arc::clone(recorder.ring()), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut seen = 0;
                while !over.load(Ordering::Relaxed) || seen == 0 {
                    for call in ring.record().calls {
                        assert_eq!(call.fingerprint.count as u64, call.number);
                        assert_eq!(call.path.is_some(), call.outcome == Outcome::Done);
                        assert!(call.returned_ns.is_none_or(|end| end >= call.enqueued_ns), "{call:?}");
                        seen += 1;
                    }
                }
            });
            for number in 1..=200_000 {
                begin(&mut recorder, number);
                recorder.end(DONE, Instant::now());
            }
            over.store(true, Ordering::Relaxed);
            reader.join().expect("whole calls");
        });
    }
}
