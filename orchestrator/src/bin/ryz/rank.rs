//! What all commands that are ranks of a job do.

use ryzanstein_config::Config;
use ryzanstein_orchestrator::{Orchestrator, telemetry};

use crate::settings;

/// Sets logging and metrics up, joins, does `job`, and leaves. A failure is reported to the launcher.
pub(crate) fn run(
    config: &Config,
    job: impl FnOnce(&mut Orchestrator) -> anyhow::Result<()>,
) -> anyhow::Result<i32> {
    let environment = settings::environment();
    let number = |name: &str| environment.get(name).and_then(|text| text.parse::<u32>().ok());
    telemetry::log_to_stderr(&config.log, number("RANK"))?;
    let local_rank = u16::try_from(number("LOCAL_RANK").unwrap_or(0)).unwrap_or(0);
    telemetry::serve_metrics(&config.metrics, number("RANK").unwrap_or(0), local_rank)?;
    let mut rank = Orchestrator::initialize(config, &environment)?;
    match job(&mut rank) {
        Ok(()) => {
            rank.finalize()?;
            Ok(0)
        }
        Err(error) => {
            rank.report(error.as_ref());
            Err(error)
        }
    }
}
