//! `ryz doctor`

use std::io::Write as _;

use anyhow::Context as _;
use ryzanstein_orchestrator::doctor::{self, ProbeCommand};

use crate::{probe, screen, settings};

const EXAMPLES: &str = "Examples:
  ryz doctor
  ryz doctor --format json";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    file: settings::ConfigFile,
    /// Report as a table, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let config = args.file.load(Vec::new())?;
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut arguments = vec![probe::NAME.into()];
    if let Some(file) = args.file.named() {
        arguments.extend(["--config".into(), file.into()]);
    }
    let probe_command = ProbeCommand { program: program.into(), arguments };
    let report = doctor::examine(&config, &settings::environment(), &probe_command);
    let text = match args.format {
        screen::Format::Table => report.table(screen.stdout()),
        screen::Format::Json => report.json() + "\n",
    };
    // A reader that stops early, such as `head`, is no error.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(report.exit_code())
}
