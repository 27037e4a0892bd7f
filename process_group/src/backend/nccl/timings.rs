//! Calls that are on the GPU, from being enqueued to being done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::Signature;
use crate::device::{DeviceError, Event, Stream};

/// Marks in flight at a time. Calls beyond them are done all the same, and followed once there is room again.
const FOLLOWED: usize = 256;
/// Times kept for whoever asks.
const MOST_LANDED: usize = 16 * FOLLOWED;
/// The least time between two calls that are timed: the two events around one take the GPU 6 microseconds, as long as a
/// short call.
const TIMED_EVERY: Duration = Duration::from_micros(200);
/// The least time between two marks behind calls that follow one another.
const MARKED_EVERY: Duration = Duration::from_micros(100);
/// Of so many calls of one kind in a graph one is timed.
const TIMED_OF: u64 = 64;

/// What is waited for, and until when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    /// None for several calls together.
    pub(super) signature: Option<Signature>,
    pub(super) sequence: u64,
    pub(super) enqueued: Instant,
    pub(super) deadline: Instant,
}

/// Calls in front of one mark.
struct Flight {
    /// The oldest of them.
    awaited: Awaited,
    /// The last of them, if it is timed, and where it begins.
    timed: Option<(Signature, Event)>,
    end: Event,
    /// For a launch of a graph: what is in it.
    captured: Option<Arc<Captured>>,
}

/// Calls that were captured into a graph.
#[derive(Default, Debug)]
pub struct Captured {
    /// Those that have events around them, which each launch sets anew.
    timed: Vec<(Signature, Event, Event)>,
    /// How many of each kind there are.
    counts: Vec<(Signature, u64)>,
}

impl Captured {
    /// How many calls of each kind there are.
    pub(crate) fn counts(&self) -> &[(Signature, u64)] {
        &self.counts
    }

    /// Marks the beginning of a call in the graph.
    pub(super) fn begin(stream: &Stream) -> Result<(Event, Event), DeviceError> {
        let events = (Event::new(stream, true)?, Event::new(stream, true)?);
        events.0.record_external(stream)?;
        Ok(events)
    }

    /// Marks its end.
    pub(super) fn end(
        &mut self,
        signature: Signature,
        (start, end): (Event, Event),
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        end.record_external(stream)?;
        self.timed.push((signature, start, end));
        Ok(())
    }

    /// Counts a call, and says whether it is one of those to time.
    pub(super) fn count(&mut self, signature: Signature) -> bool {
        if let Some((_, count)) = self.counts.iter_mut().find(|(known, _)| *known == signature) {
            *count += 1;
            return *count % TIMED_OF == 1;
        }
        self.counts.push((signature, 1));
        true
    }
}

/// Calls of one stream in the order they were enqueued, and events to use again.
///
/// Events cost the GPU time, so that calls in quick succession share a mark, and few are timed.
pub(super) struct Flights {
    marked_every: Duration,
    flying: VecDeque<Flight>,
    /// The oldest call behind the last mark.
    unmarked: Option<Awaited>,
    last_mark: Option<Instant>,
    last_timed: Option<Instant>,
    landed: Vec<(Signature, Duration)>,
    timed: Vec<(Event, Event)>,
    marks: Vec<Event>,
}

impl Flights {
    /// Of a stream on which many calls may follow one another.
    pub(super) fn of_many() -> Self {
        Self::new(MARKED_EVERY)
    }

    /// Of a stream that is seldom used, each call of which has a mark.
    pub(super) fn of_few() -> Self {
        Self::new(Duration::ZERO)
    }

    fn new(marked_every: Duration) -> Self {
        Self {
            marked_every,
            flying: VecDeque::new(),
            unmarked: None,
            last_mark: None,
            last_timed: None,
            landed: Vec::new(),
            timed: Vec::new(),
            marks: Vec::new(),
        }
    }

    /// Marks the beginning of a call, if it is to be timed.
    pub(super) fn begin(
        &mut self,
        stream: &Stream,
        now: Instant,
    ) -> Result<Option<(Event, Event)>, DeviceError> {
        if self.last_timed.is_some_and(|last| now - last < TIMED_EVERY) || !self.has_room()? {
            return Ok(None);
        }
        self.last_timed = Some(now);
        let events = match self.timed.pop() {
            Some(events) => events,
            None => (Event::new(stream, true)?, Event::new(stream, true)?),
        };
        events.0.record(stream)?;
        Ok(Some(events))
    }

    /// Takes note of an enqueued call, with the events that [`begin`](Self::begin) gave for it.
    pub(super) fn end(
        &mut self,
        events: Option<(Event, Event)>,
        stream: &Stream,
        awaited: Awaited,
    ) -> Result<(), DeviceError> {
        if let (Some((start, end)), Some(signature)) = (events, awaited.signature) {
            end.record(stream)?;
            let awaited = self.unmarked.take().unwrap_or(awaited);
            self.last_mark = Some(awaited.enqueued);
            self.flying.push_back(Flight { awaited, timed: Some((signature, start)), end, captured: None });
            return Ok(());
        }
        self.unmarked.get_or_insert(awaited);
        let now = awaited.enqueued;
        if self.last_mark.is_none_or(|last| now - last >= self.marked_every) {
            self.mark(stream, now, None)?;
        }
        Ok(())
    }

    /// Takes note of a graph that has been launched.
    pub(super) fn launched(
        &mut self,
        stream: &Stream,
        awaited: Awaited,
        captured: &Arc<Captured>,
    ) -> Result<(), DeviceError> {
        self.unmarked.get_or_insert(awaited);
        self.mark(stream, awaited.enqueued, Some(Arc::clone(captured)))
    }

    /// Puts a mark behind calls that have none yet.
    pub(super) fn mark(
        &mut self,
        stream: &Stream,
        now: Instant,
        captured: Option<Arc<Captured>>,
    ) -> Result<(), DeviceError> {
        if self.unmarked.is_none() || !self.has_room()? {
            return Ok(());
        }
        let end = match self.marks.pop() {
            Some(mark) => mark,
            None => Event::new(stream, false)?,
        };
        end.record(stream)?;
        self.last_mark = Some(now);
        let awaited = self.unmarked.take();
        self.flying.extend(awaited.map(|awaited| Flight { awaited, timed: None, end, captured }));
        Ok(())
    }

    /// The stream has been found idle.
    pub(super) fn all_done(&mut self) -> Result<(), DeviceError> {
        self.unmarked = None;
        self.land()
    }

    fn has_room(&mut self) -> Result<bool, DeviceError> {
        if self.flying.len() >= FOLLOWED {
            self.land()?;
        }
        Ok(self.flying.len() < FOLLOWED)
    }

    /// Takes what is done out of the queue. Never waits.
    pub(super) fn land(&mut self) -> Result<(), DeviceError> {
        while let Some(first) = self.flying.front() {
            if !first.end.is_done()? {
                break;
            }
            let Some(Flight { timed, end, captured, .. }) = self.flying.pop_front() else { break };
            match timed {
                Some((signature, start)) => {
                    self.keep(signature, end.since(&start)?);
                    self.timed.push((start, end));
                }
                None => self.marks.push(end),
            }
            // A later launch of the same graph may be setting its events again: then they are its own.
            let latest = |captured: &Arc<Captured>| {
                !self.flying.iter().filter_map(|f| f.captured.as_ref()).any(|c| Arc::ptr_eq(c, captured))
            };
            if let Some(captured) = captured.filter(latest) {
                for (signature, start, end) in &captured.timed {
                    self.keep(*signature, end.since(start)?);
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, signature: Signature, took: Duration) {
        if self.landed.len() < MOST_LANDED {
            self.landed.push((signature, took));
        }
    }

    /// The oldest call that is not known to be done.
    pub(super) fn oldest(&self) -> Option<Awaited> {
        self.flying.front().map(|flight| flight.awaited).or(self.unmarked)
    }

    /// What has been timed since the last time this was asked, and how long it took on the GPU.
    pub(super) fn take_landed(&mut self) -> Vec<(Signature, Duration)> {
        std::mem::take(&mut self.landed)
    }
}
