//! `ryz status`

use ryzanstein_orchestrator::status::wire::Job;
use ryzanstein_orchestrator::status::{self, Client};

use crate::command::screen;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz status
  watch --color ryz status --color always
  ryz status --format json | jq '.jobs[].ranks[] | select(.state != \"running\")'";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The job: its number or its name, as the list of jobs shows them [default: the only one]
    job: Option<String>,
    /// Show a table, or one line of JSON
    #[arg(long, value_enum, default_value_t = screen::Format::Table)]
    format: screen::Format,
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let folder = status::folder(&settings::environment());
    let mut jobs = ask(&status::find(&folder)?);
    if let Some(wanted) = &args.job {
        jobs.retain(|job| job.pid.to_string() == *wanted || job.name == *wanted);
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
    screen::print(&match args.format {
        screen::Format::Json => status::json(&jobs) + "\n",
        screen::Format::Table => match jobs.as_slice() {
            [job] => status::table(job, screen.stdout()),
            jobs => status::list(jobs, screen.stdout()) + "`ryz status JOB` shows the ranks of one\n",
        },
    });
    Ok(0)
}

/// Asks the jobs. One that has ended is left out; one that does not answer is reported, and does not hide the others.
fn ask(clients: &[Client]) -> Vec<Job> {
    let answers = clients.iter().filter_map(|client| client.job().transpose());
    let reported =
        answers.map(|answer| answer.inspect_err(|error| screen::print_aside(&format!("warning: {error}\n"))));
    reported.filter_map(Result::ok).collect()
}
