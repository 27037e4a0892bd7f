//! The trait that does the arithmetic of one rank.

use std::fmt;
use std::ops::Range;

use ryzanstein_process_group::DType;

use super::batch::{Batch, SlotMapping};
use super::captured_graph::CapturedGraph;
use crate::error::{Error, Result};
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// One attention call: this rank's heads, for the new positions of a batch.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads. They divide the query heads.
    pub kv_heads: usize,
    /// Length of one head.
    pub head_dim: usize,
    /// The new tokens, their slots in the cache and their rotations.
    pub batch: &'a Batch,
    /// How many positions a query attends to, its own included; all if there is no window.
    pub window: Option<usize>,
}

/// The cache of one layer. Both tensors are `[sequences, kv_heads, capacity, head_dim]`.
#[derive(Debug)]
pub struct LayerCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl LayerCache {
    /// Allocates room for `sequences` sequences of `capacity` positions each, in the memory of `compute`.
    ///
    /// # Errors
    /// When memory runs out.
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

    /// The offset, in elements, of one head's key and value at a position.
    pub(crate) fn offset(&self, sequence: usize, head: usize, position: usize) -> usize {
        let shape = self.keys.shape();
        ((sequence * shape[1] + head) * shape[2] + position) * shape[3]
    }

    /// Copies the first `length` positions of one sequence to another.
    pub(crate) fn copy_prefix(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        for head in 0..self.keys.shape()[1] {
            let source = self.offset(from, head, 0)..self.offset(from, head, length);
            let target = self.offset(to, head, 0);
            self.keys.copy_within(source.clone(), target)?;
            self.values.copy_within(source, target)?;
        }
        Ok(())
    }

    /// Refuses a call whose input, heads or slots do not fit this cache.
    pub(super) fn check(&self, qkv: &Tensor, call: &AttentionCall<'_>) -> Result<()> {
        let &AttentionCall { heads, kv_heads, head_dim, batch, .. } = call;
        let (shape, rows) = (self.keys.shape(), qkv.rows());
        let width = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads)?.checked_mul(head_dim));
        let fits = width == Some(qkv.columns())
            && [heads, kv_heads, head_dim].iter().all(|n| *n > 0)
            && heads.is_multiple_of(kv_heads)
            && call.window != Some(0)
            && batch.tokens().len() == rows
            && batch.has_rotations_for(head_dim)
            && (shape[1], shape[3]) == (kv_heads, head_dim)
            && batch.slots().ends().all(|(sequence, end)| sequence < shape[0] && end <= shape[2]);
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
/// Activations are `[positions, features]`, weights `[out, in]`. Any number of threads may use it.
pub trait Compute: fmt::Debug + Send + Sync {
    /// The type to hold weight matrices in, given the type they are stored in and that of the activations. It is the stored type,
    /// unless every product would have to convert it.
    fn weight_dtype(&self, stored: DType, activations: DType) -> DType {
        let _ = activations;
        stored
    }

    /// An array of zeros to keep for long: a weight or a cache.
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// An array of unspecified content, for a result that is soon dropped.
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.zeros(shape, dtype)
    }

    /// A batch of tokens that go to these slots of the cache.
    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch>;

    /// Replaces the tokens of a batch. The new slots must have as many single tokens, and runs of the same lengths.
    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()>;

    /// Records what `work` enqueues, without running it. A replay runs it on the values that the same tensors then hold. Returns
    /// `None` without calling `work` where a replay is no cheaper than a call.
    ///
    /// `work` must have run before, as set-up at first use cannot be recorded. It must not wait for other threads.
    ///
    /// # Safety
    /// Whenever the recording is replayed, all tensors and batches that `work` uses, other than those it makes and drops itself,
    /// must be alive and used by nothing else, the slots of the batches must be within the caches of the recording, and the
    /// groups that `work` calls must be alive and not have failed.
    #[expect(unsafe_code, reason = "a graph keeps addresses")]
    unsafe fn capture(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<CapturedGraph>> {
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

    /// Rotates queries and keys, appends keys and values to the cache, and attends. Each row of `qkv` is the query heads, the
    /// key heads, then the value heads; each row of the result is the query heads.
    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor>;

    /// Some columns of `x`.
    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor>;

    /// Puts blocks side by side: `[blocks, rows, columns]` becomes `[rows, keep]`, the first `keep` columns of each joined row.
    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor>;
}
