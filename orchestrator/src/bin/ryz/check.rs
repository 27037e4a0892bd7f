//! `ryz check`

use anyhow::Context as _;
use ryzanstein_orchestrator::{check, rendezvous, telemetry};

use crate::settings;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    file: settings::File,
    /// Exit with 1 when a latency target is missed, too
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    let config = args.file.load(Vec::new())?;
    let environment = settings::environment();
    let number = |name: &str| environment.get(name).and_then(|text| text.parse::<u32>().ok());
    telemetry::log_to_stderr(&config.log, number("RANK"))?;
    let local_rank = u16::try_from(number("LOCAL_RANK").unwrap_or(0)).unwrap_or(0);
    telemetry::serve_metrics(&config.metrics, number("RANK").unwrap_or(0), local_rank)?;
    // Targets are not measured yet.
    let _ = args.strict;

    let connection = rendezvous::connect(&config, &environment)?;
    match check::run(&config, &connection) {
        Ok(table) => {
            if let Some(table) = table {
                print!("{table}");
            }
            Ok(0)
        }
        Err(error) => {
            connection.report_failure(&error, None);
            Err(error).context("the check failed")
        }
    }
}
