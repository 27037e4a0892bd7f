//! `ryz check`

use anyhow::bail;
use ryzanstein_orchestrator::check;

use crate::rank;
use crate::settings;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    file: settings::ConfigFile,
    /// Exit with code 1 when a latency target is missed
    #[arg(long)]
    strict: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    let mut config = args.file.load(Vec::new())?;
    settings::silence_slow_call_warnings(&mut config);
    let strict = args.strict;
    rank::run(&config, |orchestrator| {
        let report = check::run(orchestrator, &config.job.name)?;
        if orchestrator.manager().rank().0 == 0 {
            print!("{}", report.text);
        }
        if !report.correct {
            bail!("the check found wrong values");
        }
        if strict && !report.targets_met {
            bail!("latency targets are missed, and --strict was given");
        }
        Ok(())
    })
}
