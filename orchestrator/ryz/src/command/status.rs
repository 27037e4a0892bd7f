//! `ryz status`

use std::io::Write as _;
use std::time::Duration;

use ryzanstein_orchestrator::status::wire::Job;
use ryzanstein_orchestrator::status::{self, Client};

use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz status
  ryz status 4711 --once
  ryz status --format json | jq '.jobs[].ranks[] | select(.state != \"running\")'
  ryz status --watch 10 --format json >> status.jsonl";

/// Interval between two tables on a terminal.
const REFRESH: Duration = Duration::from_secs(1);

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The job: its number or its name, as the list of jobs shows them [default: the only one]
    job: Option<String>,
    /// Show the state once, also on a terminal
    #[arg(long, conflicts_with = "watch")]
    once: bool,
    /// Refresh every SECONDS, until the job ends [default: 1 on a terminal, once elsewhere]
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    watch: Option<Duration>,
    /// Show a table, or JSON: one line each time
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

/// Parses an interval from 0.1 s to a day.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.parse().map_err(|_| "expected a number of seconds, such as 2 or 0.5".to_owned())?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err("expected 0.1 to 86400 seconds".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let folder = status::folder(&settings::environment());
    let (mut clients, mut jobs) = ask(status::find(&folder)?);
    if let Some(wanted) = &args.job {
        let is_it = |job: &Job| job.pid.to_string() == *wanted || job.name == *wanted;
        (clients, jobs) = clients.into_iter().zip(jobs).filter(|(_, job)| is_it(job)).unzip();
    }
    if jobs.is_empty() {
        let wanted = args.job.as_ref().map_or_else(String::new, |job| format!(" `{job}`"));
        let user = rustix::process::geteuid().as_raw();
        anyhow::bail!(
            "no job{wanted} of user {user} runs on this host (sockets are looked for in {}); start one with `ryz launch`. \
             The status of a job on several nodes is on its first node; a launcher started with another XDG_RUNTIME_DIR \
             is found with the same one",
            folder.display()
        );
    }
    let is_live = screen::is_terminal() && args.format == screen::Format::Table;
    let every = if args.once { None } else { args.watch.or(is_live.then_some(REFRESH)) };
    let mut shown = Shown { is_live: is_live && every.is_some(), lines: 0 };
    loop {
        let text = match args.format {
            screen::Format::Json => status::json(&jobs) + "\n",
            screen::Format::Table => table(&jobs, shown.is_live, screen),
        };
        // A reader that stops early, such as `head`, is no error.
        if shown.replace(&text).is_err() {
            return Ok(0);
        }
        let Some(every) = every else { return Ok(0) };
        std::thread::sleep(every);
        (clients, jobs) = ask(clients);
        if jobs.is_empty() {
            if args.format == screen::Format::Table {
                screen::print("the job has ended\n");
            }
            return Ok(0);
        }
    }
}

/// Asks the jobs that have not ended. A job that does not answer is reported, and does not hide the others.
fn ask(clients: Vec<Client>) -> (Vec<Client>, Vec<Job>) {
    let (mut running, mut jobs) = (Vec::new(), Vec::new());
    for client in clients {
        match client.job() {
            Ok(Some(job)) => {
                running.push(client);
                jobs.push(job);
            }
            Ok(None) => {}
            Err(error) => eprintln!("warning: {error}"),
        }
    }
    (running, jobs)
}

fn table(jobs: &[Job], is_live: bool, screen: &screen::Args) -> String {
    // Output that exceeds the terminal cannot be redrawn.
    let height = screen::height().filter(|_| is_live).unwrap_or(usize::MAX);
    let text = match jobs {
        // The lines around the ranks, including some for troubles.
        [job] => status::table(job, height.saturating_sub(8).max(1), screen.stdout()),
        jobs => status::list(jobs, screen.stdout()) + "`ryz status JOB` shows the ranks of one\n",
    };
    text.split_inclusive('\n').take(height.saturating_sub(1).max(1)).collect()
}

/// The text on the screen.
struct Shown {
    is_live: bool,
    lines: usize,
}

impl Shown {
    /// Writes a text, on a terminal in place of the last one.
    fn replace(&mut self, text: &str) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.is_live && self.lines > 0 {
            // Move up to the first line, and clear everything below it.
            write!(out, "\x1b[{}A\x1b[J", self.lines)?;
        }
        self.lines = text.lines().count();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_number_of_seconds_within_reason() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "nan", "inf", "1e9", "soon"] {
            assert!(interval(wrong).is_err_and(|why| why.starts_with("expected")), "{wrong}");
        }
    }
}
