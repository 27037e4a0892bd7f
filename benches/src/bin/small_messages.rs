//! All-reduces of 1 KiB between ranks that are threads, which sleep as soon as they wait. The program serves to count
//! instructions.
//!
//! `small_messages RANKS CALLS` prints nothing. `scripts/instructions` runs it under callgrind with two numbers of calls; the
//! difference is the cost of a call, independent of other activity of the machine.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ryzanstein_benches::ranks;
use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_process_group::{ProcessGroup, ReduceOp};

const ELEMENTS: usize = 256;

fn main() -> Result<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|n| n.parse().context(n)).collect::<Result<_>>()?;
    let &[ranks, calls] = &numbers[..] else { anyhow::bail!("expected RANKS CALLS") };
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    config.process_group.tcp.spin = Duration::ZERO;
    ranks::threads(&config, ranks, |mut manager| rank(manager.world(), calls))
}

fn rank(group: &mut ProcessGroup, calls: usize) -> Result<()> {
    let size = group.world_size() as i32;
    for call in 0..calls {
        let value = (call % 8) as i32;
        let mut x = [value; ELEMENTS];
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        ensure!(x == [value * size; ELEMENTS], "call {call} has another sum");
    }
    Ok(())
}
