//! Calls that are on the GPU, from being enqueued to being done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::call::Signature;
use crate::device::{DeviceError, Event, Stream};

/// Calls followed at a time. One more is done all the same, untimed and unwatched.
const FOLLOWED: usize = 256;

/// A call between two events.
pub(super) struct Flight {
    pub(super) signature: Signature,
    pub(super) sequence: u64,
    pub(super) enqueued: Instant,
    pub(super) deadline: Instant,
    start: Event,
    end: Event,
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
        (signature, sequence): (Signature, u64),
        (enqueued, deadline): (Instant, Instant),
    ) -> Result<(), DeviceError> {
        end.record(stream)?;
        self.flying.push_back(Flight { signature, sequence, enqueued, deadline, start, end });
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
            if self.landed.len() < 16 * FOLLOWED {
                self.landed.push((flight.signature, took));
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
