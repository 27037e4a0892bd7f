//! `ryz trace`

use std::path::PathBuf;

use crate::trace;
use anyhow::Context as _;

use crate::command::screen;

const EXAMPLES: &str = "Examples:
  ryz launch -n 4 --trace-dir records -- PROGRAM; ryz trace records
  ryz trace records --format json
  ryz trace records --out timeline.json";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The folder of the records: what `ryz launch --trace-dir` or profile.trace_dir named
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Report as a table, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
    /// Also write the calls to this file, as a timeline that Perfetto (ui.perfetto.dev) opens
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let files = trace::read(&args.folder)?;
    if let Some(path) = &args.out {
        let text = trace::timeline(&files.records).to_string();
        std::fs::write(path, text).with_context(|| format!("--out: cannot write {}", path.display()))?;
    }
    let report = trace::merge(&files);
    screen.show(args.format, &report, |screen| report.table(screen));
    Ok(0)
}
