//! Measures the time of calls on the GPU by events around some of them, which are read later, without waiting.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::capture::{CapturedTiming, StandsFor, StreamCapture};
use crate::backend::timings::{CallTime, TimedCall, Timings};
use crate::device::{DeviceError, Event, Stream};
use crate::paths::Path;
use crate::types::operation::CallFingerprint;
use crate::types::sync::lock;

/// Minimum time between two timed calls of a kind: the two events around one take the GPU as long as a short call.
const INTERVAL: Duration = Duration::from_millis(1);
/// Maximum number of timed calls of a stream that have not been read.
const MAX_PENDING: usize = 256;
/// Maximum number of times kept for a reader.
const MAX_TIMES: usize = 16 * MAX_PENDING;

/// Times the calls of one group.
#[derive(Default)]
pub(super) struct CallTimer {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Pending timings of each stream, oldest first.
    pending: [VecDeque<Timing>; 2],
    /// The last launch of each graph, and the event after it.
    launches: Vec<(Arc<StreamCapture>, Arc<Event>)>,
    times: Vec<TimedCall>,
    /// Pairs of events for reuse.
    free: Vec<(Event, Arc<Event>)>,
}

struct Timing {
    call: CallFingerprint,
    path: Path,
    start: Event,
    end: Arc<Event>,
}

/// Selects the calls of the caller's thread that are timed.
#[derive(Default)]
pub(super) struct Throttle {
    kinds: Vec<Kind>,
    /// Position of the last call's kind.
    recent: usize,
}

/// Calls of one kind.
struct Kind {
    call: CallFingerprint,
    /// Time of the last timed call.
    last: Instant,
    /// Number of timed calls.
    timed: u32,
    /// Number of calls to skip before the next.
    pass: u32,
}

impl Throttle {
    /// Number of remembered kinds: prompts of many lengths create many.
    const ROOM: usize = 32;
    /// Maximum number of skipped calls. The number changes each time, so that not only the first call of each step is timed.
    const PASS: u32 = 8;

    /// Returns true if this call is to be timed.
    fn takes(&mut self, call: CallFingerprint, now: Instant) -> bool {
        if self.kinds.get(self.recent).is_none_or(|kind| kind.call != call) {
            let known = self.kinds.iter().position(|kind| kind.call == call);
            let Some(known) = known else {
                if self.kinds.len() == Self::ROOM {
                    let is_recent = |kind: &Kind| now.saturating_duration_since(kind.last) < INTERVAL;
                    if self.kinds.iter().any(is_recent) {
                        return false;
                    }
                    self.kinds.clear();
                }
                self.recent = self.kinds.len();
                self.kinds.push(Kind { call, last: now, timed: 1, pass: 1 });
                return true;
            };
            self.recent = known;
        }
        let kind = &mut self.kinds[self.recent];
        if now.saturating_duration_since(kind.last) < INTERVAL {
            return false;
        }
        if kind.pass > 0 {
            kind.pass -= 1;
            return false;
        }
        kind.last = now;
        kind.timed = kind.timed.wrapping_add(1);
        kind.pass = kind.timed.wrapping_mul(3) % Self::PASS;
        true
    }
}

/// A call in the process of being timed.
pub(super) struct Started {
    start: Event,
    end: Arc<Event>,
}

impl CallTimer {
    /// Records the start of a call, if it is to be timed. Takes no lock otherwise.
    pub(super) fn begin(
        &self,
        throttle: &mut Throttle,
        call: CallFingerprint,
        which: usize,
        stream: &Stream,
        now: Instant,
    ) -> Result<Option<Started>, DeviceError> {
        if !throttle.takes(call, now) {
            return Ok(None);
        }
        let mut state = lock(&self.state);
        if state.pending[which].len() >= MAX_PENDING {
            state.read()?;
            if state.pending[which].len() >= MAX_PENDING {
                return Ok(None);
            }
        }
        let (start, end) = match state.free.pop() {
            Some(events) => events,
            None => (Event::new(stream, true)?, Arc::new(Event::new(stream, true)?)),
        };
        start.record(stream)?;
        Ok(Some(Started { start, end }))
    }

    /// Records the end of a call. Returns the event, which follows all earlier work of the stream.
    pub(super) fn end(
        &self,
        started: Started,
        (call, path): (CallFingerprint, Path),
        which: usize,
        stream: &Stream,
    ) -> Result<Arc<Event>, DeviceError> {
        let Started { start, end } = started;
        end.record(stream)?;
        let mark = Arc::clone(&end);
        lock(&self.state).pending[which].push_back(Timing { call, path, start, end });
        Ok(mark)
    }

    /// Called before the launch of a graph, which records its events again: reads those of its last launch, if that is done.
    pub(super) fn launching(&self, captured: &Arc<StreamCapture>) -> Result<(), DeviceError> {
        if captured.timed.is_empty() {
            return Ok(());
        }
        let mut state = lock(&self.state);
        state.read()?;
        state.launches.retain(|(known, _)| !Arc::ptr_eq(known, captured));
        Ok(())
    }

    /// Called after the launch of the graph, with this event after it.
    pub(super) fn launched(&self, captured: &Arc<StreamCapture>, end: &Arc<Event>) {
        if !captured.timed.is_empty() {
            lock(&self.state).launches.push((Arc::clone(captured), Arc::clone(end)));
        }
    }
}

impl State {
    /// Reads the times of all calls that are done. Never waits.
    fn read(&mut self) -> Result<(), DeviceError> {
        for which in 0..self.pending.len() {
            while let Some(first) = self.pending[which].front() {
                if !first.end.is_done()? {
                    break;
                }
                let Some(Timing { call, path, start, mut end }) = self.pending[which].pop_front() else {
                    break;
                };
                let took = end.since(&start)?;
                self.keep(TimedCall { call, path, time: CallTime::Took(took) });
                // It is reused only if nothing else refers to it any more.
                if Arc::get_mut(&mut end).is_some() {
                    self.free.push((start, end));
                }
            }
        }
        let launches = std::mem::take(&mut self.launches);
        for (captured, end) in launches {
            if !end.is_done()? {
                self.launches.push((captured, end));
                continue;
            }
            for CapturedTiming { call, path, events, stands_for } in &captured.timed {
                let is_usual =
                    |other: &&CapturedTiming| other.call == *call && other.stands_for == StandsFor::Kind;
                // If a program launches the graph without the group, they are recorded unnoticed.
                let Ok(took) = events.took() else { continue };
                let time = match stands_for {
                    StandsFor::Nothing => continue,
                    StandsFor::Kind => CallTime::Took(took),
                    StandsFor::Meeting => {
                        let usual = captured.timed.iter().find(is_usual).map(|next| next.events.took());
                        let Some(Ok(usual)) = usual else { continue };
                        CallTime::Waited(took.saturating_sub(usual))
                    }
                };
                self.keep(TimedCall { call: *call, path: *path, time });
            }
        }
        Ok(())
    }

    fn keep(&mut self, timed: TimedCall) {
        if self.times.len() < MAX_TIMES {
            self.times.push(timed);
        }
    }
}

impl Timings for CallTimer {
    fn take(&self) -> Vec<TimedCall> {
        let mut state = lock(&self.state);
        if let Err(error) = state.read() {
            // The next call on the GPU reports it; the times read before it count.
            tracing::debug!(%error, "the GPU's times cannot be read");
        }
        std::mem::take(&mut state.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{Operation, ReduceOp};

    fn call(count: usize) -> CallFingerprint {
        CallFingerprint::new(Operation::AllReduce(ReduceOp::Sum), DType::F32, count)
    }

    #[test]
    fn no_place_in_a_step_stands_for_all_calls_of_a_kind() {
        let (mut throttle, mut now) = (Throttle::default(), Instant::now());
        let (mut places, mut singles) = ([0u32; 9], 0);
        for _ in 0..500 {
            for place in &mut places {
                *place += u32::from(throttle.takes(call(1), now));
            }
            singles += u32::from(throttle.takes(call(2), now));
            now += 2 * INTERVAL;
        }
        assert!(places.iter().filter(|timed| **timed > 10).count() >= 5, "{places:?}");
        assert!(places.iter().sum::<u32>() <= 500 && singles > 50, "{places:?}, {singles}");
    }

    #[test]
    fn calls_of_a_kind_are_not_timed_more_often_than_the_interval() {
        let (mut throttle, now) = (Throttle::default(), Instant::now());
        let timed = (0..1000).filter(|_| throttle.takes(call(1), now)).count();
        assert_eq!(timed, 1);
        // Many kinds are forgotten, but not every call of them is timed.
        let timed = (2..200).filter(|count| throttle.takes(call(*count), now)).count();
        assert_eq!(timed + 1, Throttle::ROOM);
        assert!(throttle.takes(call(200), now + INTERVAL) && throttle.kinds.len() == 1);
    }
}
