//! The current activity of a group, from its newest calls and its profile.

use std::time::{Duration, Instant};

use crate::stream::Pending;
use crate::types::operation::Operation;

/// The activity of one group of a rank, from [`FlightRecorder::activity`](crate::FlightRecorder::activity). Collectives are
/// numbered from 1; messages are numbered separately, and only [`current`](Self::current) shows them.
#[derive(Clone, PartialEq, Debug)]
pub struct GroupActivity {
    /// The group's name.
    pub name: String,
    /// Number of members.
    pub size: usize,
    /// True if the group cannot be used any more.
    pub failed: bool,
    /// The number of the newest collective that this rank has begun, 0 before the first. `None` if the recorder no longer contains
    /// it.
    pub begun: Option<u64>,
    /// The operation of that collective.
    pub operation: Option<Operation>,
    /// The number of the newest collective that has returned, like [`begun`](Self::begun). On a GPU a call returns when it has been
    /// enqueued.
    pub ended: Option<u64>,
    /// The oldest call that has not returned. On a GPU, if all have returned: the newest call, until the GPU is known to have
    /// finished all.
    pub current: Option<CurrentCall>,
    /// Calls recorded in the profile since the start, messages included.
    pub calls: u64,
    /// Latency of the newest timed calls; `None` without any.
    pub recent: Option<RecentLatency>,
}

impl GroupActivity {
    /// Adds the calls that the GPU has not finished, unless a call has not even returned.
    pub(super) fn with_pending(mut self, pending: &Pending, now: Instant) -> Self {
        let operation = pending.call.map(|call| call.operation).or(self.operation);
        if let (None, Some(operation)) = (self.current, operation) {
            let elapsed = now.saturating_duration_since(pending.enqueued);
            self.current = Some(CurrentCall { number: pending.number, operation, elapsed });
        }
        self
    }
}

/// Latency of the newest calls of a group, of all classes together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RecentLatency {
    /// Number of calls.
    pub calls: usize,
    /// Median, in microseconds.
    pub median_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// A call that has not returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CurrentCall {
    /// Its number in the group (for messages: in the pair and direction), from 1.
    pub number: u64,
    /// The operation of the call.
    pub operation: Operation,
    /// Time since its start.
    pub elapsed: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::operation::ReduceOp;

    #[test]
    fn on_a_gpu_a_call_lasts_until_the_gpu_has_done_it() {
        let now = Instant::now();
        let pending = Pending { number: 7, call: None, enqueued: now };
        let returned = GroupActivity {
            name: "world".into(),
            size: 2,
            failed: false,
            begun: Some(9),
            operation: Some(Operation::AllReduce(ReduceOp::Sum)),
            ended: Some(9),
            current: None,
            calls: 9,
            recent: None,
        };
        let later = now + Duration::from_secs(6);
        let operation = Operation::AllReduce(ReduceOp::Sum);
        let call = CurrentCall { number: 7, operation, elapsed: Duration::from_secs(6) };
        assert_eq!(returned.clone().with_pending(&pending, later).current, Some(call));
        let inside = CurrentCall { number: 10, operation: Operation::Barrier, elapsed: Duration::ZERO };
        let inside = GroupActivity { current: Some(inside), ..returned };
        assert_eq!(inside.clone().with_pending(&pending, later), inside, "it has not even returned");
    }
}
