//! How long calls take on the GPU, measured by events around some of them and read later, without waiting.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::capture::StreamCapture;
use crate::device::{DeviceError, Event, Stream};
use crate::operation::CallFingerprint;
use crate::paths::Path;
use crate::profile::Timings;
use crate::sync::lock;

/// The least time between two calls that are timed: the two events around one cost the GPU 6 microseconds, as much as a
/// short call, and the host more than two.
const INTERVAL: Duration = Duration::from_millis(1);
/// Most timed calls of a stream that are not read yet.
const MAX_PENDING: usize = 256;
/// Most times kept for whoever asks.
const MAX_TIMES: usize = 16 * MAX_PENDING;

/// Times the calls of one group.
#[derive(Default)]
pub(super) struct CallTimer {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By stream, oldest first.
    pending: [VecDeque<Timing>; 2],
    /// The last launch of each graph, and the event behind it.
    launches: Vec<(Arc<StreamCapture>, Arc<Event>)>,
    times: Vec<(CallFingerprint, Path, Duration)>,
    /// Pairs of events to use again.
    free: Vec<(Event, Arc<Event>)>,
}

struct Timing {
    call: CallFingerprint,
    path: Path,
    start: Event,
    end: Arc<Event>,
}

/// When the caller's thread timed a call last.
#[derive(Default)]
pub(super) struct Throttle(Option<Instant>);

/// A call that is being timed.
pub(super) struct Started {
    start: Event,
    end: Arc<Event>,
}

impl CallTimer {
    /// Records the start of a call, if it is one to time. Locks nothing otherwise.
    pub(super) fn begin(
        &self,
        throttle: &mut Throttle,
        which: usize,
        stream: &Stream,
        now: Instant,
    ) -> Result<Option<Started>, DeviceError> {
        if throttle.0.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            return Ok(None);
        }
        throttle.0 = Some(now);
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

    /// Records the end of a call. Returns the event, behind which the stream has done all before it.
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

    /// A graph is about to be launched, which records its events anew: reads those of its last launch, if that is done.
    pub(super) fn launching(&self, captured: &Arc<StreamCapture>) -> Result<(), DeviceError> {
        if captured.timed.is_empty() {
            return Ok(());
        }
        let mut state = lock(&self.state);
        state.read()?;
        state.launches.retain(|(known, _)| !Arc::ptr_eq(known, captured));
        Ok(())
    }

    /// The graph has been launched, with this event behind it.
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
                self.keep(call, path, took);
                // Used again only once nobody looks at it any more.
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
            for (call, path, start, end) in &captured.timed {
                // Whoever launches the graph past the group records them unseen.
                if let Ok(took) = end.since(start) {
                    self.keep(*call, *path, took);
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, call: CallFingerprint, path: Path, took: Duration) {
        if self.times.len() < MAX_TIMES {
            self.times.push((call, path, took));
        }
    }
}

impl Timings for CallTimer {
    fn take(&self) -> Vec<(CallFingerprint, Path, Duration)> {
        let mut state = lock(&self.state);
        if let Err(error) = state.read() {
            // The next call on the GPU reports it; what was read before counts.
            tracing::debug!(%error, "the GPU's times cannot be read");
        }
        std::mem::take(&mut state.times)
    }
}
