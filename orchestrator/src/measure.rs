//! How a collective is measured.
//!
//! Each timed call has operands of its own and starts after a barrier; memory that receives is poisoned first, and every
//! element of the result is compared. Figures are the greatest over the ranks.

use std::time::Instant;

use ryzanstein_process_group::{Error, ProcessGroup, Rank, ReduceOp};

/// What can be measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measured {
    /// Sum of f32, in place.
    AllReduce,
    /// From rank 0.
    Broadcast,
}

impl Measured {
    /// The operation's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
        }
    }
}

/// Latency of one operation at one size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latency {
    /// Bytes of the vector.
    pub bytes: usize,
    /// Timed calls.
    pub calls: usize,
    /// Median in microseconds.
    pub median_us: f64,
    /// 90th percentile in microseconds.
    pub p90_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// Largest in microseconds.
    pub max_us: f64,
    /// Wrong elements, over all ranks and calls.
    pub errors: u64,
}

/// Nearest rank: with few calls the 99th percentile is the greatest.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let index = (share * values.len() as f64).ceil() as usize;
    values[index.clamp(1, values.len()) - 1]
}

/// Calls `call` `calls` times on `bytes` bytes of f32. Every rank calls this and gets the same figures.
///
/// # Errors
/// Those of the collectives.
pub fn latency(
    group: &mut ProcessGroup,
    what: Measured,
    bytes: usize,
    calls: usize,
) -> Result<Latency, Error> {
    let (n, rank) = (group.world_size(), group.rank().index());
    let mut x = vec![0.0f32; bytes / 4];
    let mut placed = group.place(&x)?;
    let on_gpu = group.device().is_some();
    let base = |i: usize| (i % 1021) as f32;
    let mut errors = 0;
    let mut times = Vec::with_capacity(calls);
    let warm_up = (calls / 10).clamp(1, 20);
    for call in 0..warm_up + calls {
        let shift = call % 7;
        // Small integers, whose sums f32 holds exactly.
        match what {
            Measured::AllReduce => fill(&mut x, |i| base(i) + (rank + shift) as f32),
            Measured::Broadcast if rank == 0 => fill(&mut x, |i| base(i) + shift as f32),
            Measured::Broadcast => x.fill(f32::NAN),
        }
        placed.write(&x)?;
        group.barrier()?;
        let started = Instant::now();
        match what {
            Measured::AllReduce => group.all_reduce(&mut placed, ReduceOp::Sum)?,
            Measured::Broadcast => group.broadcast(&mut placed, Rank(0))?,
        }
        if on_gpu {
            // Until it is done, not only enqueued.
            group.synchronize()?;
        }
        if call >= warm_up {
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        x = group.fetch(&placed)?;
        let of_ranks = (n * (n - 1) / 2 + n * shift) as f32;
        errors += match what {
            Measured::AllReduce => wrong(&x, |i| base(i) * n as f32 + of_ranks),
            Measured::Broadcast => wrong(&x, |i| base(i) + shift as f32),
        };
    }
    let figures = [0.5, 0.9, 0.99, 1.0].map(|share| percentile(&mut times, share));
    let figures = greatest(group, &figures)?;
    let errors = total(group, errors)?;
    let (median_us, p90_us, p99_us, max_us) = (figures[0], figures[1], figures[2], figures[3]);
    Ok(Latency { bytes: x.len() * 4, calls, median_us, p90_us, p99_us, max_us, errors })
}

/// Time per all-reduce in microseconds when they follow one another without a barrier, and wrong elements.
///
/// # Errors
/// Those of the collectives.
pub fn back_to_back(group: &mut ProcessGroup, bytes: usize, calls: usize) -> Result<(f64, u64), Error> {
    let n = group.world_size();
    let mut x = vec![0.0f32; bytes / 4];
    let mut placed = group.place(&x)?;
    let base = |i: usize| (i % 4 + 1) as f32;
    // Every call multiplies by the world size: as many in a row as f32 holds exactly, then fresh operands.
    let bits = (n as f64).log2().max(0.5);
    let row = ((if n.is_power_of_two() { 96.0 } else { 20.0 }) / bits) as usize;
    let (mut spent, mut done, mut errors) = (0.0, 0, 0);
    while done < calls {
        let in_a_row = row.min(calls - done);
        fill(&mut x, base);
        placed.write(&x)?;
        group.barrier()?;
        let started = Instant::now();
        for _ in 0..in_a_row {
            group.all_reduce(&mut placed, ReduceOp::Sum)?;
        }
        group.synchronize()?;
        spent += started.elapsed().as_secs_f64() * 1e6;
        done += in_a_row;
        x = group.fetch(&placed)?;
        let factor = (n as f32).powi(in_a_row as i32);
        errors += wrong(&x, |i| base(i) * factor);
    }
    let figure = greatest(group, &[spent / calls as f64])?;
    Ok((figure[0], total(group, errors)?))
}

/// The greatest of each figure over the ranks.
fn greatest(group: &mut ProcessGroup, figures: &[f64]) -> Result<Vec<f64>, Error> {
    let mut placed = group.place(figures)?;
    group.all_reduce(&mut placed, ReduceOp::Max)?;
    group.fetch(&placed)
}

/// The sum over the ranks.
pub(crate) fn total(group: &mut ProcessGroup, count: u64) -> Result<u64, Error> {
    let mut placed = group.place(&[count])?;
    group.all_reduce(&mut placed, ReduceOp::Sum)?;
    Ok(group.fetch(&placed)?[0])
}

fn fill(x: &mut [f32], value: impl Fn(usize) -> f32) {
    for (i, x) in x.iter_mut().enumerate() {
        *x = value(i);
    }
}

fn wrong(x: &[f32], want: impl Fn(usize) -> f32) -> u64 {
    x.iter().enumerate().filter(|(i, x)| **x != want(*i)).count() as u64
}
