//! What happens at a rendezvous, and what it answers.

use std::time::Duration;

use bytes::Bytes;
use ryzanstein_process_group::{Agreement, Candidate, Epoch, LocalRank, Rank, Roster};

/// The longest text kept of a failure report.
pub const MAX_REPORT: usize = 4 << 10;

/// A request that waits for its answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub u64);

/// The time since the job began.
pub type Time = Duration;

/// What has happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A rank wants to join.
    Join(RequestId, Join),
    /// A rank stores a value.
    Set(RequestId, Epoch, String, Bytes),
    /// A rank waits for a key until the time given.
    Get(RequestId, Epoch, String, Time),
    /// A rank adds to a counter.
    Add(RequestId, Epoch, String, i64),
    /// A rank has come to a barrier, and waits until the time given.
    Barrier(RequestId, Epoch, String, Rank, Time),
    /// A rank says why it gives up.
    Report(RequestId, Epoch, Rank, Report),
    /// The client behind this request has hung up.
    Disconnected(RequestId),
    /// The launcher saw a rank's process end well. Whoever still waits for it to join waits in vain.
    ProcessExited(Rank, String),
    /// The launcher saw the job fail: nobody needs to wait any longer.
    JobFailed(String),
    /// The launcher starts the job again.
    NewEpoch(Epoch),
    /// Time has passed.
    Tick,
}

/// A request to join.
#[derive(Clone, Debug)]
pub struct Join {
    /// The epoch it was started for; none takes the current one.
    pub epoch: Option<Epoch>,
    /// How many ranks it thinks there are.
    pub world_size: u32,
    /// The version of its program.
    pub version: String,
    /// When it gives up.
    pub deadline: Time,
    /// Who it is.
    pub participant: Participant,
}

/// Someone who wants a seat.
#[derive(Clone, Debug)]
pub struct Participant {
    /// Its rank; none to be given one.
    pub rank: Option<Rank>,
    /// Its position on its host; none to be counted.
    pub local_rank: Option<LocalRank>,
    /// Its host's position; none to be counted.
    pub node_rank: Option<u32>,
    /// What it says of itself.
    pub candidate: Candidate,
}

impl Participant {
    /// `rank 3 (host a, pid 17)`, for messages.
    pub fn describe(&self) -> String {
        let Candidate { host, pid, .. } = &self.candidate;
        match self.rank {
            Some(rank) => format!("rank {rank} (host {host}, pid {pid})"),
            None => format!("a process without a rank (host {host}, pid {pid})"),
        }
    }
}

/// Why a rank gave up, in its own words.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Its error.
    pub cause: String,
    /// The last collective it called.
    pub last_call: Option<String>,
    /// The rank whose failure this is an echo of.
    pub caused_by: Option<Rank>,
}

/// What everyone gets who joined.
#[derive(Clone, PartialEq, Debug)]
pub struct Joined {
    /// Who is in.
    pub roster: Roster,
    /// With which backend.
    pub agreement: Agreement,
}

/// An answer.
#[derive(Clone, PartialEq, Debug)]
pub enum Reply {
    /// To a join: which rank this one is. The roster is the same for all: see [`Core::joined`](super::Core::joined).
    Rank(Rank),
    /// To a get.
    Value(Bytes),
    /// To an add.
    Sum(i64),
    /// To all else.
    Done,
}

/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// It cannot be granted.
    Refused(String),
    /// The request was wrong.
    Invalid(String),
    /// The ranks' settings do not go together: another try would fail alike.
    Configuration(String),
    /// Not everybody came in time.
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// Who is not there.
        missing: Vec<Rank>,
    },
}

/// To whom, and what.
pub type Action = (RequestId, Result<Reply, Refusal>);

impl Report {
    pub(super) fn bounded(mut self) -> Self {
        for text in [Some(&mut self.cause), self.last_call.as_mut()].into_iter().flatten() {
            while text.len() > MAX_REPORT {
                // To the whole character before: a cut inside one would panic.
                let end = (0..=MAX_REPORT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
                text.truncate(end);
            }
        }
        self
    }
}
