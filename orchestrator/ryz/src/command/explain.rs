//! `ryz explain`

use std::io::{self, BufRead};

use anyhow::Context as _;
use ryzanstein_orchestrator::catalogue::{self, Found};

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

/// Number of bytes after which a log is taken to be endless, such as a device.
const LONGEST_LOG: u64 = 16 << 30;

/// Advice if nothing is known.
const UNKNOWN: &str = "no known error is in this text; `ryz explain --list` lists those that are known. Errors of NCCL say more \
                       with NCCL_DEBUG=WARN, ours with RYZ_LOG__LEVEL=debug, and `ryz doctor` examines this machine";

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    if args.list {
        screen.show(args.format, &catalogue::list_json(), catalogue::list_table);
        return Ok(0);
    }
    let found = match args.text.as_slice() {
        [dash] if dash == "-" => read(io::stdin().lock(), LONGEST_LOG)?,
        words => catalogue::scan(words.join(" ").as_bytes())?,
    };
    if args.format == screen::Format::Json || !found.is_empty() {
        screen.show(args.format, &catalogue::found_json(&found), |screen| {
            catalogue::found_table(&found, screen)
        });
    }
    anyhow::ensure!(!found.is_empty(), UNKNOWN);
    Ok(0)
}

/// Explains a log of less than `longest` bytes.
fn read(log: impl BufRead, longest: u64) -> anyhow::Result<Vec<Found>> {
    let mut log = log.take(longest);
    let found = catalogue::scan(&mut log).context("cannot read standard input")?;
    anyhow::ensure!(
        log.limit() > 0,
        "cannot read standard input: it does not end after {} MiB; give the end of the log: tail -c 64M LOG | ryz explain -",
        longest >> 20
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_refused() {
        let endless = io::BufReader::new(io::repeat(0));
        let error = read(endless, 8 << 20).expect_err("endless").to_string();
        assert!(error.contains("does not end after 8 MiB") && error.contains("tail -c"), "{error}");
        assert!(read(&b"nothing is wrong\n"[..], 18).expect("it ends").is_empty());
    }
}
