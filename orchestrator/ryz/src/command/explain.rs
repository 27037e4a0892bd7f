//! `ryz explain`

use std::io::{self, Read};

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
    /// An error's message; `-` reads a log from standard input (of a very long one, the end)
    #[arg(value_name = "TEXT", required_unless_present = "list", num_args = 1..)]
    text: Vec<String>,
    /// List all known errors instead
    #[arg(long, conflicts_with = "text")]
    list: bool,
    /// Answer for people, or as one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

/// Maximum number of bytes of a log that are explained.
const MOST_BYTES: usize = 64 << 20;

/// Number of bytes after which a log is taken to be endless, such as a device.
const LONGEST_LOG: u64 = 16 << 30;

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
        [dash] if dash == "-" => {
            let log = read_end(io::stdin().lock(), MOST_BYTES, LONGEST_LOG)
                .context("cannot read standard input")?;
            if log.skipped_bytes > 0 {
                eprintln!(
                    "ryz: the log is longer than {} MiB: its first {} bytes ({} lines) are skipped",
                    MOST_BYTES >> 20,
                    log.skipped_bytes,
                    log.skipped_lines
                );
            }
            let lines = log.end.split(|byte| *byte == b'\n');
            let mut found = catalogue::scan(lines.map(|line| String::from_utf8_lossy(line).into_owned()));
            for found in &mut found {
                found.line += log.skipped_lines;
            }
            found
        }
        words => catalogue::scan(words.join(" ").lines().map(str::to_owned)),
    };
    if is_json {
        screen::print(&(catalogue::found_json(&found) + "\n"));
    } else if !found.is_empty() {
        screen::print(&catalogue::found_table(&found, screen.stdout()));
    }
    anyhow::ensure!(!found.is_empty(), UNKNOWN);
    Ok(0)
}

/// The end of a log.
#[derive(PartialEq, Eq, Debug)]
struct LogEnd {
    end: Vec<u8>,
    skipped_bytes: u64,
    skipped_lines: usize,
}

/// Reads the last whole lines of a log, at most `most` bytes of it, and holds a small multiple of that in memory. Refuses a log of
/// more than about `longest` bytes.
fn read_end(mut log: impl Read, most: usize, longest: u64) -> io::Result<LogEnd> {
    let mut read = LogEnd { end: Vec::new(), skipped_bytes: 0, skipped_lines: 0 };
    loop {
        let room = 2 * most - read.end.len();
        let count = (&mut log).take(room as u64).read_to_end(&mut read.end)?;
        read.skip(read.end.len().saturating_sub(most));
        if count < room {
            break;
        }
        if read.skipped_bytes > longest {
            return Err(io::Error::other(format!(
                "it does not end after {} MiB; give the end of the log: tail -c 64M LOG | ryz explain -",
                longest >> 20
            )));
        }
    }
    if read.skipped_bytes > 0 {
        // The first line may have lost its beginning; a line that is longer than all of this stays.
        let line = read.end.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        read.skip(if line < read.end.len() { line } else { 0 });
    }
    Ok(read)
}

impl LogEnd {
    /// Forgets the first bytes.
    fn skip(&mut self, bytes: usize) {
        let skipped = self.end.drain(..bytes);
        self.skipped_lines += skipped.filter(|byte| *byte == b'\n').count();
        self.skipped_bytes += bytes as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(log: &[u8], most: usize) -> (Vec<u8>, u64, usize) {
        let LogEnd { end, skipped_bytes, skipped_lines } = read_end(log, most, u64::MAX).expect("read");
        (end, skipped_bytes, skipped_lines)
    }

    #[test]
    fn of_a_long_log_the_last_whole_lines_are_read() {
        assert_eq!(end(b"", 8), (vec![], 0, 0));
        assert_eq!(end(b"one\ntwo\n", 8), (b"one\ntwo\n".to_vec(), 0, 0));
        assert_eq!(end(b"one\ntwo\nthree\n", 8), (b"three\n".to_vec(), 8, 2));
        assert_eq!(end(b"a line that is too long\n", 8), (b"oo long\n".to_vec(), 16, 0));
    }

    #[test]
    fn what_never_ends_is_refused() {
        let error = read_end(io::repeat(0), 1 << 20, 64 << 20).expect_err("endless").to_string();
        assert!(error.contains("does not end after 64 MiB") && error.contains("tail -c"), "{error}");
    }

    #[test]
    fn any_amount_is_read_in_bounded_memory() {
        let line = b"nothing is wrong\n";
        let log = io::repeat(b'\n').take(1 << 22).chain(&line[..]);
        let log = read_end(log, 1 << 10, u64::MAX).expect("read");
        assert!(log.end.capacity() <= 4 << 10, "{}", log.end.capacity());
        assert!(log.end.ends_with(line) && log.end.len() <= 1 << 10);
        assert_eq!(log.skipped_bytes, (1 << 22) + line.len() as u64 - log.end.len() as u64);
        assert_eq!(log.skipped_lines as u64, log.skipped_bytes);
    }
}
