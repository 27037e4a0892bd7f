//! Times of calls that a backend knows only some time after the call.

use std::time::Duration;

use crate::paths::Path;
use crate::types::operation::CallFingerprint;

/// Source of times that only the GPU knows, some time after the call.
pub(crate) trait Timings: Send + Sync {
    /// Returns the calls that finished since the previous `take`. Never waits.
    fn take(&self) -> Vec<TimedCall>;
}

/// A timed call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimedCall {
    pub(crate) call: CallFingerprint,
    pub(crate) path: Path,
    pub(crate) time: CallTime,
}

/// Information about the time of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallTime {
    /// Duration of the call.
    Took(Duration),
    /// Time for which the call waited for late ranks: its duration beyond that of other calls of its kind.
    Waited(Duration),
}
