//! What a group asks of an implementation of the collectives: the trait [`Backend`], and the calls it is given.

pub(crate) mod call;
pub(crate) mod timings;

use std::time::Duration;

use crate::backend::call::Call;
use crate::error::{Error, Result};
use crate::paths::{Path, PathTable};
use crate::types::backend_kind::BackendKind;
use crate::types::dtype::DType;

/// What a backend says when it has taken a call. On host memory the call is done by then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Completion {
    /// The path taken.
    pub path: Path,
    /// Whether the call is only enqueued on a GPU's stream, and done when the stream has come past it.
    pub enqueued: bool,
    /// Whether it has only been captured into a graph, and is done when that is launched.
    pub captured: bool,
    /// How long a finished call waited for other ranks to come, as far as is known.
    pub waited: Duration,
}

/// One rank's end of a group. Calls come one at a time, checked; see [`Call`] for which buffers are there.
pub(crate) trait Backend: Send {
    /// What kind this is.
    fn kind(&self) -> BackendKind;

    /// Does a call, or enqueues it on a stream.
    ///
    /// # Errors
    /// After any error the state of the other ranks is unknown: the caller must [`abort`](Self::abort).
    fn submit(&mut self, call: Call<'_>) -> Result<Completion>;

    /// The paths of the group, and which of them a call takes and why.
    fn paths(&self) -> PathTable;

    /// Makes the next calls take `path`, or choose for themselves again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the path is not one of [`paths`](Self::paths).
    fn force(&mut self, path: Option<Path>) -> Result<()>;

    /// Whether it adds the sum of an all-reduce of `count` elements to a residual and normalises its rows in the same call. The
    /// same on every rank.
    fn fuses_add_norm(&self, dtype: DType, count: usize, columns: usize) -> bool {
        let _ = (dtype, count, columns);
        false
    }

    /// Tells the others, as far as possible, that this rank gives up, and why. Never blocks.
    fn abort(&mut self, why: &Error);
}
