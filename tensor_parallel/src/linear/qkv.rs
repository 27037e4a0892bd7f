//! Queries, keys and values of this rank's heads in one matrix.

use std::ops::Range;

use ryzanstein_process_group::DType;

use super::MergedColumnParallelLinear;
use crate::checkpoint::Loader;
use crate::compute::Compute;
use crate::error::Result;
use crate::shard::{self, HeadShard};
use crate::tensor::{Tensor, element_count};

/// The heads of a whole attention layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QkvShape {
    /// Width of the input.
    pub hidden: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Length of one head.
    pub head_dim: usize,
}

/// The projections of grouped-query attention, sharded by heads. If there are more ranks than key/value heads, several ranks hold
/// the same key/value head.
#[derive(Debug)]
pub struct QkvParallelLinear {
    inner: MergedColumnParallelLinear,
    mine: HeadShard,
    head_dim: usize,
}

impl QkvParallelLinear {
    /// Loads `{prefix}.q_proj`, `k_proj` and `v_proj`.
    ///
    /// # Errors
    /// Returns an error if the heads cannot be sharded over the ranks (see [`shard::split_heads`]), or the source fails.
    pub fn load(loader: &mut Loader<'_>, prefix: &str, shape: QkvShape, bias: bool) -> Result<Self> {
        let QkvShape { hidden, heads, kv_heads, head_dim } = shape;
        // No product of these overflows.
        element_count(&[heads.max(kv_heads), head_dim, hidden], DType::F32)?;
        let mine = shard::split_heads(heads, kv_heads, loader.world_size())?.swap_remove(loader.rank());
        let rows = |heads: &Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let names = ["q_proj", "k_proj", "v_proj"].map(|n| format!("{prefix}.{n}"));
        let parts = [
            (names[0].as_str(), heads * head_dim),
            (names[1].as_str(), kv_heads * head_dim),
            (names[2].as_str(), kv_heads * head_dim),
        ];
        let rows = [rows(&mine.query), rows(&mine.kv), rows(&mine.kv)];
        let inner = MergedColumnParallelLinear::load_rows(loader, &parts, &rows, hidden, bias)?;
        Ok(Self { inner, mine, head_dim })
    }

    /// Returns this rank's query heads, then its key heads, then its value heads. Takes no communication.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute) -> Result<Tensor> {
        self.inner.forward(x, compute)
    }

    /// Returns the number of query heads on this rank.
    pub fn heads(&self) -> usize {
        self.mine.query.len()
    }

    /// Returns the number of key/value heads on this rank.
    pub fn kv_heads(&self) -> usize {
        self.mine.kv.len()
    }

    /// Returns the length of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
}
