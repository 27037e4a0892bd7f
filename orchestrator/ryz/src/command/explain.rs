//! `ryz explain`

use std::io;

use anyhow::Context as _;
use ryzanstein_orchestrator::catalogue;

use crate::command::screen;

const EXAMPLES: &str = "Examples:
  ryz explain 'NCCL WARN Call to ibv_create_qp failed'
  ryz explain - < job.log
  ryz explain --list";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// An error's message; `-` reads a log from standard input
    #[arg(value_name = "TEXT", required_unless_present = "list", num_args = 1..)]
    text: Vec<String>,
    /// List all known errors instead
    #[arg(long, conflicts_with = "text")]
    list: bool,
    /// Answer for people, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

/// Advice if nothing is known.
const UNKNOWN: &str = "no known error is in this text; `ryz explain --list` lists those that are known. Errors of NCCL say more \
                       with NCCL_DEBUG=WARN, ours with RYZ_LOG__LEVEL=debug, and `ryz doctor` examines this machine";

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let is_json = args.format == screen::Format::Json;
    if args.list {
        screen::print(&if is_json {
            catalogue::list_json() + "\n"
        } else {
            catalogue::list_table(screen.stdout())
        });
        return Ok(0);
    }
    let found = match args.text.as_slice() {
        [dash] if dash == "-" => catalogue::scan(io::stdin().lock()).context("cannot read standard input")?,
        words => catalogue::scan(words.join(" ").as_bytes())?,
    };
    if is_json {
        screen::print(&(catalogue::found_json(&found) + "\n"));
    } else if !found.is_empty() {
        screen::print(&catalogue::found_table(&found, screen.stdout()));
    }
    anyhow::ensure!(!found.is_empty(), UNKNOWN);
    Ok(0)
}
