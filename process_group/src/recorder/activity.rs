//! What a group is doing now, from its newest calls and its profile.

use std::time::Duration;

use crate::operation::Operation;

/// What one group of a rank is doing, from [`FlightRecorder::activity`](crate::FlightRecorder::activity). Collectives are
/// numbered from 1; messages have numbers of their own, and only [`current`](Self::current) shows them.
#[derive(Clone, PartialEq, Debug)]
pub struct GroupActivity {
    /// The group's name.
    pub name: String,
    /// Number of members.
    pub size: usize,
    /// Whether the group cannot be used any more.
    pub failed: bool,
    /// The number of the newest collective that this rank has begun, 0 before the first. `None` where the recorder does not
    /// go back to it.
    pub begun: Option<u64>,
    /// What that collective was.
    pub operation: Option<Operation>,
    /// The number of the newest collective that has returned, as [`begun`](Self::begun). On a GPU a call returns when it
    /// has been enqueued.
    pub ended: Option<u64>,
    /// The oldest call that has not returned.
    pub current: Option<CurrentCall>,
    /// Calls recorded in the profile since the start, messages included.
    pub calls: u64,
    /// Latency of the newest calls that were timed; `None` without any.
    pub recent: Option<RecentLatency>,
}

/// A call that has not returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CurrentCall {
    /// Its number in the group (for messages: in the pair and direction), from 1.
    pub number: u64,
    /// What was called.
    pub operation: Operation,
    /// How long ago.
    pub elapsed: Duration,
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
