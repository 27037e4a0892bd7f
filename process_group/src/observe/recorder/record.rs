//! What a record says. `ryz trace` reads it back.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;

/// What one rank knows of its newest calls. Times are nanoseconds since 1970 by its host's clock, which is read once in a
/// process: later changes of that clock do not show.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The same on all ranks of a job in one epoch, and on no others: host and process of rank 0, and the epoch.
    pub job: String,
    /// The global rank.
    pub rank: Rank,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// Where the rank ran.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// When this record was made.
    pub dumped_ns: u64,
    /// Its groups, in the order in which they were made.
    pub groups: Vec<GroupRecord>,
}

/// The newest calls of one rank in one group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupRecord {
    /// The group's name.
    pub name: String,
    /// Global rank of each member, in group order.
    pub members: Vec<Rank>,
    /// Why the group cannot be used any more, if so.
    pub failure: Option<Failure>,
    /// Older calls that newer ones have replaced.
    pub overwritten: u64,
    /// Oldest first.
    pub calls: Vec<CallRecord>,
}

/// Why a group failed on a rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The error.
    pub error: String,
    /// Global ranks that it names as its cause.
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
    /// 1. For a replay, how many collectives it repeated.
    pub calls: u64,
    /// What was called. For a replay, the last of its calls.
    #[serde(flatten)]
    pub fingerprint: CallFingerprint,
    /// How it went, such as `tcp/ring`; absent while it is under way, and where it failed.
    pub path: Option<String>,
    /// When the call began.
    pub enqueued_ns: u64,
    /// When it returned to its caller. On host memory it was done by then. On a GPU it was only enqueued: when the GPU
    /// finished it is not recorded.
    pub returned_ns: Option<u64>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Outcome {
    /// The call has not returned.
    InProgress,
    /// It is done.
    Done,
    /// It is on a GPU's stream. The GPU may have finished it or not.
    Enqueued,
    /// It was captured into a graph, and has not run by this. Its number is given again.
    Captured,
    /// It returned an error.
    Failed,
}

impl Outcome {
    pub(super) const ALL: [Self; 5] =
        [Self::InProgress, Self::Done, Self::Enqueued, Self::Captured, Self::Failed];
}
