//! Times of calls that a backend knows only some time after the call.

use std::time::Duration;

use crate::paths::Path;
use crate::types::operation::CallFingerprint;

/// Where times come from that only the GPU knows, some time after the call.
pub(crate) trait Timings: Send + Sync {
    /// Calls that were done since the last time this was asked. Never waits.
    fn take(&self) -> Vec<TimedCall>;
}

/// A call that was timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TimedCall {
    pub(crate) call: CallFingerprint,
    pub(crate) path: Path,
    pub(crate) time: CallTime,
}

/// What is known of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallTime {
    /// How long it took.
    Took(Duration),
    /// How much longer than others of its kind it took, as it waited for ranks that came late.
    Waited(Duration),
}
