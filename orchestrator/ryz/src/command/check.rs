//! `ryz check`

use crate::check::{self, Options};
use anyhow::bail;
use ryzanstein_config::WorldSize;

use crate::command::launch;
use crate::command::rank;
use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz check -n 4 --strict
  ryz check -n 4 --invariant
  srun -K1 ryz check
  torchrun --nproc-per-node 4 --no-python ryz check";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks to start, when no launcher started this process [default: 1]
    #[arg(long, short = 'n', value_name = "N")]
    world_size: Option<String>,
    /// Backend: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Judge latencies on CPUs too (the targets are for GPUs)
    #[arg(long)]
    targets: bool,
    /// Exit with code 1 if a target is missed or none can be judged; implies --targets
    #[arg(long)]
    strict: bool,
    /// Compare the bits of a model's logits on 1, 2, 4 and 8 ranks, with model.numerics = invariant
    #[arg(long)]
    invariant: bool,
    #[command(flatten)]
    file: settings::ConfigFile,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let mut flags = settings::Flags::new();
    settings::set_flag(&mut flags, "job.world_size", "--world-size", args.world_size.as_ref());
    settings::set_flag(&mut flags, "process_group.backend", "--backend", args.backend.as_ref());
    let mut config = args.file.load(flags)?;
    screen.set_log_level(&mut config);
    settings::silence_slow_call_warnings(&mut config);
    let ranks = config.job.world_size.map_or(1, WorldSize::get);
    if !settings::is_launched(&config)? && ranks > 1 {
        return launch::relaunch(ranks, &args.file, &[], &[]);
    }
    let options = Options {
        job: &config.job.name,
        targets: args.targets || args.strict,
        invariant: args.invariant,
        screen: screen.stdout(),
    };
    rank::run(&config, |orchestrator| {
        let is_first = orchestrator.manager().rank().0 == 0;
        let report = check::run(orchestrator, &options, &mut |text| {
            if is_first {
                screen::print(text);
            }
        })?;
        if !report.correct {
            bail!("the check found wrong values");
        }
        if args.strict {
            match report.targets_met {
                Some(true) => {}
                Some(false) => bail!("--strict: some latency targets were missed"),
                None => bail!(
                    "--strict: no latency could be judged, because a single rank sends nothing; start several ranks"
                ),
            }
        }
        Ok(())
    })
}
