//! What layers ask of whatever computes.

use std::fmt;
use std::ops::Range;

use ryzanstein_process_group::DType;

use super::batch::{Batch, SlotMapping};
use super::cuda::RecordedGraph;
use crate::error::{Error, Result};
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// The attention of one rank's heads, for some new positions.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads. They divide the query heads.
    pub kv_heads: usize,
    /// Length of one head.
    pub head_dim: usize,
    /// The new positions and their rotations.
    pub batch: &'a Batch,
    /// How many positions a query sees, its own included; all if there is no window.
    pub window: Option<usize>,
}

/// The cache of one layer. Both tensors are `[sequences, kv_heads, capacity, head_dim]`.
#[derive(Debug)]
pub struct LayerCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl LayerCache {
    /// Room for `sequences` sequences of `capacity` positions each, where `compute` computes.
    ///
    /// # Errors
    /// When there is not so much memory.
    pub fn new(
        compute: &dyn Compute,
        [sequences, kv_heads, capacity, head_dim]: [usize; 4],
        dtype: DType,
    ) -> Result<Self> {
        let shape = [sequences, kv_heads, capacity, head_dim];
        Ok(Self { keys: compute.zeros(&shape, dtype)?, values: compute.zeros(&shape, dtype)? })
    }

    /// Bytes of keys and values.
    pub(crate) fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.keys.shape()[2]
    }

    /// Where a position's key and value of one head begin, in elements.
    pub(crate) fn at(&self, sequence: usize, head: usize, position: usize) -> usize {
        let shape = self.keys.shape();
        ((sequence * shape[1] + head) * shape[2] + position) * shape[3]
    }

    /// Refuses a call whose input, heads or slots are not those of this cache.
    pub(super) fn check(&self, qkv: &Tensor, call: &AttentionCall<'_>) -> Result<()> {
        let &AttentionCall { heads, kv_heads, head_dim, batch, .. } = call;
        let (shape, rows) = (self.keys.shape(), qkv.rows());
        let width = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads)?.checked_mul(head_dim));
        let fits = width == Some(qkv.columns())
            && [heads, kv_heads, head_dim].iter().all(|n| *n > 0)
            && heads.is_multiple_of(kv_heads)
            && batch.tokens().len() == rows
            && batch.rotates(head_dim)
            && (shape[1], shape[3]) == (kv_heads, head_dim)
            && (0..rows).map(|row| batch.slots().slot(row)).all(|(s, p)| s < shape[0] && p < shape[2]);
        if fits {
            return Ok(());
        }
        Err(Error::input(format!(
            "attention: {heads} query and {kv_heads} key/value heads of {head_dim} with input {:?} at {:?} do not fit the \
             batch or a cache of {shape:?}",
            qkv.shape(),
            batch.slots()
        )))
    }
}

/// The operations that layers are made of. Sums are taken in `f32`, and each result is rounded once to its type.
///
/// Activations are `[positions, features]`, weights `[out, in]`. One thread at a time uses it: what is recorded must not get
/// the work of another.
pub trait Compute: fmt::Debug + Send {
    /// The type in which to hold matrices that are stored as `stored` and meet `activations`; as stored, unless that
    /// cannot be multiplied without converting it first, every time.
    fn weight_dtype(&self, stored: DType, activations: DType) -> DType {
        let _ = activations;
        stored
    }

    /// An array of zeros, where this computes. It is meant to stay: weights, caches.
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// An array that the next operation fills, where this computes. What it holds before is unspecified.
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.zeros(shape, dtype)
    }

    /// What a pass over `tokens` needs to know, which go to these slots.
    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch>;

    /// Puts other tokens, at slots of the same kind, in the place of as many.
    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()>;

    /// Takes note of what `work` would compute, without computing it, so that it can be repeated cheaply on whatever is
    /// then in the same tensors. `None`, and `work` not called, where repeating is no cheaper than calling.
    ///
    /// `work` must have run before, as what is set up at first use cannot be recorded.
    ///
    /// # Safety
    /// All tensors and steps that `work` uses and does not make and drop itself must live, and be used by nothing else at the
    /// same time, whenever the recording is replayed, and the slots of the steps must be within the caches it was recorded
    /// with; the groups it calls must live too, and not have failed by then.
    #[expect(unsafe_code, reason = "a graph keeps addresses")]
    unsafe fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<RecordedGraph>> {
        let _ = work;
        Ok(None)
    }

    /// `x · weightᵀ + bias`, in type `out`.
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor>;

    /// Row `id - first` of `table` for each token; zeros for ids outside `first..first + rows`.
    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor>;

    /// `x / sqrt(mean(x²) + epsilon) × weight`, row by row.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor>;

    /// Adds `y` to `x`, or to every row of `x` when `y` is a vector.
    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()>;

    /// `silu(gate) × up`, where each row of `x` is gate, then up.
    fn swiglu(&self, x: &Tensor) -> Result<Tensor>;

    /// Rotates queries and keys, puts keys and values into the cache, and attends. Each row of `qkv` is the query
    /// heads, the key heads, then the value heads; each row of the result is the query heads.
    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor>;

    /// Some columns of `x`.
    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor>;

    /// Joins blocks side by side: `[blocks, rows, columns]` becomes `[rows, keep]`, the first `keep` columns of each
    /// joined row.
    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor>;
}
