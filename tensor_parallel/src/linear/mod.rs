//! Linear layers with weights sharded over the ranks.
//!
//! Column-parallel and row-parallel are Megatron's terms: of `y = x · A`, a column-parallel layer shards the columns of `A`,
//! which are the output features. Weights are stored as `[out, in]`, so those are rows in memory.

mod column;
mod merged;
mod qkv;
mod row;

pub use self::column::{ColumnOptions, ColumnParallelLinear};
pub use self::merged::MergedColumnParallelLinear;
pub use self::qkv::{QkvParallelLinear, QkvShape};
pub use self::row::{RowOptions, RowParallelLinear};
use crate::communicator::{Communicator, Shard};
use crate::compute::Compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Concatenates the columns of all ranks and keeps the first `keep`. Takes one all-gather.
///
/// # Errors
/// Returns an error if the group is not that of the shard, or fails.
pub(crate) fn gather_columns(
    local: &Tensor,
    keep: usize,
    compute: &dyn Compute,
    (shard, group): (Shard, &mut dyn Communicator),
) -> Result<Tensor> {
    shard.check(group)?;
    let (ranks, rows, columns) = (group.world_size(), local.rows(), local.columns());
    let mut blocks = compute.scratch(&[ranks, rows, columns], local.dtype())?;
    group.all_gather(local, &mut blocks)?;
    if keep == ranks * columns && (ranks == 1 || rows == 1) {
        return blocks.reshape(&[rows, keep]);
    }
    compute.select_columns(&blocks, 0..keep)
}

#[cfg(test)]
mod tests;
