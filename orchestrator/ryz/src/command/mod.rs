//! The `ryz` command.

mod bench;
mod check;
mod config;
mod doctor;
mod explain;
mod generate;
mod launch;
mod live_text;
mod plan;
mod probe;
mod rank;
mod screen;
mod settings;
mod status;
mod topo;
mod trace;
mod tune;
mod tune_args;
mod tune_nccl;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::ContextKind;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use ryzanstein_config::ConfigError;
use ryzanstein_orchestrator::hub::HubError;
use ryzanstein_orchestrator::supervisor::LaunchError;
use ryzanstein_orchestrator::table::{Tone, printable};
use ryzanstein_orchestrator::telemetry::TelemetryError;
use ryzanstein_orchestrator::{catalogue, chain, console};
use ryzanstein_tensor_parallel::generate::catches_panics;
use ryzanstein_tensor_parallel::model::Architecture;

pub use screen::json;

/// Launches the ranks of a job, checks and measures them, and runs models on them.
#[derive(Parser)]
#[command(name = "ryz", version, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    screen: screen::Args,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a program on every rank of a job, and end all ranks when one fails
    #[command(name = launch::NAME)]
    Launch(launch::Args),
    /// The supervisor process of `launch`
    #[command(name = launch::SUPERVISE, hide = true)]
    Supervise(launch::Args),
    /// Check ranks, paths and latencies: what `launch` runs when no program is given
    Check(check::Args),
    #[command(about = format!("Generate text with a {} model", Architecture::list(|known| known.name, "or")))]
    Generate(generate::Args),
    /// Measure collectives, check every value, and compare with the documented targets
    Bench(bench::Args),
    /// Say how many GPUs a model can run on, and what each of them needs
    Plan(plan::Args),
    /// Measure which path is quickest at which size, or propose settings of NCCL
    Tune(tune::Args),
    /// Examine this machine: what it has, what works, and how to fix the rest
    Doctor(doctor::Args),
    /// Show what joins the GPUs and network adapters of this machine, as a matrix
    Topo(topo::Args),
    /// Say from the flight records of a job's ranks who is missing, who called something else, and who is late
    Trace(trace::Args),
    /// Show the running jobs of this user: what each rank does, and what is wrong with it
    Status(status::Args),
    /// Say what an error means and what to do about it
    Explain(explain::Args),
    /// The process in which `doctor` runs a probe
    #[command(name = probe::NAME, hide = true)]
    Probe(probe::Args),
    /// The process in which `generate` renders a chat template
    #[command(name = crate::render::NAME, hide = true)]
    Render,
    /// Show the settings
    #[command(subcommand, after_help = config::EXAMPLES)]
    Config(config::Command),
    /// Write completions for a shell to standard output
    #[command(after_help = COMPLETIONS)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, ryz.1 and one for each command, into a folder
    #[command(after_help = MAN)]
    Man {
        /// The folder, which must exist
        folder: PathBuf,
    },
}

const COMPLETIONS: &str = "Examples:
  ryz completions bash > ~/.local/share/bash-completion/completions/ryz
  ryz completions zsh > ~/.zfunc/_ryz";

const MAN: &str = "Examples:
  ryz man ~/.local/share/man/man1
  ryz man . && man ./ryz-launch.1";

/// Returns the commands, their flags and the help texts.
pub fn definition() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !catches_panics() {
            report(panic);
        }
    }));
    let Cli { screen, command } = parse();
    let is_supervisor = matches!(command, Command::Supervise(_));
    // Errors of these commands are explained by the report of our launcher, or by the doctor.
    let is_explained =
        matches!(command, Command::Probe(_)) || settings::environment().contains_key("RYZ_RENDEZVOUS");
    let outcome = match command {
        Command::Launch(args) => launch::run(&args, &screen),
        Command::Supervise(args) => launch::supervise(&args, &screen),
        Command::Check(args) => check::run(&args, &screen),
        Command::Generate(args) => generate::run(&args, &screen),
        Command::Bench(args) => bench::run(&args, &screen),
        Command::Plan(args) => plan::run(&args, &screen),
        Command::Tune(args) => tune::run(&args, &screen),
        Command::Doctor(args) => doctor::run(&args, &screen),
        Command::Topo(args) => Ok(topo::run(&args, &screen)),
        Command::Trace(args) => trace::run(&args, &screen),
        Command::Status(args) => status::run(&args, &screen),
        Command::Explain(args) => explain::run(&args, &screen),
        Command::Probe(args) => probe::run(&args),
        Command::Render => crate::render::serve(),
        Command::Config(command) => config::run(&command, &screen),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "ryz", &mut script);
            screen::print(&String::from_utf8_lossy(&script));
            Ok(0)
        }
        Command::Man { folder } => clap_mangen::generate_to(Cli::command(), &folder)
            .with_context(|| format!("cannot write manual pages into {}", folder.display()))
            .map(|()| 0),
    };
    match outcome {
        // An exit code is one byte.
        Ok(code) => {
            let Some(error) = screen::write_error() else {
                return ExitCode::from(u8::try_from(code).unwrap_or(1));
            };
            let label = screen.stderr().paint(Tone::Bad, "error:");
            screen::print_aside(&format!("{label} cannot write to standard output: {error}\n"));
            ExitCode::from(u8::try_from(code).unwrap_or(1).max(1))
        }
        Err(error) if rank::is_told_by_the_launcher() => ExitCode::from(exit_code(&error)),
        Err(error) => {
            let (screen, message) = (screen.stderr(), chain(error.as_ref()));
            let explanation = catalogue::explain(&message).filter(|_| !is_explained);
            let lines = explanation.map_or_else(String::new, |it| it.lines("cause", screen));
            let message = printable(&message);
            let text = format!("{} {message}\n{lines}", screen.paint(Tone::Bad, "error:"));
            if is_supervisor {
                console::stderr().say(&text);
                console::flush(launch::FLUSH);
            } else {
                screen::print_aside(&text);
            }
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Parses the command line of this process, with the spellings of other launchers.
fn parse() -> Cli {
    let adapted = |argument: clap::Arg| {
        // torchrun's flags have underscores too.
        let names = argument.get_long().into_iter().chain(argument.get_all_aliases().unwrap_or_default());
        let names = names.filter(|name| name.contains('-'));
        let aliases: Vec<String> = names.map(|name| name.replace('-', "_")).collect();
        // The error of a negative number names its flag.
        let is_value = argument.get_action().takes_values() && !argument.is_positional();
        let argument = if is_value { argument.allow_negative_numbers(true) } else { argument };
        argument.aliases(aliases)
    };
    let command = Cli::command().mut_subcommands(|command| command.mut_args(adapted));
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    // mpirun's flag would be read as `-n p`.
    if let [_, command, flag, ..] = arguments.as_mut_slice()
        && [launch::NAME, launch::SUPERVISE].iter().any(|name| *command == **name)
        && *flag == *"-np"
    {
        *flag = "-n".into();
    }
    let parsed = command.try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|mut error| {
        // It proposes to write a mistyped flag behind `--`, as a value.
        error.remove(ContextKind::Suggested);
        error.exit()
    })
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if is_wrong_use(error) { 2 } else { 1 }
}

/// Returns true if the same command would fail again.
fn is_wrong_use(error: &anyhow::Error) -> bool {
    use ryzanstein_process_group::Error;
    use ryzanstein_tensor_parallel::Error as ModelError;
    error.chain().any(|cause| {
        cause.is::<ConfigError>()
            || cause.is::<HubError>()
            || cause.downcast_ref().is_some_and(LaunchError::is_permanent)
            || matches!(
                cause.downcast_ref(),
                Some(TelemetryError::Filter { .. } | TelemetryError::Spans { .. })
            )
            || cause.downcast_ref().is_some_and(Error::is_permanent)
            || cause.downcast_ref().is_some_and(ModelError::is_permanent)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(command: &mut clap::Command) {
        let name = command.get_name().to_owned();
        for command in command.get_subcommands_mut() {
            // clap's own command has no examples.
            if command.is_hide_set() || command.get_name() == "help" {
                continue;
            }
            let help = command.render_help().to_string();
            let examples = help.split_once("\nExamples:\n").map_or("", |(_, examples)| examples);
            let count = examples.lines().filter(|line| line.contains("ryz ")).count();
            assert!(matches!(count, 2..=4), "{name} {}: {count} examples:\n{help}", command.get_name());
            check(command);
        }
    }

    #[test]
    fn the_help_of_every_command_ends_with_examples() {
        let mut command = Cli::command();
        command.build();
        check(&mut command);
    }
}
