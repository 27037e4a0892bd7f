//! Calls that are on the GPU, from being enqueued to being done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::call::Signature;
use crate::device::{DeviceError, Event, Stream};

/// Calls followed at a time. One more is done all the same, untimed and unwatched.
const FOLLOWED: usize = 256;

/// Times kept for whoever asks.
const MOST_LANDED: usize = 16 * FOLLOWED;

fn is_same(a: &Option<Arc<Captured>>, b: &Option<Arc<Captured>>) -> bool {
    a.as_ref().zip(b.as_ref()).is_some_and(|(a, b)| Arc::ptr_eq(a, b))
}

/// A call between two events.
pub(super) struct Flight {
    /// None for several calls together.
    pub(super) signature: Option<Signature>,
    pub(super) sequence: u64,
    pub(super) enqueued: Instant,
    pub(super) deadline: Instant,
    start: Event,
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

    /// Counts a call.
    pub(super) fn count(&mut self, signature: Signature) {
        match self.counts.iter_mut().find(|(known, _)| *known == signature) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((signature, 1)),
        }
    }
}

/// Calls in the order they were enqueued, and events to use again.
#[derive(Default)]
pub(super) struct Flights {
    flying: VecDeque<Flight>,
    landed: Vec<(Signature, Duration)>,
    events: Vec<(Event, Event)>,
}

impl Flights {
    /// Marks the beginning of a call; none if too many are followed already.
    pub(super) fn begin(&mut self, stream: &Stream) -> Result<Option<(Event, Event)>, DeviceError> {
        if self.flying.len() >= FOLLOWED {
            self.land()?;
            if self.flying.len() >= FOLLOWED {
                return Ok(None);
            }
        }
        let events = match self.events.pop() {
            Some(events) => events,
            None => (Event::new(stream, true)?, Event::new(stream, true)?),
        };
        events.0.record(stream)?;
        Ok(Some(events))
    }

    /// Marks its end.
    pub(super) fn end(
        &mut self,
        (start, end): (Event, Event),
        stream: &Stream,
        (signature, sequence): (Option<Signature>, u64),
        (enqueued, deadline): (Instant, Instant),
    ) -> Result<(), DeviceError> {
        self.take_off((start, end), stream, (signature, sequence), (enqueued, deadline), None)
    }

    /// Marks the end of a graph's launch.
    pub(super) fn end_launch(
        &mut self,
        events: (Event, Event),
        stream: &Stream,
        captured: &Arc<Captured>,
        sequence: u64,
        when: (Instant, Instant),
    ) -> Result<(), DeviceError> {
        self.take_off(events, stream, (None, sequence), when, Some(Arc::clone(captured)))
    }

    fn take_off(
        &mut self,
        (start, end): (Event, Event),
        stream: &Stream,
        (signature, sequence): (Option<Signature>, u64),
        (enqueued, deadline): (Instant, Instant),
        captured: Option<Arc<Captured>>,
    ) -> Result<(), DeviceError> {
        end.record(stream)?;
        self.flying.push_back(Flight { signature, sequence, enqueued, deadline, start, end, captured });
        Ok(())
    }

    /// Takes what is done out of the queue. Never waits.
    pub(super) fn land(&mut self) -> Result<(), DeviceError> {
        while let Some(first) = self.flying.front() {
            if !first.end.is_done()? {
                break;
            }
            let Some(flight) = self.flying.pop_front() else { break };
            let took = flight.end.since(&flight.start)?;
            if self.landed.len() < MOST_LANDED {
                self.landed.extend(flight.signature.map(|signature| (signature, took)));
                // A later launch of the same graph may be setting them again: then they are its own.
                let latest = !self.flying.iter().any(|f| is_same(&f.captured, &flight.captured));
                for (signature, start, end) in
                    flight.captured.iter().filter(|_| latest).flat_map(|c| &c.timed)
                {
                    self.landed.push((*signature, end.since(start)?));
                }
            }
            self.events.push((flight.start, flight.end));
        }
        Ok(())
    }

    /// The oldest call that is not done.
    pub(super) fn oldest(&self) -> Option<&Flight> {
        self.flying.front()
    }

    /// What has been done since the last time this was asked, and how long it took on the GPU.
    pub(super) fn take_landed(&mut self) -> Vec<(Signature, Duration)> {
        std::mem::take(&mut self.landed)
    }
}
