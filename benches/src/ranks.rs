//! Ranks as processes of the same program under `ryz launch`.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Result, ensure};
use ryzanstein_orchestrator::Orchestrator;

/// Runs the main function of a program that starts itself as ranks, as many and on the backend that `job` returns. It passes its
/// arguments on to the ranks, each of which calls `rank`. Wrong arguments end it.
///
/// # Errors
/// Returns the errors of `rank`, and an error when the ranks do not start or fail.
pub fn main<O: clap::Parser>(
    job: impl Fn(&O) -> (usize, &str),
    rank: impl Fn(&O) -> Result<()>,
) -> Result<()> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|first| first == "rank") {
        arguments.remove(1);
        return rank(&O::parse_from(arguments));
    }
    let options = O::parse_from(&arguments);
    let (world_size, backend) = job(&options);
    let this = std::env::current_exe()?;
    let ryz = this.with_file_name("ryz");
    ensure!(ryz.exists(), "{} does not exist: run `cargo build --release` first", ryz.display());
    let status = Command::new(ryz)
        .args(["launch", "--backend", backend, "--world-size", &world_size.to_string(), "--"])
        .arg(this)
        .arg("rank")
        .args(&arguments[1..])
        .status()?;
    ensure!(status.success(), "the ranks ended with {status}");
    Ok(())
}

/// Initialises this process as a rank, without warnings of slow calls, which benchmarks make on purpose.
///
/// # Errors
/// Returns the errors of [`Builder::initialize`](ryzanstein_orchestrator::Builder::initialize).
pub fn initialize() -> Result<Orchestrator> {
    Ok(Orchestrator::builder().set("profile.slow_call", "365d").initialize()?)
}
