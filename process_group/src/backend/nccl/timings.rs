//! Calls that are on the GPU, from being enqueued to being done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::messages::Peers;
use crate::device::{DeviceError, Event, Stream};
use crate::operation::Signature;

/// Marks in flight at a time. Calls beyond them are done all the same, and followed once there is room again.
const FOLLOWED: usize = 256;
/// Times kept for whoever asks.
const MOST_LANDED: usize = 16 * FOLLOWED;
/// The least time between two calls that are timed: the two events around one take the GPU 6 microseconds, as long as a
/// short call, and the host more than two.
const TIMED_EVERY: Duration = Duration::from_millis(1);
/// The least time between two marks behind calls that follow one another.
const MARKED_EVERY: Duration = Duration::from_micros(100);
/// Calls that are followed by no other for so long are marked by somebody else.
const QUIET: Duration = Duration::from_millis(10);
/// Of so many calls of one kind in a graph one is timed.
const TIMED_OF: u64 = 64;

/// What is waited for, and until when: one call, or several with one mark behind them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    /// The newest; none for calls that are told apart no further.
    pub(super) signature: Option<Signature>,
    /// Its number.
    pub(super) sequence: u64,
    /// Collectives of the group up to here, by which others know whether they have come as far.
    pub(super) collectives: u64,
    /// With whom messages are exchanged among them.
    pub(super) peers: Peers,
    /// When the oldest was enqueued, and when it must be done.
    pub(super) enqueued: Instant,
    pub(super) deadline: Instant,
}

impl Awaited {
    /// This and a newer one, behind which comes the mark.
    fn and(self, newer: Self) -> Self {
        let signature = match (self.signature, newer.signature) {
            // A message waits for one rank, another call for others.
            (Some(a), Some(b))
                if a.operation == b.operation
                    || !a.operation.is_point_to_point() && !b.operation.is_point_to_point() =>
            {
                Some(b)
            }
            _ => None,
        };
        let peers = self.peers.and(newer.peers);
        Self { signature, enqueued: self.enqueued, deadline: self.deadline, peers, ..newer }
    }
}

/// Calls in front of one mark.
struct Flight {
    awaited: Awaited,
    /// The last of them, if it is timed, and where it begins.
    timed: Option<(Signature, Event)>,
    end: Event,
    /// For a launch of a graph: what is in it.
    captured: Option<Arc<Captured>>,
}

/// Calls behind the last mark.
#[derive(Clone, Copy)]
struct Unmarked {
    awaited: Awaited,
    /// When the newest was enqueued.
    newest: Instant,
    /// How many calls there have been, it included.
    calls: u64,
}

/// Calls that were captured into a graph.
#[derive(Default, Debug)]
pub struct Captured {
    /// Those that have events around them, which each launch sets anew.
    timed: Vec<(Signature, Event, Event)>,
    /// How many of each kind there are.
    counts: Vec<(Signature, u64)>,
    /// The collectives, messages between two ranks left out, in their order.
    collectives: Vec<Signature>,
}

impl Captured {
    /// The collectives, messages between two ranks left out, in their order.
    pub(crate) fn collectives(&self) -> &[Signature] {
        &self.collectives
    }

    /// How many calls of each kind there are.
    pub(crate) fn counts(&self) -> &[(Signature, u64)] {
        &self.counts
    }

    /// With whom messages are exchanged.
    pub(super) fn peers(&self) -> Peers {
        self.counts.iter().map(|(signature, _)| Peers::of(signature)).fold(Peers::default(), Peers::and)
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

    /// Whether the next call of this kind is one of those to time.
    pub(super) fn times(&self, signature: Signature) -> bool {
        let before = self.counts.iter().find(|(known, _)| *known == signature).map_or(0, |(_, count)| *count);
        before.is_multiple_of(TIMED_OF)
    }

    /// Counts a call.
    pub(super) fn count(&mut self, signature: Signature) {
        if !signature.operation.is_point_to_point() {
            self.collectives.push(signature);
        }
        if let Some((_, count)) = self.counts.iter_mut().find(|(known, _)| *known == signature) {
            *count += 1;
        } else {
            self.counts.push((signature, 1));
        }
    }
}

/// Calls of one stream in the order they were enqueued, and events to use again.
///
/// Events cost the GPU time, so that calls in quick succession share a mark, and few are timed.
pub(super) struct Flights {
    marked_every: Duration,
    flying: VecDeque<Flight>,
    unmarked: Option<Unmarked>,
    /// Calls so far.
    calls: u64,
    /// A graph that is being launched, and sets its events anew.
    launching: Option<Arc<Captured>>,
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
            calls: 0,
            launching: None,
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
        let now = awaited.enqueued;
        if let (Some((start, end)), Some(signature)) = (events, awaited.signature) {
            end.record(stream)?;
            let awaited = self.unmarked.take().map_or(awaited, |u| u.awaited.and(awaited));
            self.last_mark = Some(now);
            let timed = Some((signature, start));
            self.flying.push_back(Flight { awaited, timed, end, captured: None });
            return Ok(());
        }
        self.await_mark(awaited);
        if self.last_mark.is_none_or(|last| now - last >= self.marked_every) {
            self.mark(stream, now, None)?;
        }
        Ok(())
    }

    fn await_mark(&mut self, awaited: Awaited) {
        self.calls += 1;
        let all = self.unmarked.map_or(awaited, |u| u.awaited.and(awaited));
        self.unmarked = Some(Unmarked { awaited: all, newest: awaited.enqueued, calls: self.calls });
    }

    /// A graph is about to be launched.
    pub(super) fn launching(&mut self, captured: &Arc<Captured>) -> Result<(), DeviceError> {
        // The last launch's times are in events that this one sets again.
        self.land()?;
        self.launching = Some(Arc::clone(captured));
        Ok(())
    }

    /// It has been launched, or not.
    pub(super) fn launched(&mut self, stream: &Stream, awaited: Option<Awaited>) -> Result<(), DeviceError> {
        let captured = self.launching.take();
        let Some(awaited) = awaited else { return Ok(()) };
        self.await_mark(awaited);
        self.mark(stream, awaited.enqueued, captured)
    }

    /// Puts a mark behind calls that have none yet.
    fn mark(
        &mut self,
        stream: &Stream,
        now: Instant,
        captured: Option<Arc<Captured>>,
    ) -> Result<(), DeviceError> {
        // On a stream with a mark for each call, nothing else would come to mark the last ones.
        if !self.has_room()? && !self.marked_every.is_zero() {
            return Ok(());
        }
        let Some(Unmarked { awaited, .. }) = self.unmarked else { return Ok(()) };
        let end = match self.marks.pop() {
            Some(mark) => mark,
            None => Event::new(stream, false)?,
        };
        end.record(stream)?;
        self.last_mark = Some(now);
        self.unmarked = None;
        self.flying.push_back(Flight { awaited, timed: None, end, captured });
        Ok(())
    }

    /// The number of the last call, if it was made a while ago and has no mark: whoever made it may not come again.
    pub(super) fn lacks_mark(&self, now: Instant) -> Option<u64> {
        self.unmarked
            .filter(|unmarked| now.saturating_duration_since(unmarked.newest) >= QUIET)
            .map(|u| u.calls)
    }

    /// Takes a mark that another thread has put behind this call and all before it.
    pub(super) fn marked_late(&mut self, calls: u64, end: Event, now: Instant) {
        let Some(Unmarked { mut awaited, .. }) = self.unmarked.filter(|unmarked| unmarked.calls == calls)
        else {
            return;
        };
        // What stands before the mark by now may be anything: the calls may be done, messages taken though nobody receives
        // them. It has as much time as the calls had.
        awaited.peers = awaited.peers.receives();
        awaited.deadline = now + awaited.deadline.saturating_duration_since(awaited.enqueued);
        self.unmarked = None;
        self.flying.push_back(Flight { awaited, timed: None, end, captured: None });
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
                let later = self.flying.iter().filter_map(|f| f.captured.as_ref()).chain(&self.launching);
                !later.into_iter().any(|c| Arc::ptr_eq(c, captured))
            };
            if let Some(captured) = captured.filter(latest) {
                for (signature, start, end) in &captured.timed {
                    // Who launches it past the group sets them unseen.
                    if let Ok(took) = end.since(start) {
                        self.keep(*signature, took);
                    }
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

    /// The oldest calls that are not known to be done.
    pub(super) fn oldest(&self) -> Option<Awaited> {
        let flying = self.flying.front().map(|flight| flight.awaited);
        // Of calls without a mark, nothing is known yet.
        flying.or(self
            .unmarked
            .map(|Unmarked { awaited, .. }| Awaited { peers: awaited.peers.receives(), ..awaited }))
    }

    /// What has been timed since the last time this was asked, and how long it took on the GPU.
    pub(super) fn take_landed(&mut self) -> Vec<(Signature, Duration)> {
        std::mem::take(&mut self.landed)
    }
}
