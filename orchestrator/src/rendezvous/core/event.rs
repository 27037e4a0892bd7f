//! Events of a rendezvous and its replies.

use std::time::Duration;

use bytes::Bytes;
use ryzanstein_process_group::{BackendSelection, Candidate, Epoch, LocalRank, Rank, Roster};
use serde::{Deserialize, Serialize};

/// Maximum number of bytes kept of each text of a failure report.
pub(crate) const MAX_REPORT: usize = 4 << 10;

/// Identifies a request until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct RequestId(pub u64);

/// Time since the job began.
pub(crate) type Time = Duration;

/// An event at the rendezvous.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A rank wants to join.
    Join(RequestId, Join),
    /// A rank stores a value.
    Set(RequestId, Epoch, String, Bytes),
    /// A rank waits for a key until this time.
    Get(RequestId, Epoch, String, Time),
    /// A rank adds to a counter.
    Add(RequestId, Epoch, String, i64),
    /// A rank reports the reason why it gives up.
    Report(RequestId, Epoch, Rank, Report),
    /// The client of this request has disconnected.
    Disconnected(RequestId),
    /// The launcher saw a rank's process exit with code 0. If it has not joined, it never will.
    ProcessExited(Rank, String),
    /// The launcher saw the job fail: all pending requests fail.
    JobFailed(String),
    /// The launcher restarts the job.
    NewEpoch(Epoch),
    /// Time has passed.
    Tick,
}

/// A request to join.
#[derive(Clone, Debug)]
pub(crate) struct Join {
    /// Epoch that the process was started for; `None` takes the current one.
    pub epoch: Option<Epoch>,
    /// World size that the process was given.
    pub world_size: u32,
    /// Version of its program.
    pub version: String,
    /// Time at which the request expires.
    pub deadline: Time,
    /// The process that joins.
    pub participant: Participant,
}

/// A process that wants to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Participant {
    /// Rank of the process; `None` to be assigned one.
    pub rank: Option<Rank>,
    /// Rank of the process on its host; `None` to be counted.
    pub local_rank: Option<LocalRank>,
    /// Rank of the host; `None` to be counted.
    pub node_rank: Option<u32>,
    /// Facts that the process reports about itself.
    pub candidate: Candidate,
}

impl Participant {
    /// Describes the process for messages: `rank 3 (host a, pid 17)`.
    pub(crate) fn describe(&self) -> String {
        let Candidate { host, pid, .. } = &self.candidate;
        match self.rank {
            Some(rank) => format!("rank {rank} (host {host}, pid {pid})"),
            None => format!("a process without a rank (host {host}, pid {pid})"),
        }
    }
}

/// The reason why a rank gave up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Error of the rank.
    pub cause: String,
    /// The last collective of the rank.
    pub last_call: Option<String>,
    /// The rank whose failure caused this one; `None` for a root cause.
    pub caused_by: Option<Rank>,
}

/// The data that every rank receives when all have joined.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Joined {
    /// The members of the job.
    pub roster: Roster,
    /// The backend of all members.
    pub selection: BackendSelection,
}

/// A reply.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply {
    /// The reply to a join: the rank of the caller. The roster is the same for all: see [`Core::joined`](super::Core::joined).
    Rank(Rank),
    /// The reply to a get.
    Value(Bytes),
    /// The reply to an add.
    Sum(i64),
    /// The reply to every other request.
    Done,
}

/// The reason why a request was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The request cannot be granted.
    Refused(String),
    /// The request comes from a process of another epoch.
    Epoch(String),
    /// The request was wrong.
    Invalid(String),
    /// The ranks' settings do not fit together: a retry would fail the same way.
    Configuration(String),
    /// Not every rank arrived in time.
    Timeout {
        /// The event that was waited for.
        what: String,
        /// Duration of the wait.
        waited: Duration,
        /// The ranks that did not arrive.
        missing: Vec<Rank>,
    },
}

/// A request and its reply.
pub(crate) type Action = (RequestId, Result<Reply, Refusal>);

impl Report {
    pub(super) fn bounded(mut self) -> Self {
        for text in [Some(&mut self.cause), self.last_call.as_mut()].into_iter().flatten() {
            text.truncate(text.floor_char_boundary(MAX_REPORT));
        }
        self
    }
}
