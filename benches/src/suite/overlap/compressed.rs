//! All-reduces of f32 values, sent unchanged and in 16 bits.

use std::time::Instant;

use ryzanstein_process_group::{ProcessGroup, ReduceOp, WireType};
use ryzanstein_tensor_parallel::Error;
use serde::Serialize;

use super::median_us;

/// Bytes of the f32 values of each all-reduce.
const SIZES: [usize; 3] = [100_000, 10_000_000, 100_000_000];

/// All-reduces of one size.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CompressedRow {
    /// Bytes of the f32 values.
    pub bytes: usize,
    /// Median time of an all-reduce that sends them unchanged, in microseconds.
    pub f32_us: f64,
    /// The all-reduce in bf16.
    pub bf16: Sent,
    /// The all-reduce in f16.
    pub f16: Sent,
}

/// All-reduces in one 16-bit type.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Sent {
    /// Median time in microseconds.
    pub median_us: f64,
    /// The largest error, relative to the sum of absolute values.
    pub error: f64,
    /// Upper bound of the error.
    pub bound: f64,
}

/// Measures all sizes. Every rank calls this.
pub(super) fn measure(group: &mut ProcessGroup, steps: usize) -> Result<Vec<CompressedRow>, Error> {
    SIZES.into_iter().map(|bytes| measure_size(group, bytes, steps)).collect()
}

fn measure_size(group: &mut ProcessGroup, bytes: usize, steps: usize) -> Result<CompressedRow, Error> {
    let me = group.rank().index();
    let operands: Vec<f32> = (0..bytes / size_of::<f32>()).map(|i| operand(me, i)).collect();
    let mut values = operands.clone();
    let f32_us = time(group, steps, |group| Ok(group.all_reduce(&mut values, ReduceOp::Avg)?))?;
    let mut sent = |wire| {
        let median_us =
            time(group, steps, |group| Ok(group.all_reduce_compressed(&mut values, ReduceOp::Avg, wire)?))?;
        values.copy_from_slice(&operands);
        group.all_reduce_compressed(&mut values, ReduceOp::Sum, wire)?;
        let ranks = group.world_size();
        Ok::<_, Error>(Sent {
            median_us,
            error: largest_error(&values, ranks),
            bound: wire.error_bound(ranks),
        })
    };
    Ok(CompressedRow { bytes, f32_us, bf16: sent(WireType::Bf16)?, f16: sent(WireType::F16)? })
}

/// Returns the median on the slowest rank, in microseconds.
fn time(
    group: &mut ProcessGroup,
    steps: usize,
    mut call: impl FnMut(&mut ProcessGroup) -> Result<(), Error>,
) -> Result<f64, Error> {
    let mut seconds = Vec::new();
    for _ in 0..=steps {
        group.barrier()?;
        let started = Instant::now();
        call(group)?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    median_us(group, &seconds)
}

/// Returns a value between -1 and 1 that no 16-bit type represents.
fn operand(rank: usize, i: usize) -> f32 {
    let mixed = (i as u64 ^ ((rank as u64 + 1) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Returns the largest error on this rank, which has the same bits as all others.
fn largest_error(sums: &[f32], ranks: usize) -> f64 {
    let mut largest = 0.0f64;
    for (i, got) in sums.iter().enumerate() {
        let operands = (0..ranks).map(|rank| f64::from(operand(rank, i)));
        let (sum, magnitude) = operands.fold((0.0, 0.0), |(s, m), x| (s + x, m + x.abs()));
        let error = (f64::from(*got) - sum).abs() / f64::max(magnitude, 0.01);
        // A NaN must not count as no error.
        largest = if error.is_nan() { f64::INFINITY } else { largest.max(error) };
    }
    largest
}
