//! Which algorithm a call takes.

use super::Algorithm;
use super::build::CollectiveSpec;
use super::cost::{LinkModel, estimate};
use crate::dtype::DType;
use crate::operation::Operation;

/// The algorithm that a user demands for every operation that has it, or `None` to choose by cost.
pub type Demand = Option<Algorithm>;

/// From this size on, an all-reduce among more than two ranks goes round the ring. Its traffic is that of its rivals, but
/// each rank fills one link at a time, so that the least is in flight: measured on two cores with 4 ranks and 100 MB, the
/// direct way takes 1.1 times as long, halving-doubling between 1.0 and 1.7 times.
const RING_FROM: usize = 32 << 20;

/// Picks the algorithm of a call. Depends on nothing that differs between ranks.
///
/// A demanded algorithm is taken by every operation that has it. Otherwise the cheapest by
/// [`estimate`] wins, and for very long all-reduces the ring; reductions of 16-bit floats always go directly, because only there all operands meet in one
/// place and are rounded once.
pub fn select(
    operation: Operation,
    dtype: DType,
    count: usize,
    n: usize,
    demand: Demand,
    model: &LinkModel,
) -> Algorithm {
    if let Some(demanded) = demand.filter(|a| a.suits(operation)) {
        return demanded;
    }
    if dtype.is_half() && operation.reduce_op().is_some() {
        return Algorithm::Direct;
    }
    if matches!(operation, Operation::AllReduce(_)) && n > 2 && count * dtype.size() >= RING_FROM {
        return Algorithm::Ring;
    }
    let cost = |algorithm: &Algorithm| {
        let spec =
            CollectiveSpec { operation, algorithm: *algorithm, count, in_place: true, zero_copy: false };
        estimate(spec, n, dtype.size(), model)
    };
    let suitable = Algorithm::ALL.into_iter().filter(|a| a.suits(operation));
    suitable.min_by_key(cost).expect("every operation has an algorithm")
}
