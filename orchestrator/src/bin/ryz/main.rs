//! The `ryz` command.

mod bench;
mod check;
mod config;
mod doctor;
mod generate;
mod launch;
mod probe;
mod rank;
mod settings;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ryzanstein_config::ConfigError;
use ryzanstein_orchestrator::supervisor::LaunchError;
use ryzanstein_orchestrator::telemetry::TelemetryError;
use ryzanstein_tensor_parallel::generate::catches_panics;

/// Launches the ranks of a job, checks and measures them, and runs models on them.
#[derive(Parser)]
#[command(name = "ryz", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program on every rank of a job, and end all ranks when one fails
    Launch(launch::Args),
    /// The supervisor process of `launch`
    #[command(name = launch::SUPERVISE, hide = true)]
    Supervise(launch::Args),
    /// Check ranks, paths and latencies: what `launch` runs when no program is given
    Check(check::Args),
    /// Generate text with a tensor-parallel Llama model
    Generate(generate::Args),
    /// Measure collectives, check every value, and compare with the documented targets
    Bench(bench::Args),
    /// Examine this machine: what it has, what works, and how to fix the rest
    Doctor(doctor::Args),
    /// The process in which `doctor` runs a probe
    #[command(name = probe::NAME, hide = true)]
    Probe(probe::Args),
    /// Show the settings
    #[command(subcommand)]
    Config(config::Command),
}

fn main() -> ExitCode {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !catches_panics() {
            report(panic);
        }
    }));
    let outcome = match Cli::parse().command {
        Command::Launch(args) => launch::run(&args),
        Command::Supervise(args) => launch::supervise(&args),
        Command::Check(args) => check::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Config(command) => config::run(&command),
    };
    match outcome {
        // An exit code is one byte.
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(if is_wrong_use(&error) { 2 } else { 1 })
        }
    }
}

/// The error and its causes. Many errors quote their cause, which is not repeated.
fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Whether the same command would fail again.
fn is_wrong_use(error: &anyhow::Error) -> bool {
    use ryzanstein_process_group::Error;
    use ryzanstein_tensor_parallel::Error as ModelError;
    error.chain().any(|cause| {
        cause.is::<ConfigError>()
            || cause.downcast_ref().is_some_and(LaunchError::is_permanent)
            || matches!(cause.downcast_ref(), Some(TelemetryError::Filter { .. }))
            || cause.downcast_ref().is_some_and(Error::is_permanent)
            || cause.downcast_ref().is_some_and(ModelError::is_permanent)
    })
}
