//! One value describes any operation with its buffers.

use std::time::Instant;

use crate::buffer::{View, ViewMut};
use crate::operation::CallFingerprint;

/// One operation with its buffers, as a backend gets it. Lengths and roots have been checked.
///
/// | operation | `input` (absent: in place) | `output` |
/// |---|---|---|
/// | all-reduce | `[count]` | `[count]` |
/// | broadcast | `[count]` on the root | `[count]` |
/// | reduce | `[count]` | `[count]` on the root, and in place everywhere |
/// | all-gather | `[count]` | `[world × count]`; in place, chunk `rank` is the input |
/// | reduce-scatter | `[world × count]` | `[count]`; in place `[world × count]`, the result in chunk `rank` |
/// | gather | `[count]` | `[world × count]` on the root; in place everywhere |
/// | scatter | `[world × count]` on the root | `[count]`; in place `[world × count]`, the result in chunk `rank` |
/// | all-to-all | `[world × count]` | `[world × count]` |
/// | send | `[count]` | – |
/// | recv | – | `[count]` |
/// | barrier | – | – |
#[derive(Debug)]
pub struct Call<'a> {
    /// What must be the same on every rank.
    pub fingerprint: CallFingerprint,
    /// The number of this call within its group (for messages: within its pair and direction), from 1.
    pub sequence: u64,
    /// When to give up.
    pub deadline: Instant,
    /// Whether the output is the input too. On ranks that only receive, nothing else tells the two layouts apart.
    pub in_place: bool,
    /// What is read, where it is not the output.
    pub input: Option<View<'a>>,
    /// What is written.
    pub output: Option<ViewMut<'a>>,
}
