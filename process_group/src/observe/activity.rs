//! The current activity of a group, from its newest calls and its profile.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::stream::Pending;
use crate::types::operation::Operation;
use crate::types::units;

/// The activity of one group of a rank, from [`FlightRecorder::activity`](crate::FlightRecorder::activity). Collectives are
/// numbered from 1; messages are numbered separately, and only [`current`](Self::current) shows them.
///
/// Heartbeats carry it as JSON, and `ryz status` prints it in the same form.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
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
    /// The [name](Operation::name) of that collective's operation.
    pub operation: Option<String>,
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
        if self.current.is_none() {
            let (number, elapsed) = (pending.number, now.saturating_duration_since(pending.enqueued));
            self.current = match pending.call {
                Some(call) => Some(CurrentCall::new(number, call.operation, elapsed)),
                // Several calls, which the newest collective stands for.
                None => self.operation.clone().map(|operation| CurrentCall {
                    number,
                    operation,
                    is_message: false,
                    elapsed_s: units::seconds(elapsed),
                }),
            };
        }
        self
    }
}

/// Latency of the newest calls of a group, of all classes together.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct RecentLatency {
    /// Number of calls.
    pub calls: usize,
    /// Median, in microseconds.
    pub median_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// A call that has not returned.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct CurrentCall {
    /// Its number in the group (for messages: in the pair and direction), from 1.
    pub number: u64,
    /// The [name](Operation::name) of its operation.
    pub operation: String,
    /// True for a send or receive.
    pub is_message: bool,
    /// Time since its start in seconds, rounded down to milliseconds.
    pub elapsed_s: f64,
}

impl CurrentCall {
    /// Describes a call that began this long ago.
    pub(super) fn new(number: u64, operation: Operation, elapsed: Duration) -> Self {
        let is_message = operation.is_point_to_point();
        Self {
            number,
            operation: operation.name().to_owned(),
            is_message,
            elapsed_s: units::seconds(elapsed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{CallFingerprint, ReduceOp};
    use crate::types::rank::Rank;

    #[test]
    fn on_a_gpu_a_call_lasts_until_the_gpu_has_done_it() {
        let now = Instant::now();
        let pending = Pending { number: 7, call: None, enqueued: now };
        let returned = GroupActivity { operation: Some("all_reduce".into()), ..GroupActivity::default() };
        let elapsed = Duration::from_secs(6);
        let call = CurrentCall::new(7, Operation::AllReduce(ReduceOp::Sum), elapsed);
        assert_eq!(returned.clone().with_pending(&pending, now + elapsed).current, Some(call));
        let message = CallFingerprint::new(Operation::Send { to: Rank(1) }, DType::F32, 1);
        let sent = returned.clone().with_pending(&Pending { call: Some(message), ..pending }, now + elapsed);
        assert_eq!(sent.current, Some(CurrentCall::new(7, message.operation, elapsed)));
        assert!(sent.current.is_some_and(|call| call.is_message && call.elapsed_s == 6.0));
        let inside = CurrentCall::new(10, Operation::Barrier, Duration::ZERO);
        let inside = GroupActivity { current: Some(inside), ..returned };
        assert_eq!(inside.clone().with_pending(&pending, now + elapsed), inside, "it has not even returned");
    }
}
