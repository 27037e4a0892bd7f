//! Linear layers whose weight is shared out among the ranks.
//!
//! Column-parallel and row-parallel are meant as Megatron means them: of `y = x · A`, the columns of `A` are the output
//! features, which a column-parallel layer cuts. Weights are stored as `[out, in]`, so those are rows in memory.

mod column;
mod merged;
mod qkv;
mod row;

use ryzanstein_process_group::ProcessGroup;

pub use self::column::ColumnParallelLinear;
pub use self::merged::MergedColumnParallelLinear;
pub use self::qkv::{QkvParallelLinear, QkvShape};
pub use self::row::{RowOptions, RowParallelLinear};
use crate::compute::Compute;
use crate::error::Result;
use crate::tensor::Tensor;

/// Joins every rank's columns side by side and keeps the first `keep`. One all-gather.
pub(crate) fn gather_columns(
    local: &Tensor,
    keep: usize,
    compute: &dyn Compute,
    group: &mut ProcessGroup,
) -> Result<Tensor> {
    let mut blocks = compute.scratch(&[group.world_size(), local.rows(), local.columns()], local.dtype())?;
    group.all_gather_into(local, &mut blocks)?;
    compute.concat_columns(blocks, keep)
}

#[cfg(test)]
mod tests;
