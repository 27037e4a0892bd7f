//! Paths of groups on the memory of GPUs, and the way in which NCCL computes the documented values.

use super::tuned::{self, TunedRange};
use super::{Condition, Path, PathTable, PeerAlgorithm, Rule};
use crate::types::dtype::DType;
use crate::types::operation::ReduceOp;

/// Returns the table of a group in which NCCL executes all calls.
pub(super) fn nccl_table(world_size: usize) -> PathTable {
    PathTable::single(Path::Nccl, world_size, "NCCL carries every call on the memory of GPUs")
}

/// The element types that the peer-memory kernels add.
pub const PEER_TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Returns the bytes of the longest all-reduce that takes one step; above two ranks, also of the longest broadcast. A slot in the GPU
/// memory that ranks share has this size. Longer arrays take two steps, which send less. Above 4 ranks the limit is an estimate from the
/// bytes that a rank sends.
pub const fn one_shot_most(world_size: usize) -> usize {
    match world_size {
        0..=2 => 2 << 20,
        3..=4 => 128 << 10,
        _ => 64 << 10,
    }
}

/// Returns the maximum number of bytes of an array, of all ranks' chunks together, for the peer-memory kernels; `None` if they
/// execute all calls. With more than two ranks, the ring of NCCL finally achieves a higher bandwidth.
pub const fn peer_most(world_size: usize) -> Option<usize> {
    if world_size <= 2 { None } else { Some(128 << 20) }
}

/// Maximum number of bytes of an array of 16-bit elements whose sum, residual and norm are one kernel.
pub const ADD_NORM_MOST: usize = 8 << 20;

/// Maximum number of bytes of a row of such an array: a cluster of eight blocks of 512 threads handles it, 16 bytes per thread.
pub const MOST_ROW: usize = 8 * 512 * 16;

/// Numbers of ranks that the peer-memory kernels support.
pub const PEER_RANKS: std::ops::RangeInclusive<usize> = 2..=8;

/// Maximum number of bytes of an array of one launch of the two-step kernels; longer arrays take several. The gap between two
/// launches is short against one.
pub const TWO_SHOT_PART: usize = 32 << 20;

/// Returns the maximum number of bytes of a rank's chunk for one launch of the two-step kernels: whole warps of vectors of 16
/// bytes.
pub const fn chunk_most(world_size: usize) -> usize {
    TWO_SHOT_PART.div_ceil(world_size).next_multiple_of(32 * 16)
}

/// Returns the bytes of GPU memory that each rank of a group shares for the peer-memory kernels; 0 for unsupported numbers of
/// ranks. The memory has two phases of a slot per rank for an array, for a scattered chunk, and for a gathered chunk.
pub fn shared_bytes(world_size: usize) -> usize {
    if !PEER_RANKS.contains(&world_size) {
        return 0;
    }
    world_size * (2 * one_shot_most(world_size) + 4 * chunk_most(world_size))
}

/// Returns the table of a group on GPUs. `why_not` is the reason why its ranks share no memory, if they do not. `tuned` ranges come
/// before the built-in rules.
pub(crate) fn peer_table(world_size: usize, why_not: Option<String>, tuned: &[TunedRange]) -> PathTable {
    let [one_shot, two_shot] = PeerAlgorithm::ALL.map(Path::PeerMemory);
    if let Some(why) = why_not {
        return nccl_table(world_size).without(one_shot, why.clone()).without(two_shot, why);
    }
    let one_step = "one step between the GPUs: every rank writes its values into the memory of all others";
    let two_steps = "two steps that carry the least data, over all links at once";
    let (short, longest) = (Some(one_shot_most(world_size)), peer_most(world_size));
    // A rule uses the bytes of one rank's chunk for operations with chunks.
    let chunk = longest.map(|bytes| bytes / world_size);
    let rule = |path, operation, most: Option<usize>, because: &str| Rule {
        path,
        when: [Some(Condition::Operation(operation)), most.map(Condition::BytesUpTo)]
            .into_iter()
            .flatten()
            .collect(),
        because: because.into(),
        is_measured: false,
    };
    let built_in = [
        rule(one_shot, "all_reduce", short, one_step),
        rule(two_shot, "all_reduce", longest, two_steps),
        // With two ranks, the second step has no work: one step takes arrays of any length.
        rule(one_shot, "broadcast", if world_size > 2 { short } else { None }, one_step),
        rule(two_shot, "broadcast", longest, two_steps),
        rule(one_shot, "all_gather", chunk, one_step),
        rule(one_shot, "reduce_scatter", chunk, one_step),
        Rule::always(Path::Nccl, "NCCL carries every other call on the memory of GPUs"),
    ];
    let paths = vec![one_shot, two_shot, Path::Nccl];
    let rules = tuned::rules(tuned, world_size, &paths).into_iter().chain(built_in).collect();
    PathTable::new(world_size, paths, rules, None)
}

/// The way in which NCCL executes a reduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReductionPlan {
    /// NCCL executes it with the operation of this name.
    Native(ReduceOp),
    /// NCCL adds, and a kernel of this crate divides by the number of ranks.
    SumThenDivide,
    /// Kernels of this crate turn floats into integers of the same order and back; NCCL takes the minimum or maximum of those.
    OrderedKeys(ReduceOp),
}

impl ReductionPlan {
    /// Returns the reason why NCCL cannot execute it alone; `None` if it can.
    pub const fn reason(self) -> Option<&'static str> {
        match self {
            Self::Native(_) => None,
            Self::SumThenDivide => Some(
                "a sum that a kernel divides: NCCL multiplies by 1/n before it adds, which is exact only where n is a \
                 power of two, and its means of integers differ from the documented ones",
            ),
            Self::OrderedKeys(_) => {
                Some("on integers that are ordered as the floats, NaN outermost: NCCL's own loses a NaN")
            }
        }
    }
}

/// Returns the way in which NCCL computes the documented values of a reduction.
pub const fn nccl_reduction(op: ReduceOp, dtype: DType, world_size: usize) -> ReductionPlan {
    match op {
        ReduceOp::Min | ReduceOp::Max if dtype.is_float() => ReductionPlan::OrderedKeys(op),
        ReduceOp::Avg if dtype.is_float() && world_size.is_power_of_two() => ReductionPlan::Native(op),
        ReduceOp::Avg => ReductionPlan::SumThenDivide,
        ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max => ReductionPlan::Native(op),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_reduces_by_itself_where_it_means_the_same() {
        use ReductionPlan::{Native, OrderedKeys, SumThenDivide};
        let plan = nccl_reduction;
        assert_eq!(plan(ReduceOp::Sum, DType::BF16, 3), Native(ReduceOp::Sum));
        assert_eq!(plan(ReduceOp::Avg, DType::F16, 4), Native(ReduceOp::Avg));
        assert_eq!(plan(ReduceOp::Avg, DType::F32, 3), SumThenDivide);
        assert_eq!(plan(ReduceOp::Avg, DType::U8, 4), SumThenDivide);
        assert_eq!(plan(ReduceOp::Min, DType::I64, 2), Native(ReduceOp::Min));
        assert_eq!(plan(ReduceOp::Max, DType::F64, 2), OrderedKeys(ReduceOp::Max));
    }
}
