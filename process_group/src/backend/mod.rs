//! The interface of a group to an implementation of the collectives: the trait [`Backend`] and its calls.

pub(crate) mod call;
pub(crate) mod timings;

use std::time::Duration;

use crate::backend::call::Call;
use crate::error::{Error, Result};
use crate::paths::{Path, PathTable};
use crate::types::backend_kind::BackendKind;
use crate::types::dtype::DType;

/// The answer of a backend that has accepted a call. On host memory the call is complete by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Completion {
    /// The path taken.
    pub path: Path,
    /// True if the call is only enqueued on a GPU's stream. It is complete when the stream has passed it.
    pub enqueued: bool,
    /// True if the call is only captured into a graph. It is complete when the graph has been launched and has run.
    pub captured: bool,
    /// Time for which a finished call waited for other ranks, as far as is known.
    pub waited: Duration,
}

/// One rank's end of a group. Calls come one at a time and are already checked; [`Call`] lists the buffers of each operation.
pub(crate) trait Backend: Send {
    /// Returns the kind of this backend.
    fn kind(&self) -> BackendKind;

    /// Executes a call, or enqueues it on a stream.
    ///
    /// # Errors
    /// After any error the state of the other ranks is unknown: the caller must [`abort`](Self::abort).
    fn submit(&mut self, call: Call<'_>) -> Result<Completion>;

    /// Returns the paths of the group, and which of them a call takes and why.
    fn paths(&self) -> PathTable;

    /// Forces the next calls to take `path`, or ends that.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the path is not one of [`paths`](Self::paths).
    fn force(&mut self, path: Option<Path>) -> Result<()>;

    /// Returns true if it adds the sum of an all-reduce of `count` elements to a residual and normalises the rows in the same call.
    /// The result is the same on every rank.
    fn fuses_add_norm(&self, dtype: DType, count: usize, columns: usize) -> bool {
        let _ = (dtype, count, columns);
        false
    }

    /// Tells the other ranks, as far as possible, that this rank gives up, and the reason. Never blocks.
    fn abort(&mut self, why: &Error);
}
