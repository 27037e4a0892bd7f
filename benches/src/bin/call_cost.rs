//! The overhead of a call: checks, numbering, clock and profile.
//!
//! A group of one has nothing to send, so its all-reduce is exactly this overhead. The budget is 200 ns.

use std::hint::black_box;
use std::time::Instant;

use ryzanstein_process_group::{ProcessGroup, ReduceOp, Result};

const CALLS: u32 = 200_000;
const RUNS: usize = 15;

fn main() -> Result<()> {
    let mut group = ProcessGroup::loopback(1).remove(0);
    let mut x = [1.0f32; 64];
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let started = Instant::now();
        for _ in 0..CALLS {
            group.all_reduce(black_box(&mut x), ReduceOp::Sum)?;
        }
        runs.push(started.elapsed().as_nanos() as f64 / f64::from(CALLS));
    }
    runs.sort_by(f64::total_cmp);
    let mut clock = Vec::new();
    for _ in 0..RUNS {
        let started = Instant::now();
        for _ in 0..CALLS {
            black_box(Instant::now());
        }
        clock.push(started.elapsed().as_nanos() as f64 / f64::from(CALLS));
    }
    clock.sort_by(f64::total_cmp);
    assert_eq!(group.profile().calls("all_reduce"), RUNS as u64 * u64::from(CALLS), "every call is recorded");
    println!(
        "{{\"call_ns\":{:.1},\"min_ns\":{:.1},\"max_ns\":{:.1},\"of_it_two_clock_readings_ns\":{:.1}}}",
        runs[RUNS / 2],
        runs[0],
        runs[RUNS - 1],
        2.0 * clock[RUNS / 2]
    );
    Ok(())
}
