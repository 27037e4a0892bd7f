//! Events of a rendezvous and its replies.

use std::time::Duration;

use bytes::Bytes;
use ryzanstein_process_group::{BackendSelection, Candidate, Epoch, LocalRank, Rank, Roster};

/// The most bytes kept of each text of a failure report.
pub(crate) const MAX_REPORT: usize = 4 << 10;

/// Identifies a request until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct RequestId(pub u64);

/// The time since the job began.
pub(crate) type Time = Duration;

/// Something that happened.
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
    /// A rank has reached a barrier, and waits until this time.
    Barrier(RequestId, Epoch, String, Rank, Time),
    /// A rank reports why it gives up.
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
    /// The epoch it was started for; `None` takes the current one.
    pub epoch: Option<Epoch>,
    /// The world size it was given.
    pub world_size: u32,
    /// The version of its program.
    pub version: String,
    /// When it stops waiting.
    pub deadline: Time,
    /// Who it is.
    pub participant: Participant,
}

/// A process that wants to join.
#[derive(Clone, Debug)]
pub(crate) struct Participant {
    /// Its rank; `None` to be assigned one.
    pub rank: Option<Rank>,
    /// Its rank on its host; `None` to be counted.
    pub local_rank: Option<LocalRank>,
    /// The rank of its host; `None` to be counted.
    pub node_rank: Option<u32>,
    /// What it tells about itself.
    pub candidate: Candidate,
}

impl Participant {
    /// `rank 3 (host a, pid 17)`, for messages.
    pub(crate) fn describe(&self) -> String {
        let Candidate { host, pid, .. } = &self.candidate;
        match self.rank {
            Some(rank) => format!("rank {rank} (host {host}, pid {pid})"),
            None => format!("a process without a rank (host {host}, pid {pid})"),
        }
    }
}

/// Why a rank gave up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Its error.
    pub cause: String,
    /// The last collective it called.
    pub last_call: Option<String>,
    /// The rank whose failure caused this one; `None` for a root cause.
    pub caused_by: Option<Rank>,
}

/// What every rank receives when all have joined.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Joined {
    /// The members.
    pub roster: Roster,
    /// The backend they all use.
    pub selection: BackendSelection,
}

/// A reply.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reply {
    /// To a join: the rank of the caller. The roster is the same for all: see [`Core::joined`](super::Core::joined).
    Rank(Rank),
    /// To a get.
    Value(Bytes),
    /// To an add.
    Sum(i64),
    /// To everything else.
    Done,
}

/// Why a request was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It cannot be granted.
    Refused(String),
    /// It comes from a process of another epoch.
    Epoch(String),
    /// The request was wrong.
    Invalid(String),
    /// The ranks' settings do not fit together: a retry would fail the same way.
    Configuration(String),
    /// Not every rank came in time.
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// The ranks that did not come.
        missing: Vec<Rank>,
    },
}

/// A request and its reply.
pub(crate) type Action = (RequestId, Result<Reply, Refusal>);

impl Report {
    pub(super) fn bounded(mut self) -> Self {
        for text in [Some(&mut self.cause), self.last_call.as_mut()].into_iter().flatten() {
            while text.len() > MAX_REPORT {
                // At a character boundary: a cut inside a character would panic.
                let end = (0..=MAX_REPORT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
                text.truncate(end);
            }
        }
        self
    }
}
