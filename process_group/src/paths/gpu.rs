//! Paths of groups on the memory of GPUs, and how NCCL comes to the documented values.

use super::{Path, PathTable};
use crate::dtype::DType;
use crate::operation::ReduceOp;

/// The table of a group whose calls NCCL carries.
pub fn nccl_table(world_size: usize) -> PathTable {
    PathTable::single(Path::Nccl, world_size, "NCCL carries every call on the memory of GPUs")
}

/// How NCCL does a reduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReductionPlan {
    /// By itself, with the operation of this name.
    Native(ReduceOp),
    /// NCCL adds, and a kernel of ours divides by the number of ranks.
    SumThenDivide,
    /// Kernels of ours turn floats into integers of the same order and back; NCCL takes the minimum or maximum of those.
    OrderedKeys(ReduceOp),
}

impl ReductionPlan {
    /// Why NCCL does not do it by itself; `None` where it does.
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

/// How NCCL comes to the documented values of a reduction.
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
