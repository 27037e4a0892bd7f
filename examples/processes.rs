//! Ranks as processes, on GPUs if there are any: `ryz launch -n 2 -- target/debug/examples/processes`.

use ryzanstein_config::{Config, Sources};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::{Error, ReduceOp};

fn sum(orchestrator: &mut Orchestrator) -> Result<f32, Error> {
    let group = orchestrator.tensor_parallel();
    let mut x = group.upload(&[group.rank().0 as f32 + 1.0; 1000])?;
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    Ok(group.download(&x)?[0])
}

fn main() -> anyhow::Result<()> {
    let variables = std::env::vars_os();
    let environment: std::collections::BTreeMap<String, String> = variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let environment_settings = environment.clone().into_iter().collect();
    let config = Config::load(&Sources { environment: environment_settings, ..Sources::default() })?;
    let mut orchestrator = Orchestrator::initialize(&config, &environment)?;
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
