//! Calls that are captured into a graph.

use std::sync::Arc;

use super::messages::PeerSet;
use crate::device::{DeviceError, Event, Stream};
use crate::operation::CallFingerprint;
use crate::paths::Path;

/// Of so many calls of one kind in a graph one is timed.
const TIMED_OF: u64 = 64;

/// The calls in a graph.
#[derive(Default, Debug)]
pub(crate) struct GraphCalls {
    /// How many of each kind there are, and their path.
    counts: Vec<(CallFingerprint, Path, u64)>,
    /// Those that are collectives, in call order.
    collectives: Vec<CallFingerprint>,
}

impl GraphCalls {
    /// The collectives, in call order.
    pub(crate) fn collectives(&self) -> &[CallFingerprint] {
        &self.collectives
    }

    /// How many calls of each kind there are, and their path.
    pub(crate) fn counts(&self) -> &[(CallFingerprint, Path, u64)] {
        &self.counts
    }

    /// The peers of messages among them.
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

/// What a backend knows of the calls in a graph: what they are, and the events around those that are timed, which each
/// launch records anew.
#[derive(Default, Debug)]
pub(crate) struct StreamCapture {
    pub(super) calls: Arc<GraphCalls>,
    pub(super) timed: Vec<(CallFingerprint, Path, Event, Event)>,
}

impl StreamCapture {
    /// What the calls are.
    pub(crate) fn calls(&self) -> &GraphCalls {
        &self.calls
    }
}

/// Calls while they are being captured.
#[derive(Default)]
pub(super) struct Capture {
    calls: GraphCalls,
    timed: Vec<(CallFingerprint, Path, Event, Event)>,
}

impl Capture {
    /// Records the start of a call in the graph, if it is one to time.
    pub(super) fn begin(
        &self,
        call: &CallFingerprint,
        stream: &Stream,
    ) -> Result<Option<(Event, Event)>, DeviceError> {
        if !self.calls.count(call).is_multiple_of(TIMED_OF) {
            return Ok(None);
        }
        let (start, end) = (Event::new(stream, true)?, Event::new(stream, true)?);
        start.record_external(stream)?;
        Ok(Some((start, end)))
    }

    /// Takes a call that has been captured, and records its end.
    pub(super) fn end(
        &mut self,
        call: CallFingerprint,
        path: Path,
        events: Option<(Event, Event)>,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        self.calls.push(call, path);
        if let Some((start, end)) = events {
            end.record_external(stream)?;
            self.timed.push((call, path, start, end));
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Arc<StreamCapture> {
        Arc::new(StreamCapture { calls: Arc::new(self.calls), timed: self.timed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::operation::{Operation, ReduceOp};
    use crate::rank::Rank;

    #[test]
    fn calls_are_counted_by_kind_and_collectives_keep_their_order() {
        let of = |operation| CallFingerprint { operation, dtype: DType::F32, count: 3 };
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
