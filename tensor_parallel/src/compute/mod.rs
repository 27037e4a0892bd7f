//! Arithmetic of one rank. Layers hold weights and call the group; all computing goes through [`Compute`].

mod attend;
mod host;
mod matmul;
mod skinny;

use std::fmt;
use std::ops::Range;

pub use self::host::Host;
use crate::attention::{LayerCache, RotaryTable};
use crate::dtype::Dtype;
use crate::error::Result;
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
    /// Rotations of the new positions.
    pub rotary: &'a RotaryTable,
    /// The first new position.
    pub position: usize,
    /// How many positions a query sees, its own included; all if there is no window.
    pub window: Option<usize>,
}

/// The operations that layers are made of. Sums are taken in `f32`, and each result is rounded once to its type.
///
/// Activations are `[positions, features]`, weights `[out, in]`.
pub trait Compute: fmt::Debug + Send + Sync {
    /// `x · weightᵀ + bias`, in type `out`.
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: Dtype) -> Result<Tensor>;

    /// Row `id - first` of `table` for each id; zeros for ids outside `first..first + rows`.
    fn embed(&self, table: &Tensor, first: usize, ids: &[u32], out: Dtype) -> Result<Tensor>;

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
    fn columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor>;

    /// Joins blocks side by side: `[blocks, rows, columns]` becomes `[rows, keep]`, the first `keep` columns of each
    /// joined row.
    fn join(&self, blocks: Tensor, keep: usize) -> Result<Tensor>;
}

#[cfg(test)]
mod tests;
