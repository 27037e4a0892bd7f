//! The process in which `ryz doctor` tries what could end one.

use ryzanstein_config::BackendChoice;
use ryzanstein_orchestrator::doctor;

use crate::settings;

/// The hidden command.
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
    /// Read a word of another process
    Memory { pid: u32, address: u64 },
    /// Ask CUDA which GPUs it shows
    Gpus,
    /// Bring a group of threads up and time an all-reduce
    AllReduce { backend: BackendChoice, ranks: usize },
}

pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    match args.what {
        What::Memory { pid, address } => {
            println!("{}", doctor::read_memory_of(pid, address).unwrap_or_else(|why| why));
        }
        What::Gpus => {
            let shown = doctor::visible_gpus(&args.file.load(Vec::new())?.device);
            println!("{}", serde_json::to_string(&shown)?);
        }
        What::AllReduce { backend, ranks } => {
            let config = args.file.load(Vec::new())?;
            let outcome = doctor::try_all_reduce(&config, &settings::environment(), backend, ranks);
            println!("{}", serde_json::to_string(&outcome)?);
        }
    }
    Ok(0)
}
