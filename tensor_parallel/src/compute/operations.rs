//! The trait for the arithmetic of one rank.

use std::fmt;
use std::ops::Range;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;

#[cfg(doc)]
use super::batch::CHOSEN;
use super::batch::{Batch, PAGE_SIZE, SlotMapping};
use super::captured_graph::CapturedGraph;
use crate::argmax;
use crate::error::{ConfigurationError, Error, Result};
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// An attention call: this rank's heads, for the new positions of a batch.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. It divides the number of query heads.
    pub kv_heads: usize,
    /// Length of one head.
    pub head_dim: usize,
    /// The new tokens, their slots in the cache and their rotations.
    pub batch: &'a Batch,
    /// Number of positions that a query attends to, including its own; all if there is no window.
    pub window: Option<usize>,
    /// Norms of each head of the queries and of the keys, before their rotation.
    pub norms: Option<HeadNorms<'a>>,
}

/// Root-mean-square norms of each head of the queries and of the keys. The weights are as long as a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// The weight for queries.
    pub queries: &'a Tensor,
    /// The weight for keys.
    pub keys: &'a Tensor,
    /// A constant that is added to the mean square.
    pub epsilon: f32,
}

/// The cache of one layer, in pages of [`PAGE_SIZE`] positions: keys and values, each `[pages, kv_heads, PAGE_SIZE, head_dim]` with the
/// heads of this rank.
#[derive(Debug)]
pub struct LayerCache {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl LayerCache {
    /// Allocates a number of pages in the memory of `compute`.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
    pub fn new(compute: &dyn Compute, [pages, kv_heads, head_dim]: [usize; 3], dtype: DType) -> Result<Self> {
        let shape = [pages, kv_heads, PAGE_SIZE, head_dim];
        Ok(Self { keys: compute.zeros(&shape, dtype)?, values: compute.zeros(&shape, dtype)? })
    }

    /// Returns true if the cache is in the memory of a GPU.
    pub(crate) fn is_on_device(&self) -> bool {
        self.keys.device().is_some()
    }

    /// Returns the elements of one head at some positions, which are within one page of a sequence's.
    pub(super) fn elements(&self, pages: &[u32], head: usize, positions: Range<usize>) -> Range<usize> {
        let shape = self.keys.shape();
        let page = pages[positions.start / PAGE_SIZE] as usize;
        let start = ((page * shape[1] + head) * PAGE_SIZE + positions.start % PAGE_SIZE) * shape[3];
        start..start + positions.len() * shape[3]
    }

    /// Copies one page to another, before a sequence writes to a page that it shares.
    ///
    /// # Errors
    /// Returns an error if the cache does not have these pages, or the device fails.
    pub fn copy_page(&mut self, from: u32, to: u32) -> Result<()> {
        let shape = self.keys.shape();
        if [from, to].iter().any(|page| *page as usize >= shape[0]) {
            return Err(Error::input(format!(
                "page {from} cannot be copied to {to} in a cache of {} pages",
                shape[0]
            )));
        }
        if from == to {
            return Ok(());
        }
        let length: usize = shape[1..].iter().product();
        let (from, to) = (from as usize * length, to as usize * length);
        self.keys.copy_within(from..from + length, to)?;
        self.values.copy_within(from..from + length, to)
    }

    /// Returns an error if input, heads or slots of a call do not fit this cache.
    pub(super) fn check(&self, qkv: &Tensor, call: &AttentionCall<'_>) -> Result<()> {
        let &AttentionCall { heads, kv_heads, head_dim, batch, .. } = call;
        let (shape, rows) = (self.keys.shape(), qkv.rows());
        let width = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads)?.checked_mul(head_dim));
        let fits = width == Some(qkv.columns())
            && [heads, kv_heads, head_dim].iter().all(|n| *n > 0)
            && heads.is_multiple_of(kv_heads)
            && call.window != Some(0)
            && call
                .norms
                .is_none_or(|norms| [norms.queries, norms.keys].iter().all(|w| w.count() == head_dim))
            && batch.tokens().len() == rows
            && batch.has_rotations_for(head_dim)
            && (shape[1], shape[3]) == (kv_heads, head_dim)
            && batch.fits(shape[0]);
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

/// The operations of layers. Sums are computed in `f32`, and each result is rounded once to its type.
///
/// Activations are `[positions, features]`, weights `[out, in]`. Any number of threads may use it.
pub trait Compute: fmt::Debug + Send + Sync {
    /// Returns the type in which to store weight matrices, given their type in the checkpoint and that of the activations. It is
    /// the stored type, unless every product would have to convert it.
    fn weight_dtype(&self, stored: DType, activations: DType) -> DType {
        let _ = activations;
        stored
    }

    /// Allocates a long-lived array of zeros: a weight or a cache.
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor>;

    /// Allocates an array of unspecified content, for a short-lived result.
    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.zeros(shape, dtype)
    }

    /// Creates a batch of tokens for these slots of the cache.
    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch>;

    /// Replaces the tokens of a batch. The new slots must have the same capacity, and runs of the same lengths.
    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        *batch = self.batch(tokens, slots, rotary)?;
        Ok(())
    }

    /// Captures the work that `work` enqueues, without running it. A replay runs it on the values that the same tensors then
    /// hold. Returns `None` without calling `work` if a replay is no cheaper than a call.
    ///
    /// `work` must have run before, because set-up at first use cannot be captured. It must not wait for other threads.
    ///
    /// # Safety
    /// Whenever the graph is replayed, all tensors and batches that `work` uses, except those that it creates and drops itself,
    /// must be alive and not used otherwise, the slots of the batches must be within the caches of the capture, and the groups
    /// that `work` calls must be alive and not have failed.
    #[expect(unsafe_code, reason = "a graph keeps addresses")]
    unsafe fn capture(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<CapturedGraph>> {
        let _ = work;
        Ok(None)
    }

    /// Computes `x · weightᵀ + bias`, in type `out`.
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor>;

    /// Returns the order in which it adds. [`Numerics::Invariant`] promises that a row of every result depends on that row of the
    /// operands alone, and that the two sums below are trees.
    fn numerics(&self) -> Numerics {
        Numerics::Fast
    }

    /// Computes `x[m, k] · weightᵀ` with the inputs in `leaves` equal parts. The products of the parts are added in `f32` as a
    /// [tree](crate::shard::split_leaves), and the sum is rounded to `out`. `weight` is `[leaves × n, k / leaves]`: the rows for each
    /// part in turn. Only layers with invariant numerics call it.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit. The default returns an error.
    fn linear_of_leaves(&self, x: &Tensor, weight: &Tensor, leaves: usize, out: DType) -> Result<Tensor> {
        let _ = (x, weight, leaves, out);
        Err(ConfigurationError::FastOnly.into())
    }

    /// Adds terms `[count, rows, columns]` of `f32` as a [tree](crate::shard::split_leaves), and rounds the sum to `out`. Only
    /// layers with invariant numerics call it.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit. The default returns an error.
    fn sum_of_leaves(&self, terms: &Tensor, out: DType) -> Result<Tensor> {
        let _ = (terms, out);
        Err(ConfigurationError::FastOnly.into())
    }

    /// Looks up row `id - first` of `table` for each token. Ids outside `first..first + rows` give zeros.
    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor>;

    /// Computes `x / sqrt(mean(x²) + epsilon) × weight`, row by row.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor>;

    /// Adds `y` to `x`, or to every row of `x` if `y` is a vector.
    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()>;

    /// Adds `y` to `x[rows, columns]` as [`add`](Self::add) does, and returns the [norm](Self::rms_norm) of the sum, of the shape of
    /// `x`. `weight` has `columns` elements.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the device fails.
    fn add_norm(&self, x: &mut Tensor, y: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        self.add(x, y)?;
        self.rms_norm(x, weight, epsilon)
    }

    /// Computes [`swiglu`](Self::swiglu) of `x[rows, k] · weight[2 n, k]ᵀ + bias[2 n]`, a result `[rows, n]` of the type of `x`. The
    /// first `n` rows of the weight give the gates. Gates and ups are rounded to that type before.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the device fails.
    fn gated_linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.swiglu(&self.linear(x, weight, bias, x.dtype())?)
    }

    /// Computes `silu(gate) × up`; each row of `x` is gate, then up.
    fn swiglu(&self, x: &Tensor) -> Result<Tensor>;

    /// Normalises queries and keys if the call has norms, rotates them, appends keys and values to the cache, and attends. Each row of
    /// `qkv` is the query heads, the key heads, then the value heads; each row of the result is the query heads. Create or update
    /// the batch after the last call for the positions before: a GPU may read them early.
    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor>;

    /// Copies columns of blocks `[blocks, rows, width]` that lie side by side, `[rows, blocks × width]`, and returns
    /// `[rows, columns]`. A matrix is one block.
    ///
    /// # Errors
    /// Returns an error if the blocks do not have these columns, or the device fails.
    fn select_columns(&self, blocks: &Tensor, columns: Range<usize>) -> Result<Tensor>;

    /// Returns candidates for the most likely token of each row of logits `x[rows, width]`, as `[rows, pairs × 2]` in `f32`. Column `i` of
    /// `x` has the logits of token `tokens.start + i`; columns from `tokens.len()` on are ignored. Each part of a row gives a pair: its
    /// greatest logit, and the lowest token with it. NaN is greater than every number. Pairs are in ascending order of the tokens. Their
    /// number depends on the width alone, so it is the same on all ranks. The default gives one pair, in host memory.
    ///
    /// # Errors
    /// Returns an error if `x` is not `f32` or does not have these columns, a token is 2²⁴ or above, or the device fails.
    fn argmax(&self, x: &Tensor, tokens: Range<usize>) -> Result<Tensor> {
        argmax::candidates(x, &tokens)
    }

    /// Replaces each token [`CHOSEN`] `| row` of a batch by the most likely one of that row of the [candidates](Self::argmax)
    /// `[rows, pairs × 2]` of all ranks, in the order of the stream.
    ///
    /// # Errors
    /// Returns an error if there is no such row, the operands are not in the memory of a GPU, or the device fails. The default returns
    /// an error.
    fn choose_tokens(&self, batch: &mut Batch, candidates: &Tensor) -> Result<()> {
        let _ = (batch, candidates);
        Err(Error::input("tokens are chosen in the memory of a GPU only"))
    }
}
