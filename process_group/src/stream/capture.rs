//! Calls that are captured into a graph.

use std::sync::Arc;
use std::time::Duration;

use super::messages::PeerSet;
use crate::device::{DeviceError, Event, Stream};
use crate::paths::Path;
use crate::types::operation::CallFingerprint;

/// Interval of timed calls of a kind in a graph, from the second on.
const TIMED_OF: u64 = 64;

/// The calls in a graph.
#[derive(Default, Debug)]
pub(crate) struct GraphCalls {
    /// Number of calls of each kind, and their path.
    counts: Vec<(CallFingerprint, Path, u64)>,
    /// The collectives among them, in call order.
    collectives: Vec<CallFingerprint>,
}

impl GraphCalls {
    /// Returns the collectives, in call order.
    pub(crate) fn collectives(&self) -> &[CallFingerprint] {
        &self.collectives
    }

    /// Returns the number of calls of each kind, and their path.
    pub(crate) fn counts(&self) -> &[(CallFingerprint, Path, u64)] {
        &self.counts
    }

    /// Returns the peers of messages among them.
    pub(super) fn peers(&self) -> PeerSet {
        self.counts.iter().map(|(call, ..)| PeerSet::of(call)).fold(PeerSet::default(), PeerSet::union)
    }

    pub(super) fn push(&mut self, call: CallFingerprint, path: Path) {
        if !call.operation.is_point_to_point() {
            self.collectives.push(call);
        }
        match self.counts.iter_mut().find(|(known, of, _)| (*known, *of) == (call, path)) {
            Some((.., count)) => *count += 1,
            None => self.counts.push((call, path, 1)),
        }
    }

    fn count(&self, call: &CallFingerprint) -> u64 {
        self.counts.iter().filter(|(known, ..)| known == call).map(|(.., count)| count).sum()
    }
}

/// A backend's data about the calls in a graph: the calls, and the events around the timed ones, which each launch records again.
#[derive(Default, Debug)]
pub(crate) struct StreamCapture {
    pub(super) calls: Arc<GraphCalls>,
    pub(super) timed: Vec<CapturedTiming>,
    /// Events of calls that failed: the graph may record them nevertheless.
    _begun: Vec<GraphEvents>,
}

impl StreamCapture {
    /// Returns the calls.
    pub(crate) fn calls(&self) -> &GraphCalls {
        &self.calls
    }
}

/// A call of a graph that has events around it.
#[derive(Debug)]
pub(super) struct CapturedTiming {
    pub(super) call: CallFingerprint,
    pub(super) path: Path,
    pub(super) events: GraphEvents,
    pub(super) stands_for: StandsFor,
}

/// The meaning of the time of a call in a graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StandsFor {
    /// The duration of calls of its kind.
    Kind,
    /// The time for which the ranks wait for each other, compared with the second call of its kind: the first collective of a
    /// graph, where they meet, each after its own launch. If a message comes before it, no call has this meaning.
    Meeting,
    /// None: the first call of a kind that has further calls. Its events stay, as the graph records them.
    Nothing,
}

/// Two events before a call, and one after it: the first two measure the time of an event itself.
#[derive(Debug)]
pub(super) struct GraphEvents {
    before: Event,
    start: Event,
    end: Event,
}

impl GraphEvents {
    fn new(stream: &Stream) -> Result<Self, DeviceError> {
        let event = || Event::new(stream, true);
        Ok(Self { before: event()?, start: event()?, end: event()? })
    }

    fn begin(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.before.record_external(stream)?;
        self.start.record_external(stream)
    }

    /// Returns the time of the call in the last launch.
    pub(super) fn took(&self) -> Result<Duration, DeviceError> {
        Ok(self.end.since(&self.start)?.saturating_sub(self.start.since(&self.before)?))
    }
}

/// The calls of a capture in progress.
pub(super) struct Capture {
    is_timed: bool,
    calls: GraphCalls,
    timed: Vec<CapturedTiming>,
    /// Events of a call that has not ended, and of those that failed.
    begun: Vec<GraphEvents>,
}

impl Capture {
    pub(super) fn new(is_timed: bool) -> Self {
        Self { is_timed, calls: GraphCalls::default(), timed: Vec::new(), begun: Vec::new() }
    }

    /// Records the start of a call in the graph, if it is to be timed; returns true if it is.
    pub(super) fn begin(&mut self, call: &CallFingerprint, stream: &Stream) -> Result<bool, DeviceError> {
        let before = self.calls.count(call);
        let is_timed = self.is_timed && (before == 0 || before % TIMED_OF == 1);
        if is_timed {
            self.begun.push(GraphEvents::new(stream)?);
            self.begun.last().map_or(Ok(()), |events| events.begin(stream))?;
        }
        Ok(is_timed)
    }

    /// Adds a captured call, and records its end.
    pub(super) fn end(
        &mut self,
        call: CallFingerprint,
        path: Path,
        is_timed: bool,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let stands_for = match self.calls.count(&call) {
            0 if self.calls.counts.is_empty() => StandsFor::Meeting,
            0 => StandsFor::Nothing,
            _ => StandsFor::Kind,
        };
        self.calls.push(call, path);
        if is_timed && let Some(events) = self.begun.last() {
            events.end.record_external(stream)?;
        }
        if let Some(events) = self.begun.pop_if(|_| is_timed) {
            self.timed.push(CapturedTiming { call, path, events, stands_for });
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Arc<StreamCapture> {
        let Self { calls, mut timed, begun, .. } = self;
        // The only call of a kind represents the kind.
        for timing in timed.iter_mut().filter(|timing| calls.count(&timing.call) == 1) {
            timing.stands_for = StandsFor::Kind;
        }
        Arc::new(StreamCapture { calls: Arc::new(calls), timed, _begun: begun })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{Operation, ReduceOp};
    use crate::types::rank::Rank;

    #[test]
    fn calls_are_counted_by_kind_and_collectives_keep_their_order() {
        let of = |operation| CallFingerprint::new(operation, DType::F32, 3);
        let (sum, message) = (of(Operation::AllReduce(ReduceOp::Sum)), of(Operation::Send { to: Rank(2) }));
        let barrier = of(Operation::Barrier);
        let mut calls = GraphCalls::default();
        for call in [sum, message, barrier, sum] {
            calls.push(call, Path::Nccl);
        }
        assert_eq!(calls.collectives(), [sum, barrier, sum]);
        assert_eq!(
            calls.counts(),
            [(sum, Path::Nccl, 2), (message, Path::Nccl, 1), (barrier, Path::Nccl, 1)]
        );
        assert_eq!(calls.peers(), PeerSet::of(&message));
    }
}
