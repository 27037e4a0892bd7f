//! Back-to-back calls, without barriers between them.

use std::time::Instant;

use ryzanstein_process_group::{Error, GroupBuffer, ProcessGroup, ReduceOp};

/// Returns the time per back-to-back all-reduce in microseconds, and the number of wrong elements.
///
/// # Errors
/// Returns the errors of the collectives.
pub fn back_to_back(group: &mut ProcessGroup, bytes: usize, calls: usize) -> Result<(f64, u64), Error> {
    let (figure, errors) =
        calls_back_to_back(group, bytes, calls, |group, x| group.all_reduce(x, ReduceOp::Sum))?;
    Ok((figure.0, errors))
}

/// Does the same as [`back_to_back`] with all-reduces that `make` makes. Also returns the time per call until they returned to
/// the host.
///
/// # Errors
/// Returns the errors of the collectives.
pub fn calls_back_to_back(
    group: &mut ProcessGroup,
    bytes: usize,
    calls: usize,
    mut make: impl FnMut(&mut ProcessGroup, &mut GroupBuffer<f32>) -> Result<(), Error>,
) -> Result<((f64, f64), u64), Error> {
    let n = group.world_size();
    let mut x = vec![0.0f32; bytes / 4];
    let mut placed = group.upload(&x)?;
    let base = |i: usize| (i % 4 + 1) as f32;
    // Every call multiplies by the world size: consecutive calls as long as f32 is exact, then fresh operands.
    let bits = (n as f64).log2().max(0.5);
    let row = ((if n.is_power_of_two() { 96.0 } else { 20.0 }) / bits) as usize;
    let (mut spent, mut returned, mut done, mut errors) = (0.0, 0.0, 0, 0);
    while done < calls {
        let in_a_row = row.min(calls - done);
        fill(&mut x, base);
        placed.write(&x)?;
        group.barrier()?;
        let started = Instant::now();
        for _ in 0..in_a_row {
            make(group, &mut placed)?;
        }
        returned += started.elapsed().as_secs_f64() * 1e6;
        group.synchronize()?;
        spent += started.elapsed().as_secs_f64() * 1e6;
        done += in_a_row;
        x = group.download(&placed)?;
        let factor = (n as f32).powi(in_a_row as i32);
        errors += wrong(&x, |i| base(i) * factor);
    }
    let figure = greatest(group, &[spent / calls as f64, returned / calls as f64])?;
    Ok(((figure[0], figure[1]), total(group, errors)?))
}

/// Returns the maximum of each figure over the ranks.
fn greatest(group: &mut ProcessGroup, figures: &[f64]) -> Result<Vec<f64>, Error> {
    let mut placed = group.upload(figures)?;
    group.all_reduce(&mut placed, ReduceOp::Max)?;
    group.download(&placed)
}

/// Returns the sum over the ranks.
pub fn total(group: &mut ProcessGroup, count: u64) -> Result<u64, Error> {
    let mut placed = group.upload(&[count])?;
    group.all_reduce(&mut placed, ReduceOp::Sum)?;
    Ok(group.download(&placed)?[0])
}

fn fill(x: &mut [f32], value: impl Fn(usize) -> f32) {
    for (i, x) in x.iter_mut().enumerate() {
        *x = value(i);
    }
}

fn wrong(x: &[f32], want: impl Fn(usize) -> f32) -> u64 {
    x.iter().enumerate().filter(|(i, x)| **x != want(*i)).count() as u64
}
