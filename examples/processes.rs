//! Ranks as processes, on GPUs if there are any: `ryz launch -n 2 -- target/release/examples/processes`.

use ryzanstein_orchestrator::prelude::*;
use ryzanstein_orchestrator::process_group::Error;

fn sum(orchestrator: &mut Orchestrator) -> Result<f32, Error> {
    let group = orchestrator.tensor_parallel();
    let mut x = group.upload(&[group.rank().0 as f32 + 1.0; 1000])?;
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    Ok(group.download(&x)?[0])
}

fn main() -> anyhow::Result<()> {
    let mut orchestrator = Orchestrator::builder().initialize()?;
    match sum(&mut orchestrator) {
        Ok(sum) => println!("the sum is {sum}"),
        Err(error) => {
            // The launcher's closing report then names this cause.
            orchestrator.report(&error);
            return Err(error.into());
        }
    }
    Ok(orchestrator.finalize()?)
}
