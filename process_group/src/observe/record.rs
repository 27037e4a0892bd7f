//! The content of a record. `ryz trace` reads it.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;

/// One rank's knowledge of its newest calls. Times are nanoseconds since 1970 by its host's clock, which a process reads once:
/// later changes of that clock have no effect.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlightRecord {
    /// Identity of the job: the same on all ranks of a job in one epoch, and on no others. It contains host and process of rank 0,
    /// and the epoch.
    pub job: String,
    /// The global rank.
    pub rank: Rank,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// The rank's host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// Time at which this record was made.
    pub dumped_ns: u64,
    /// Its groups, in the order of their creation.
    pub groups: Vec<GroupRecord>,
}

/// The newest calls of one rank in one group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupRecord {
    /// The group's name.
    pub name: String,
    /// Global rank of each member, in group order.
    pub members: Vec<Rank>,
    /// The reason why the group cannot be used any more, if there is one.
    pub failure: Option<Failure>,
    /// Number of older calls that newer ones have replaced.
    pub overwritten: u64,
    /// The calls, oldest first.
    pub calls: Vec<CallRecord>,
}

/// The reason why a group failed on a rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The error.
    pub error: String,
    /// Global ranks that the error names as its cause.
    pub caused_by: Vec<Rank>,
}

impl Failure {
    pub(super) fn new(error: &Error) -> Self {
        Self { error: error.to_string(), caused_by: error.caused_by() }
    }
}

/// One call, or the calls of one replay.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CallRecord {
    /// Its number in the group (for messages: in the pair and direction), from 1. For a replay, that of its first collective.
    pub number: u64,
    /// 1, or for a replay, the number of collectives that it repeated.
    pub calls: u64,
    /// The fingerprint of the call. For a replay, that of the last of its calls.
    #[serde(flatten)]
    pub fingerprint: CallFingerprint,
    /// The path of the call, such as `tcp/ring`; absent while it is in progress, and if it failed.
    pub path: Option<String>,
    /// Time at which the call began.
    pub enqueued_ns: u64,
    /// Time at which it returned to its caller. On host memory it was complete by then. On a GPU it was only enqueued: the time at
    /// which the GPU finished it is not recorded.
    pub returned_ns: Option<u64>,
    /// Its outcome.
    pub outcome: Outcome,
}

/// The outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The call has not returned.
    InProgress,
    /// It is complete.
    Done,
    /// It is on a GPU's stream. The GPU may have finished it or not.
    Enqueued,
    /// It was captured into a graph, which does not run it. Its number is assigned again.
    Captured,
    /// It returned an error.
    Failed,
}
