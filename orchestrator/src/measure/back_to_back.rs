//! Calls that follow one another without a barrier.

use std::time::Instant;

use ryzanstein_process_group::{Error, ProcessGroup, ReduceOp};

/// Time per all-reduce in microseconds when they follow one another without a barrier, and wrong elements.
///
/// # Errors
/// Those of the collectives.
pub fn back_to_back(group: &mut ProcessGroup, bytes: usize, calls: usize) -> Result<(f64, u64), Error> {
    let n = group.world_size();
    let mut x = vec![0.0f32; bytes / 4];
    let base = |i: usize| (i % 4 + 1) as f32;
    // Every call multiplies by the world size: as many in a row as f32 holds exactly, then fresh operands.
    let bits = (n as f64).log2().max(0.5);
    let row = ((if n.is_power_of_two() { 96.0 } else { 20.0 }) / bits) as usize;
    let (mut spent, mut done, mut errors) = (0.0, 0, 0);
    while done < calls {
        let in_a_row = row.min(calls - done);
        fill(&mut x, base);
        group.barrier()?;
        let started = Instant::now();
        for _ in 0..in_a_row {
            group.all_reduce(&mut x, ReduceOp::Sum)?;
        }
        spent += started.elapsed().as_secs_f64() * 1e6;
        done += in_a_row;
        let factor = (n as f32).powi(in_a_row as i32);
        errors += wrong(&x, |i| base(i) * factor);
    }
    let mut figure = [spent / calls as f64];
    group.all_reduce(&mut figure, ReduceOp::Max)?;
    let mut errors = [errors];
    group.all_reduce(&mut errors, ReduceOp::Sum)?;
    Ok((figure[0], errors[0]))
}

fn fill(x: &mut [f32], value: impl Fn(usize) -> f32) {
    for (i, x) in x.iter_mut().enumerate() {
        *x = value(i);
    }
}

fn wrong(x: &[f32], want: impl Fn(usize) -> f32) -> u64 {
    x.iter().enumerate().filter(|(i, x)| **x != want(*i)).count() as u64
}
