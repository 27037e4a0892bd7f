//! How a collective is measured: the same way as `peers/measure.py` measures the others.
//!
//! Each timed call has operands of its own and starts after a barrier; the memory that receives is poisoned first and
//! every element of the result is compared. Figures are the greatest over the ranks.

use std::time::Instant;

use anyhow::Result;
use ryzanstein_process_group::{ProcessGroup, Rank, ReduceOp};
use serde::{Deserialize, Serialize};

/// Sizes in bytes that every peer is measured at.
pub const SIZES: [usize; 9] =
    [1024, 8192, 65536, 262_144, 1 << 20, 4 << 20, 10_000_000, 16 << 20, 100_000_000];

/// Bytes that all ranks together pass through one measurement.
const WORK: usize = 200_000_000;

/// One size, measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of the f32 vector.
    pub bytes: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Median of one all-reduce after a barrier, in microseconds.
    pub median_us: f64,
    /// Its 99th percentile.
    pub p99_us: f64,
    /// All-reduces following one another, per call.
    pub back_to_back_us: f64,
    /// Median of one broadcast after a barrier.
    pub broadcast_us: f64,
    /// Wrong elements, over all ranks and timed calls.
    pub errors: u64,
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (share * values.len() as f64).ceil() as usize;
    values[index.clamp(1, values.len()) - 1]
}

fn microseconds(call: impl FnOnce() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    call()?;
    Ok(started.elapsed().as_secs_f64() * 1e6)
}

/// Measures f32 sum all-reduce and broadcast of `bytes` bytes. Every rank calls this; every rank gets the row.
pub fn measure(group: &mut ProcessGroup, bytes: usize) -> Result<Row> {
    let (n, rank) = (group.world_size(), group.rank().index());
    let count = bytes / 4;
    let calls = (WORK / (bytes * n).max(4000)).clamp(5, 400);
    let mut x = vec![0.0f32; count];
    let mut errors = 0u64;
    let base = |i: usize| (i % 1021) as f32;
    for _ in 0..(calls / 10).max(2) {
        group.all_reduce(&mut x, ReduceOp::Sum)?;
    }

    let mut single = Vec::with_capacity(calls);
    for call in 0..calls {
        let added = rank + call % 7;
        x.iter_mut().enumerate().for_each(|(i, x)| *x = base(i) + added as f32);
        group.barrier()?;
        single.push(microseconds(|| Ok(group.all_reduce(&mut x, ReduceOp::Sum)?))?);
        let more = (n * (n - 1) / 2 + n * (call % 7)) as f32;
        let wrong = x.iter().enumerate().filter(|(i, x)| **x != base(*i) * n as f32 + more);
        errors += wrong.count() as u64;
    }

    // Every call multiplies by the world size: as many in a row as f32 holds exactly, then fresh operands.
    let row = ((if n.is_power_of_two() { 96.0 } else { 20.0 }) / (n as f64).log2().max(0.5)) as usize;
    let (mut spent, mut done) = (0.0, 0);
    while done < calls {
        let in_a_row = row.min(calls - done);
        x.iter_mut().enumerate().for_each(|(i, x)| *x = base(i) % 4.0 + 1.0);
        group.barrier()?;
        spent += microseconds(|| {
            for _ in 0..in_a_row {
                group.all_reduce(&mut x, ReduceOp::Sum)?;
            }
            Ok(())
        })?;
        done += in_a_row;
        let factor = (n as f32).powi(in_a_row as i32);
        let wrong = x.iter().enumerate().filter(|(i, x)| **x != (base(*i) % 4.0 + 1.0) * factor);
        errors += wrong.count() as u64;
    }

    let mut cast = Vec::new();
    for call in 0..(calls / 4).max(5) {
        let value = |i: usize| base(i) + (call % 7) as f32;
        x.iter_mut().enumerate().for_each(|(i, x)| *x = if rank == 0 { value(i) } else { f32::NAN });
        group.barrier()?;
        cast.push(microseconds(|| Ok(group.broadcast(&mut x, Rank(0))?))?);
        errors += x.iter().enumerate().filter(|(i, x)| **x != value(*i)).count() as u64;
    }

    let mut figures = [
        percentile(&mut single, 0.5),
        percentile(&mut single, 0.99),
        spent / calls as f64,
        percentile(&mut cast, 0.5),
    ];
    group.all_reduce(&mut figures, ReduceOp::Max)?;
    let mut errors = [errors];
    group.all_reduce(&mut errors, ReduceOp::Sum)?;
    let [median_us, p99_us, back_to_back_us, broadcast_us] = figures;
    Ok(Row {
        bytes: count * 4,
        world_size: n,
        median_us,
        p99_us,
        back_to_back_us,
        broadcast_us,
        errors: errors[0],
    })
}
