//! The overhead of a call: checks, numbering, clock, profile and flight recorder.
//!
//! A group of one has nothing to send, so its all-reduce is exactly this overhead. The budget is 200 ns, of which 100 ns may
//! be the recorder's. Metrics that are served cost more; without them, each is one comparison.

use std::hint::black_box;
use std::time::Instant;

use ryzanstein_config::{BackendChoice, Config, MetricsConfig, RecordedCalls};
use ryzanstein_orchestrator::telemetry::{self, Origin};
use ryzanstein_process_group::{Error, MemoryRendezvous, ProcessGroupManager, ReduceOp, Result};

const CALLS: u32 = 200_000;
const RUNS: usize = 15;

fn main() -> Result<()> {
    let mut with = job(RecordedCalls::new(2048))?;
    let mut without = job(RecordedCalls::new(0))?;
    // Alternating, so that other activity of the machine affects both alike.
    let (mut on, mut off, mut clock) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        on.push(calls(&mut with)?);
        off.push(calls(&mut without)?);
        clock.push(each(|| {
            black_box(Instant::now());
            Ok(())
        })?);
    }
    for manager in [&mut with, &mut without] {
        let calls = manager.world().profile().calls("all_reduce");
        assert_eq!(calls, RUNS as u64 * u64::from(CALLS), "every call is recorded");
    }
    // Last: the metrics of a group go to the recorder that is installed when the group makes its first calls.
    let served = MetricsConfig { address: Some(([127, 0, 0, 1], 0).into()), ..MetricsConfig::default() };
    telemetry::serve_metrics(&served, &Origin::default(), 0)
        .map_err(|error| Error::Configuration(error.to_string()))?;
    let mut measured = job(RecordedCalls::new(2048))?;
    let exported = (0..RUNS).map(|_| calls(&mut measured)).collect::<Result<_>>()?;
    let ([call, min, max], [off, ..], [clock, ..]) = (spread(on), spread(off), spread(clock));
    println!(
        "{{\"call_ns\":{call:.1},\"min_ns\":{min:.1},\"max_ns\":{max:.1},\"without_recorder_ns\":{off:.1},\
         \"with_metrics_served_ns\":{:.1},\"of_it_two_clock_readings_ns\":{:.1}}}",
        spread(exported)[0],
        2.0 * clock
    );
    Ok(())
}

/// Starts a job of one rank, whose recorder keeps this many calls.
fn job<E: std::fmt::Display>(recorder: Result<RecordedCalls, E>) -> Result<ProcessGroupManager> {
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Loopback;
    config.profile.recorder = recorder.map_err(|error| Error::Configuration(error.to_string()))?;
    ProcessGroupManager::initialize(&config, &MemoryRendezvous::new(1)[0])
}

fn calls(manager: &mut ProcessGroupManager) -> Result<f64> {
    let group = manager.world();
    let mut x = [1.0f32; 64];
    each(|| group.all_reduce(black_box(&mut x), ReduceOp::Sum))
}

/// Returns the mean time of one call, in nanoseconds.
fn each(mut act: impl FnMut() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..CALLS {
        act()?;
    }
    Ok(started.elapsed().as_nanos() as f64 / f64::from(CALLS))
}

/// Returns the median, the smallest and the largest value.
fn spread(mut runs: Vec<f64>) -> [f64; 3] {
    runs.sort_by(f64::total_cmp);
    [runs[RUNS / 2], runs[0], runs[RUNS - 1]]
}
