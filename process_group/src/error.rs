//! Errors that say whose fault it was.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::types::operation::CallFingerprint;
use crate::types::rank::{self, Rank};

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed. Ranks in here are global ones.
///
/// Cheap to clone: a failed group hands out its cause again and again.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The user asked for something that cannot be.
    #[error("configuration: {0}")]
    Configuration(String),

    /// This rank's own call was wrong. Nothing has left the rank, and the group stays usable.
    #[error("invalid call: {0}")]
    Invalid(String),

    /// Ranks called different things. No result has been produced; on NCCL, which compares nothing itself, results of the
    /// last 60 ms may be wrong.
    #[error(
        "mismatched calls in group `{group}`, call {sequence}: rank {rank} calls {mine}, rank {peer} calls {theirs}; \
         they differ in {field}. Every rank of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// Name of the group.
        group: String,
        /// Number of the call in the group.
        sequence: u64,
        /// What differs.
        field: &'static str,
        /// The rank that saw it.
        rank: Rank,
        /// What it calls.
        mine: String,
        /// The other rank.
        peer: Rank,
        /// What that calls.
        theirs: String,
    },

    /// A rank has gone: its connection broke.
    #[error("lost rank {rank} (host {host}, pid {pid}) during {during}: {detail}")]
    PeerLost {
        /// Who has gone.
        rank: Rank,
        /// Where it ran.
        host: String,
        /// Its process.
        pid: u32,
        /// What this rank was doing.
        during: String,
        /// What the connection said.
        detail: String,
    },

    /// A rank's process has been silent until the deadline: it is stopped, or its host or network is down. It may come back.
    #[error(
        "rank {rank} (host {host}, pid {pid}) is unresponsive: its process is stopped, or its host or network is down; \
             {during} waited {waited:.1?} for it"
    )]
    PeerUnresponsive {
        /// Who does not respond.
        rank: Rank,
        /// Where it runs.
        host: String,
        /// Its process.
        pid: u32,
        /// What this rank was doing.
        during: String,
        /// How long.
        waited: Duration,
    },

    /// Another rank gave up and said why.
    #[error("rank {rank} aborted: {reason}")]
    PeerAborted {
        /// Who gave up first.
        rank: Rank,
        /// Its own error.
        reason: String,
    },

    /// Not everybody came in time.
    #[error("{what} timed out after {waited:.1?}: {}", missing_ranks(.missing))]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// Who is not there. Empty if everybody is there but slow.
        missing: Vec<Rank>,
    },

    /// Ranks could not find each other.
    #[error("rendezvous: {0}")]
    Rendezvous(String),

    /// A backend that was asked for cannot be used here.
    #[error("backend `{backend}` cannot be used: {reason}")]
    BackendUnavailable {
        /// Its name.
        backend: String,
        /// Why not, and on which ranks.
        reason: String,
    },

    /// The start-up check got a wrong value.
    #[error("self-check of {path} failed: {reason}; this path is refused")]
    SelfCheck {
        /// The path checked.
        path: String,
        /// What was wrong.
        reason: String,
    },

    /// A connection, a thread or a peer failed on this rank.
    #[error("transport: {0}")]
    Transport(String),

    /// The operating system refused something on this rank.
    #[error("{what}: {source}")]
    System {
        /// What was to be done.
        what: String,
        /// What the system said.
        source: Arc<io::Error>,
    },

    /// This rank's GPU, or a library of it, refused something.
    #[error(transparent)]
    Device(#[from] crate::device::DeviceError),

    /// NCCL refused something.
    #[error(transparent)]
    Nccl(#[from] crate::device::NcclError),

    /// The program panicked on this rank, so it makes no more calls.
    #[error("the program panicked: {0}")]
    Panicked(String),

    /// An earlier call failed and the state of the group is unknown since. Make a new one, under a new epoch.
    #[error("this group failed before and cannot be used any more; the cause was: {0}")]
    Poisoned(Arc<Error>),
}

fn missing_ranks(missing: &[Rank]) -> String {
    match missing {
        [] => "every rank is there, but not finished".into(),
        [one] => format!("rank {one} is not there"),
        many => format!("ranks {} are not there", rank::list(many)),
    }
}

impl Error {
    /// For `map_err`: the operating system refused to do `what`.
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
        } else {
            "length"
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

    /// The kind of error, as metrics name it.
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

    /// Whether the group can go on after this error: only when nothing has left the rank.
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::Invalid(_) | Self::Configuration(_))
    }

    /// Whether another try with the same settings on the same machines would fail alike, so that there is no point in it.
    pub fn is_permanent(&self) -> bool {
        matches!(self.root_cause(), Self::Configuration(_) | Self::BackendUnavailable { .. })
    }

    /// The other ranks whose failure or absence this error came from, as far as it names them.
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

    /// The first cause, below any number of [`Error::Poisoned`].
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
        let call = |operation, dtype, count| CallFingerprint { operation, dtype, count };
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
}
