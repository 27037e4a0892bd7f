//! Ranks as processes of the same program under `ryz launch`, and as threads.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ryzanstein_config::{Config, Sources};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager};

/// Parses numbers separated by commas.
///
/// # Errors
/// Names the text that is not a number.
pub fn numbers(text: &str) -> Result<Vec<usize>> {
    text.split(',').map(|part| part.parse().with_context(|| format!("`{part}` is not a number"))).collect()
}

/// Runs the main function of a program that starts itself as ranks, as many and on the backend that `job` returns. It passes its
/// arguments on to the ranks, each of which calls `rank`.
///
/// # Errors
/// Returns the errors of the three functions, and an error when the ranks do not start or fail.
pub fn main<O>(
    options: impl Fn(&[String]) -> Result<O>,
    job: impl Fn(&O) -> (usize, &str),
    rank: impl Fn(&O) -> Result<()>,
) -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "rank"
    {
        return rank(&options(rest)?);
    }
    let options = options(&arguments)?;
    let (world_size, backend) = job(&options);
    let this = std::env::current_exe()?;
    let ryz = this.with_file_name("ryz");
    ensure!(ryz.exists(), "{} does not exist: run `cargo build --release` first", ryz.display());
    let status = Command::new(ryz)
        .args(["launch", "--backend", backend, "--world-size", &world_size.to_string(), "--"])
        .arg(this)
        .arg("rank")
        .args(arguments)
        .status()?;
    ensure!(status.success(), "the ranks ended with {status}");
    Ok(())
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
    rank: impl Fn(ProcessGroupManager) -> Result<R> + Sync,
) -> Result<R> {
    let rendezvous = MemoryRendezvous::new(world_size);
    let start = &|place: &_| rank(ProcessGroupManager::initialize(config, place)?);
    let results: Result<Vec<R>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = rendezvous.iter().map(|place| scope.spawn(move || start(place))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank ends")).collect()
    });
    results?.into_iter().next().context("the number of ranks must be at least 1")
}

/// Initialises this process as a rank, without warnings of slow calls, which benchmarks make on purpose.
///
/// # Errors
/// Returns the errors of [`Config::load`] and [`Orchestrator::initialize`].
pub fn initialize() -> Result<Orchestrator> {
    let environment: BTreeMap<String, String> = std::env::vars().collect();
    let sources = Sources { environment: environment.clone().into_iter().collect(), ..Sources::default() };
    let mut config = Config::load(&sources)?;
    config.profile.slow_call = Duration::MAX;
    Ok(Orchestrator::initialize(&config, &environment)?)
}
