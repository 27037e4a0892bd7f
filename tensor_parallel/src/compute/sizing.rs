//! Arrays without memory, to compute the memory that a model would take.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ryzanstein_process_group::DType;

use super::batch::{Batch, SlotMapping};
use super::operations::{AttentionCall, Compute, LayerCache};
use crate::error::{Error, Result};
use crate::rotary::Rotary;
use crate::tensor::{Tensor, element_count};

/// Counts the bytes of the arrays that [`Cuda`](super::Cuda) would keep. Its arrays are empty, and it computes nothing.
#[derive(Debug, Default)]
pub(crate) struct Sizing {
    kept: Arc<AtomicU64>,
}

impl Sizing {
    /// Returns the bytes requested so far, also after the value has moved into a model.
    pub(crate) fn kept(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.kept)
    }
}

/// The result of every operation: an error.
fn nothing_there<T>() -> Result<T> {
    Err(Error::input("this model has no memory and cannot compute; it was made to learn its size"))
}

impl Compute for Sizing {
    fn weight_dtype(&self, _: DType, activations: DType) -> DType {
        activations
    }

    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let bytes = (element_count(shape, dtype)? * dtype.size()) as u64;
        let added =
            self.kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kept| kept.checked_add(bytes));
        added.map_err(|_| Error::input("a model of more bytes than can be counted"))?;
        Tensor::zeros(&[0, 0], dtype)
    }

    fn batch(&self, _: &[u32], _: &SlotMapping, _: &Rotary) -> Result<Batch> {
        nothing_there()
    }

    fn update_batch(&self, _: &mut Batch, _: &[u32], _: &SlotMapping, _: &Rotary) -> Result<()> {
        nothing_there()
    }

    fn linear(&self, _: &Tensor, _: &Tensor, _: Option<&Tensor>, _: DType) -> Result<Tensor> {
        nothing_there()
    }

    fn embed(&self, _: &Tensor, _: usize, _: &Batch, _: DType) -> Result<Tensor> {
        nothing_there()
    }

    fn rms_norm(&self, _: &Tensor, _: &Tensor, _: f32) -> Result<Tensor> {
        nothing_there()
    }

    fn add(&self, _: &mut Tensor, _: &Tensor) -> Result<()> {
        nothing_there()
    }

    fn swiglu(&self, _: &Tensor) -> Result<Tensor> {
        nothing_there()
    }

    fn attention(&self, _: Tensor, _: &AttentionCall<'_>, _: &mut LayerCache) -> Result<Tensor> {
        nothing_there()
    }

    fn slice_columns(&self, _: &Tensor, _: Range<usize>) -> Result<Tensor> {
        nothing_there()
    }

    fn concat_columns(&self, _: Tensor, _: usize) -> Result<Tensor> {
        nothing_there()
    }
}
