//! One value describes any operation with its buffers.

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
    /// What else is done with the sum, where the backend [can](crate::backend::Backend::fuses_add_norm).
    pub(crate) add_norm: Option<AddNorm<'a>>,
    /// Ends the call from another thread.
    pub(crate) interrupt: Option<Arc<Interrupt>>,
}

/// What follows the sum of an all-reduce: a residual gets it added, and its rows are normalised.
#[derive(Debug)]
pub(crate) struct AddNorm<'a> {
    /// As long as the array.
    pub(crate) residual: ViewMut<'a>,
    /// As long as a row, in f32.
    pub(crate) weight: View<'a>,
    pub(crate) epsilon: f32,
}

/// Why a call that blocks is to end, told from another thread.
#[derive(Default, Debug)]
pub(crate) struct Interrupt(Mutex<Option<Error>>);

impl Interrupt {
    /// How often a call that sleeps looks.
    pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

    /// Ends the call under way, if there is one, and every later one.
    pub(crate) fn set(&self, error: Error) {
        lock(&self.0).get_or_insert(error);
    }

    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.0).clone().map_or(Ok(()), Err)
    }
}
