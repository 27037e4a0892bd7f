//! The process in which `ryz doctor` runs probes that could crash or block.

use crate::command::screen;
use crate::doctor;
use ryzanstein_config::BackendChoice;
use serde::Serialize;

use crate::command::settings;

/// The name of the hidden command.
pub(crate) const NAME: &str = "__probe";

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    file: settings::ConfigFile,
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Clone, Debug)]
enum What {
    /// List the GPUs that CUDA shows
    Gpus,
    /// Start a group of threads and time an all-reduce
    AllReduce { backend: BackendChoice, ranks: usize },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    match args.what {
        What::Gpus => {
            let shown = doctor::visible_gpus(&args.file.load(Vec::new())?.device);
            print_answer(shown.map_err(Into::into))?;
        }
        What::AllReduce { backend, ranks } => {
            let config = args.file.load(Vec::new())?;
            let outcome = doctor::try_all_reduce(&config, &settings::environment(), backend, ranks);
            print_answer(outcome)?;
        }
    }
    Ok(0)
}

/// Prints one line of JSON, in which an error is represented by its text.
fn print_answer<T: Serialize>(outcome: anyhow::Result<T>) -> anyhow::Result<()> {
    screen::print(&(serde_json::to_string(&outcome.map_err(|error| error.to_string()))? + "\n"));
    Ok(())
}
