//! Two layers on ranks that share their weights: `ryz launch -n 2 -- target/release/examples/sharded_layer 10`. With `skip`
//! after the number of passes, rank 1 leaves out one call; docs/src/tutorial.md finds out which.

use std::collections::HashMap;
use std::time::Duration;

use ryzanstein_orchestrator::prelude::*;
use ryzanstein_orchestrator::process_group::DType;
use ryzanstein_orchestrator::tensor_parallel::checkpoint::{Loader, MemorySource};
use ryzanstein_orchestrator::tensor_parallel::linear::{
    ColumnOptions, ColumnParallelLinear, RowOptions, RowParallelLinear,
};
use ryzanstein_orchestrator::tensor_parallel::{Host, Result, Tensor};

fn passes(group: &mut ProcessGroup, passes: usize, skips: bool) -> Result<()> {
    let (rank, world_size) = (group.rank().index(), group.world_size());
    let ones = |shape: [usize; 2]| Tensor::new(&shape, vec![1.0; 32], DType::F32);
    let weights = HashMap::from([("up.weight".into(), ones([8, 4])?), ("down.weight".into(), ones([4, 8])?)]);
    let mut source = MemorySource { tensors: &weights };
    // Each layer keeps this rank's shard of its weight.
    let mut loader = Loader::new(&mut source, rank, world_size, DType::F32)?;
    let gathered = ColumnOptions { gather_output: true, ..ColumnOptions::default() };
    let up = ColumnParallelLinear::load(&mut loader, "up", (8, 4), gathered)?;
    let whole = RowOptions { input_is_parallel: false, ..RowOptions::default() };
    let down = RowParallelLinear::load(&mut loader, "down", (4, 8), whole)?;

    let compute = Host::new(1);
    let x = Tensor::new(&[1, 4], vec![1.0; 4], DType::F32)?;
    for pass in 1..=passes {
        // One all-gather.
        let wide = up.forward(&x, &compute, group)?;
        if skips && rank == 1 && pass == 3 {
            continue;
        }
        // One all-reduce.
        let y = down.forward(&wide, &compute, group)?;
        println!("pass {pass}: {}", y.values()?[0]);
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let count = arguments.next().map_or(10, |count| count.parse().expect("a number of passes"));
    let skips = arguments.next().is_some_and(|argument| argument == "skip");
    let mut rank = Orchestrator::builder().set("process_group.backend", "tcp").initialize()?;
    if let Err(error) = passes(rank.tensor_parallel(), count, skips) {
        // The launcher's closing report then names this cause.
        rank.report(&error);
        return Err(error);
    }
    Ok(rank.finalize()?)
}
