//! Ranks as processes of the same program under `ryz launch`, and as threads.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::Context as _;
use ryzanstein_config::{Config, ConfigError, Sources};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager};

/// The reason why ranks could not be started, or failed.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// `ryz` is not in the folder of this program.
    #[error("{} does not exist: run `cargo build --release` first", .0.display())]
    NoRyz(PathBuf),
    /// A process could not be started.
    #[error("cannot start the ranks: {0}")]
    Spawn(#[from] io::Error),
    /// A rank failed.
    #[error("the ranks ended with {0}")]
    Failed(ExitStatus),
    /// The settings cannot be read.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// This rank cannot join.
    #[error(transparent)]
    Group(#[from] ryzanstein_process_group::Error),
}

/// Returns a command that starts this program as `world_size` ranks on `backend`, with the arguments that are added to it.
///
/// # Errors
/// [`RanksError::NoRyz`] when `ryz` is not in the folder of this program.
pub fn command(world_size: usize, backend: &str) -> Result<Command, RanksError> {
    let this = std::env::current_exe()?;
    let ryz = this.with_file_name("ryz");
    if !ryz.exists() {
        return Err(RanksError::NoRyz(ryz));
    }
    let mut command = Command::new(ryz);
    command.args(["launch", "--backend", backend, "--world-size", &world_size.to_string(), "--"]);
    command.arg(this).arg("rank");
    Ok(command)
}

/// Parses numbers separated by commas.
///
/// # Errors
/// Names the text that is not a number.
pub fn numbers(text: &str) -> anyhow::Result<Vec<usize>> {
    text.split(',').map(|part| part.parse().with_context(|| format!("`{part}` is not a number"))).collect()
}

/// Runs the main function of a program that starts itself as ranks on GPUs, one for each of `world_size`. It passes its
/// arguments on to the ranks, each of which calls `rank`.
///
/// # Errors
/// Returns the errors of the three functions; [`RanksError`] when the ranks do not start or fail.
pub fn main_on_gpus<O>(
    options: impl Fn(&[String]) -> anyhow::Result<O>,
    world_size: impl Fn(&O) -> usize,
    rank: impl Fn(&O) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "rank"
    {
        return rank(&options(rest)?);
    }
    let world_size = world_size(&options(&arguments)?);
    Ok(run(command(world_size, "nccl")?.args(arguments))?)
}

/// Runs a command from [`command`] to its end.
///
/// # Errors
/// [`RanksError::Failed`] when a rank fails.
pub fn run(command: &mut Command) -> Result<(), RanksError> {
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(RanksError::Failed(status)) }
}

/// Runs `rank` on `world_size` threads, each of them a rank, and returns the result of rank 0.
///
/// # Errors
/// Fails when `world_size` is 0; otherwise returns a rank's first error.
///
/// # Panics
/// Panics when a rank panics.
pub fn threads<R: Send>(
    config: &Config,
    world_size: usize,
    rank: impl Fn(ProcessGroupManager) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<R> {
    let rendezvous = MemoryRendezvous::new(world_size);
    let start = &|place: &_| rank(ProcessGroupManager::initialize(config, place)?);
    let results: anyhow::Result<Vec<R>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = rendezvous.iter().map(|place| scope.spawn(move || start(place))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank ends")).collect()
    });
    results?.into_iter().next().context("the number of ranks must be at least 1")
}

/// Initialises this process as a rank, without warnings of slow calls, which benchmarks make on purpose.
///
/// # Errors
/// Returns the errors of [`Config::load`] and [`Orchestrator::initialize`].
pub fn initialize() -> Result<Orchestrator, RanksError> {
    let environment: BTreeMap<String, String> = std::env::vars().collect();
    let sources = Sources { environment: environment.clone().into_iter().collect(), ..Sources::default() };
    let mut config = Config::load(&sources)?;
    config.profile.slow_call = Duration::MAX;
    Ok(Orchestrator::initialize(&config, &environment)?)
}
