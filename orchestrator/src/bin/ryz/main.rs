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

/// Starts the ranks of a job, checks them, and runs models on them.
#[derive(Parser)]
#[command(name = "ryz", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program on every rank of a job, and end them all when one fails
    Launch(launch::Args),
    /// The process behind `launch` that supervises the ranks
    #[command(name = launch::SUPERVISE, hide = true)]
    Supervise(launch::Args),
    /// Check that the ranks find each other: what `launch` runs when no program is given
    Check(check::Args),
    /// Generate text with a Llama model, its weights cut over the ranks
    Generate(generate::Args),
    /// Measure the collectives, every value checked, and hold them against the documented targets
    Bench(bench::Args),
    /// Look at this machine: what is there, what of it will do, and what to do about the rest
    Doctor(doctor::Args),
    /// The process in which `doctor` tries things
    #[command(name = probe::NAME, hide = true)]
    Probe(probe::Args),
    /// Show the settings
    #[command(subcommand)]
    Config(config::Command),
}

fn main() -> ExitCode {
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
        // Codes beyond a byte do not exist.
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::from(if is_wrong_use(&error) { 2 } else { 1 })
        }
    }
}

/// The error and its causes. Many errors quote their cause, which need not be said twice.
fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Whether another try with the same words would fail again.
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
