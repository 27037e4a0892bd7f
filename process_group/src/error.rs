//! Errors that name the rank that caused them.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::types::operation::CallFingerprint;
use crate::types::rank::{self, Rank};

/// The result of all functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an operation failed. Ranks are global ones.
///
/// Cheap to clone: a failed group returns its cause again and again.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked for something impossible.
    #[error("configuration: {0}")]
    Configuration(String),

    /// This rank's own call was wrong. It has sent nothing to other ranks, and the group stays usable.
    #[error("invalid call: {0}")]
    Invalid(String),

    /// Ranks made different calls. The call has produced no result; on NCCL, which compares nothing itself, results of the last 60
    /// ms may be wrong.
    #[error(
        "mismatched calls in group `{group}`, call {sequence}: rank {rank} calls {mine}, rank {peer} calls {theirs}; \
         they differ in {field}. Every rank of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// Name of the group.
        group: String,
        /// Number of the call in the group.
        sequence: u64,
        /// The property that differs.
        field: &'static str,
        /// The rank that noticed the mismatch.
        rank: Rank,
        /// The call of this rank.
        mine: String,
        /// The other rank.
        peer: Rank,
        /// The call of the other rank.
        theirs: String,
    },

    /// A rank is lost: its connection broke.
    #[error("lost rank {rank} (host {host}, pid {pid}) during {during}: {detail}")]
    PeerLost {
        /// The lost rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// Its process.
        pid: u32,
        /// The current operation of this rank.
        during: String,
        /// The error of the connection.
        detail: String,
    },

    /// A rank's process has been silent until the deadline: it is stopped, or its host or network is down. It may recover.
    #[error(
        "rank {rank} (host {host}, pid {pid}) is unresponsive: its process is stopped, or its host or network is down; \
             {during} waited {waited:.1?} for it"
    )]
    PeerUnresponsive {
        /// The rank that does not respond.
        rank: Rank,
        /// Its host.
        host: String,
        /// Its process.
        pid: u32,
        /// The current operation of this rank.
        during: String,
        /// Duration of the wait.
        waited: Duration,
    },

    /// Another rank gave up and reported the reason.
    #[error("rank {rank} aborted: {reason}")]
    PeerAborted {
        /// The rank that gave up first.
        rank: Rank,
        /// Its own error.
        reason: String,
    },

    /// Some ranks did not arrive in time.
    #[error("{what} timed out after {waited:.1?}: {}", missing_ranks(.missing))]
    Timeout {
        /// The operation that waited.
        what: String,
        /// Duration of the wait.
        waited: Duration,
        /// The ranks that have not arrived. Empty if all have arrived but are slow.
        missing: Vec<Rank>,
    },

    /// Ranks could not find each other.
    #[error("rendezvous: {0}")]
    Rendezvous(String),

    /// A requested backend cannot be used here.
    #[error("backend `{backend}` cannot be used: {reason}")]
    BackendUnavailable {
        /// Its name.
        backend: String,
        /// The reason, and the ranks that have it.
        reason: String,
    },

    /// The start-up check found a wrong value.
    #[error("self-check of {path} failed: {reason}; this path is refused")]
    SelfCheck {
        /// The path checked.
        path: String,
        /// The error.
        reason: String,
    },

    /// A connection, a thread or a peer failed on this rank.
    #[error("transport: {0}")]
    Transport(String),

    /// The operating system returned an error on this rank.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: String,
        /// The error of the system.
        source: Arc<io::Error>,
    },

    /// An error of this rank's GPU, or of one of its libraries.
    #[error(transparent)]
    Device(#[from] crate::device::DeviceError),

    /// An error of NCCL.
    #[error(transparent)]
    Nccl(#[from] crate::device::NcclError),

    /// The program panicked on this rank, so it makes no more calls.
    #[error("the program panicked: {0}")]
    Panicked(String),

    /// An earlier call failed, and the state of the group has been unknown since. Make a new one, under a new epoch.
    #[error("this group failed before and cannot be used any more; the cause was: {0}")]
    Poisoned(Arc<Error>),
}

pub(crate) fn missing_ranks(missing: &[Rank]) -> String {
    match missing {
        [] => "every rank is there, but not finished".into(),
        [one] => format!("rank {one} is not there"),
        many => format!("ranks {} are not there", rank::list(many)),
    }
}

/// Prints the message, so that `fn main() -> Result<(), Error>` shows it in full.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// For `map_err`: the operating system could not do `what`.
    pub fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        |source| Self::System { what: what.into(), source: Arc::new(source) }
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid(reason.into())
    }

    pub(crate) fn mismatch(
        group: &str,
        sequence: u64,
        (rank, mine): (Rank, &CallFingerprint),
        (peer, theirs): (Rank, &CallFingerprint),
    ) -> Self {
        let (a, b) = (mine.operation, theirs.operation);
        let field = if !a.is_same_kind(b) {
            "operation"
        } else if a.reduce_op() != b.reduce_op() {
            "reduction"
        } else if a.root() != b.root() {
            "root"
        } else if mine.dtype != theirs.dtype {
            "element type"
        } else if mine.count != theirs.count {
            "length"
        } else {
            mine.composed.difference(theirs.composed).unwrap_or("length")
        };
        Self::Mismatch {
            group: group.into(),
            sequence,
            field,
            rank,
            mine: mine.to_string(),
            peer,
            theirs: theirs.to_string(),
        }
    }

    /// Returns the kind of error, as metrics name it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Configuration(_) => "configuration",
            Self::Invalid(_) => "invalid",
            Self::Mismatch { .. } => "mismatch",
            Self::PeerLost { .. } => "peer_lost",
            Self::PeerUnresponsive { .. } => "peer_unresponsive",
            Self::PeerAborted { .. } => "peer_aborted",
            Self::Timeout { .. } => "timeout",
            Self::Rendezvous(_) => "rendezvous",
            Self::BackendUnavailable { .. } => "backend_unavailable",
            Self::SelfCheck { .. } => "self_check",
            Self::Transport(_) => "transport",
            Self::System { .. } => "system",
            Self::Device(_) => "device",
            Self::Nccl(_) => "nccl",
            Self::Panicked(_) => "panicked",
            Self::Poisoned(_) => "poisoned",
        }
    }

    /// Returns true if the group can continue after this error: only if the rank has sent nothing.
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::Invalid(_) | Self::Configuration(_))
    }

    /// Returns true if another attempt with the same settings on the same machines would fail in the same way.
    pub fn is_permanent(&self) -> bool {
        matches!(self.root_cause(), Self::Configuration(_) | Self::BackendUnavailable { .. })
    }

    /// Returns the other ranks whose failure or absence caused this error, as far as it names them.
    pub fn caused_by(&self) -> Vec<Rank> {
        match self.root_cause() {
            Self::PeerLost { rank, .. }
            | Self::PeerUnresponsive { rank, .. }
            | Self::PeerAborted { rank, .. } => {
                vec![*rank]
            }
            Self::Timeout { missing, .. } => missing.clone(),
            _ => Vec::new(),
        }
    }

    /// Returns the timeout of one step as that of the whole call, which began at `started`. Other errors stay as they are.
    pub(crate) fn since(self, started: Instant) -> Self {
        match self {
            Self::Timeout { what, missing, .. } => Self::Timeout { what, waited: started.elapsed(), missing },
            other => other,
        }
    }

    /// Returns the first cause, below any number of [`Error::Poisoned`].
    pub fn root_cause(&self) -> &Self {
        match self {
            Self::Poisoned(inner) => inner.root_cause(),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::dtype::DType;
    use crate::types::operation::{Operation, ReduceOp};

    #[test]
    fn the_two_ends_of_a_message_do_not_differ_in_the_operation() {
        let call = CallFingerprint::new;
        let (send, recv) = (Operation::Send { to: Rank(1) }, Operation::Recv { from: Rank(0) });
        let sum = Operation::AllReduce(ReduceOp::Sum);
        for (mine, theirs, expected) in [
            (call(send, DType::F32, 4), call(recv, DType::F32, 5), "length"),
            (call(recv, DType::F32, 5), call(send, DType::F32, 4), "length"),
            (call(recv, DType::I32, 4), call(send, DType::F32, 4), "element type"),
            (call(send, DType::F32, 4), call(send, DType::F32, 4), "operation"),
            (call(recv, DType::F32, 4), call(recv, DType::F32, 5), "operation"),
            (call(recv, DType::F32, 4), call(sum, DType::F32, 4), "operation"),
            (call(sum, DType::F32, 4), call(sum, DType::F32, 5), "length"),
        ] {
            let error = Error::mismatch("world", 1, (Rank(0), &mine), (Rank(1), &theirs));
            assert!(matches!(error, Error::Mismatch { field, .. } if field == expected), "{error}");
        }
    }

    #[test]
    fn a_timeout_of_a_step_becomes_that_of_the_whole_call() {
        let step = Error::Timeout { what: "a step".into(), waited: Duration::MAX, missing: Vec::new() };
        let whole = step.since(Instant::now());
        assert!(matches!(whole, Error::Timeout { waited, .. } if waited < Duration::MAX), "{whole}");
    }

    #[test]
    fn main_prints_the_message() {
        let error = Error::Poisoned(std::sync::Arc::new(Error::invalid("a root that is no member")));
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}
