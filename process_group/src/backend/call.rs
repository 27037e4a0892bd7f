//! A call of any operation with its buffers, as one value.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::device::buffer::{View, ViewMut};
use crate::error::{Error, Result};
use crate::types::operation::CallFingerprint;
use crate::types::sync::lock;

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
pub(crate) struct Call<'a> {
    /// Properties of the call that must be the same on every rank.
    pub fingerprint: CallFingerprint,
    /// The number of this call within its group (for messages: within its pair and direction), from 1.
    pub sequence: u64,
    /// Time at which the call fails.
    pub deadline: Instant,
    /// True if the output is also the input. On ranks that only receive, nothing else distinguishes the two layouts.
    pub in_place: bool,
    /// The input, if it is separate from the output.
    pub input: Option<View<'a>>,
    /// The output. With a norm, it has the type of the residual.
    pub output: Option<ViewMut<'a>>,
    /// Further work on the sum, for a backend that [supports it](crate::backend::Backend::fuses_add_norm).
    pub(crate) add_norm: Option<AddNorm<'a>>,
    /// Ends the call from another thread.
    pub(crate) interrupt: Option<Arc<Interrupt>>,
}

/// Work that follows the sum of an all-reduce: adds a residual to the sum and normalises the rows.
#[derive(Debug)]
pub(crate) struct AddNorm<'a> {
    /// The residual: as long as the array.
    pub(crate) residual: ViewMut<'a>,
    /// The weight: as long as a row, in f32.
    pub(crate) weight: View<'a>,
    pub(crate) epsilon: f32,
}

/// The reason for which a blocking call must end, set by another thread.
#[derive(Default, Debug)]
pub(crate) struct Interrupt(Mutex<Option<Error>>);

impl Interrupt {
    /// Interval at which a sleeping call checks for an interrupt.
    pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

    /// Ends the current call, if there is one, and every later call.
    pub(crate) fn set(&self, error: Error) {
        lock(&self.0).get_or_insert(error);
    }

    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.0).clone().map_or(Ok(()), Err)
    }
}
