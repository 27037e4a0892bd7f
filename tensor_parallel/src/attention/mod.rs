//! Self-attention, with the heads sharded over the ranks.

mod cache;
mod pages;

pub use self::cache::CacheSize;
pub(crate) use self::cache::KvCache;
use crate::communicator::Communicator;
use crate::compute::{AttentionCall, Batch, Compute, HeadNorms, LayerCache};
use crate::error::Result;
use crate::linear::{QkvParallelLinear, RowParallelLinear};
use crate::norm::RmsNorm;
pub use crate::rotary::{Rotary, RotaryTable};
use crate::tensor::Tensor;

/// Causal self-attention over this rank's heads. It never stores keys and values of other heads.
#[derive(Debug)]
pub struct ParallelAttention {
    /// Queries, keys and values of this rank's heads.
    pub qkv: QkvParallelLinear,
    /// The output projection, summed over the ranks.
    pub output: RowParallelLinear,
    /// Number of positions that a query attends to, including its own; all if there is no window.
    pub window: Option<usize>,
    /// Norms of each head of the queries and of the keys. Every rank holds the same.
    pub norms: Option<[RmsNorm; 2]>,
}

impl ParallelAttention {
    /// Attends from the positions of the batch to those in the cache and to themselves. Takes one all-reduce.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the group fails.
    pub fn forward(
        &self,
        x: &Tensor,
        batch: &Batch,
        cache: &mut LayerCache,
        compute: &dyn Compute,
        group: &mut dyn Communicator,
    ) -> Result<Tensor> {
        self.output.forward(&self.attend(x, batch, cache, compute)?, compute, group)
    }

    /// Returns the attention output of this rank's heads, which is the input of [`output`](Self::output).
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn attend(
        &self,
        x: &Tensor,
        batch: &Batch,
        cache: &mut LayerCache,
        compute: &dyn Compute,
    ) -> Result<Tensor> {
        let qkv = self.qkv.forward(x, compute)?;
        let call = AttentionCall {
            heads: self.qkv.heads(),
            kv_heads: self.qkv.kv_heads(),
            head_dim: self.qkv.head_dim(),
            batch,
            window: self.window,
            norms: self.norms.as_ref().map(|[queries, keys]| HeadNorms {
                queries: queries.weight(),
                keys: keys.weight(),
                epsilon: queries.epsilon(),
            }),
        };
        compute.attention(qkv, &call, cache)
    }
}
