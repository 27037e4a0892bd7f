//! The closing report of a job: the root cause first.

use std::fmt;
use std::num::NonZeroUsize;

use serde::Serialize;

use crate::catalogue::{self, Explanation};
use crate::plural;
use crate::table::{self, Screen, Tone};

/// The end of a job, as `ryz launch` reports it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ClosingReport {
    /// `ok` or `failed`.
    pub status: &'static str,
    /// The last epoch.
    pub epoch: u64,
    /// The rank that failed first, if one failed.
    pub first_failure: Option<Failure>,
    /// The reason why this node lost the others, if it did.
    pub cut_off: Option<String>,
    /// Every rank that ran on this node, in the last epoch.
    pub ranks: Vec<RankExit>,
    /// The number of ranks on all nodes.
    #[serde(skip)]
    pub world_size: u32,
    /// The launcher's exit code.
    #[serde(skip)]
    pub exit_code: i32,
    /// The signal that asked the job to end.
    #[serde(skip)]
    pub interrupted: Option<i32>,
    /// The logs that could not be written to their end, and the reasons.
    #[serde(skip)]
    pub unwritten: Vec<String>,
    /// Descriptions of processes that could not be killed.
    #[serde(skip)]
    pub left_over: Vec<String>,
    /// True if the end of the output of ranks is lost. Then the launcher does not exit with code 0.
    #[serde(skip)]
    pub output_lost: bool,
}

/// The first failure.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Failure {
    /// The rank.
    pub rank: u32,
    /// Name of its host.
    pub host: String,
    /// Its process id; `None` if it could not be started.
    pub pid: Option<u32>,
    /// Its exit code, if it exited by itself.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if one did before the supervisor sent any.
    pub signal: Option<i32>,
    /// Its own error, or the lines at the end of its output that tell most; if others failed because of it, that it is stopped, or
    /// what one of them reported or wrote.
    pub cause: String,
    /// The end of its output, if it is not the cause.
    pub last_output: Option<String>,
    /// The state of its process when the first other rank failed, if it was still there.
    pub state: Option<String>,
    /// True if it exited with code 0 while others needed it.
    #[serde(skip)]
    pub others_ran: bool,
    /// The explanation of this cause, as far as it does not explain itself.
    pub explanation: Option<Explanation>,
    /// The last collective of the rank, as it reported it, or else a rank that failed because of it.
    pub last_call: Option<String>,
    /// True if the rank has reported its error itself.
    #[serde(skip)]
    pub is_reported: bool,
    /// True if all ranks had joined at this node's rendezvous. A program that never joins has no collectives to report.
    #[serde(skip)]
    pub joined: bool,
}

/// The exit of a rank.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankExit {
    /// The rank.
    pub rank: u32,
    /// Its process id.
    pub pid: Option<u32>,
    /// Its exit code, if it exited.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if it did not exit.
    pub signal: Option<i32>,
}

impl ClosingReport {
    /// Formats the report for people.
    pub fn text(&self, screen: Screen) -> String {
        let text = self.to_string();
        let (head, rest) = text.split_once('\n').unwrap_or((&text, ""));
        let tone = if self.exit_code == 0 { Tone::Good } else { Tone::Bad };
        format!("{}\n{rest}", screen.paint(tone, head))
    }

    /// Formats the report as one line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| unreachable!("a report is always JSON: {error}"))
    }
}

impl Failure {
    /// Returns the rank and its exit: `rank 1 (host node0, pid 7) exited with code 3`.
    fn subject(&self) -> String {
        let Self { rank, host, pid, .. } = self;
        let id = pid.map_or_else(String::new, |pid| format!(", pid {pid}"));
        let ended = describe_exit(*pid, self.exit_code, self.signal);
        let others = if self.others_ran { " while other ranks needed it" } else { "" };
        format!("rank {rank} (host {host}{id}) {ended}{others}")
    }

    /// Formats the failure as the error of a command.
    pub fn error(&self, screen: Screen) -> String {
        let explanation = self.explanation.map_or_else(String::new, |it| it.lines("cause", screen));
        let error = table::wrap(&format!("{} {}", screen.paint(Tone::Bad, "error:"), self.cause), 2, screen);
        format!("{error}\n{explanation}")
    }

    /// Returns the failure in one line.
    pub(super) fn line(&self) -> String {
        let ended = format!("it {}", describe_exit(self.pid, self.exit_code, self.signal));
        let line = catalogue::telling_lines(self.cause.lines(), NonZeroUsize::MIN);
        let line = line.first().copied().unwrap_or_default();
        if self.cause.starts_with(&ended) {
            return self.subject();
        }
        format!("{}: {line}", self.subject())
    }
}

/// Returns the name of a signal between `before` and `after`; empty for a real-time signal, which has none.
pub(super) fn signal_name(signal: i32, before: &str, after: &str) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| String::new(), |signal| format!("{before}{}{after}", signal.as_str()))
}

/// Describes an exit: `exited with code 7`, `was killed by signal 9 (SIGKILL)`.
pub(super) fn describe_exit(pid: Option<u32>, exit_code: Option<i32>, signal: Option<i32>) -> String {
    match (exit_code, signal) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}{}", signal_name(signal, " (", ")")),
        (None, None) if pid.is_some() => "did not exit by itself".into(),
        (None, None) => "could not be started".into(),
    }
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, describe_exit(self.pid, self.exit_code, self.signal))
    }
}

impl fmt::Display for ClosingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.epoch;
        match (&self.first_failure, self.interrupted) {
            (Some(failure), _) => {
                let Failure { rank, cause, explanation, last_call, joined, .. } = failure;
                writeln!(f, "ryz: the job failed in epoch {epoch}")?;
                writeln!(f, "  first failure: {}", failure.subject())?;
                writeln!(f, "  cause: {}", cause.replace('\n', "\n         "))?;
                if let Some(state) = &failure.state {
                    writeln!(f, "  meanwhile: {state}")?;
                }
                if let Some(explanation) = explanation {
                    write!(f, "{}", explanation.lines("explanation", Screen::PLAIN))?;
                }
                if let Some(output) = &failure.last_output {
                    writeln!(f, "  last output: {}", output.replace('\n', "\n               "))?;
                }
                if last_call.is_some() || *joined {
                    writeln!(f, "  last collective: {}", last_call.as_deref().unwrap_or("none reported"))?;
                }
                for end in self.ranks.iter().filter(|end| end.rank != *rank) {
                    writeln!(f, "  then: {end}")?;
                }
            }
            (None, Some(signal)) => {
                writeln!(f, "ryz: the job was ended by signal {signal}{}", signal_name(signal, " (", ")"))?;
                for end in &self.ranks {
                    writeln!(f, "  {end}")?;
                }
            }
            (None, None) if self.exit_code != 0 => {
                writeln!(f, "ryz: the job failed in epoch {epoch}")?;
                writeln!(
                    f,
                    "  cause: {}",
                    self.cut_off.as_deref().unwrap_or("lost contact with another node")
                )?;
                for end in &self.ranks {
                    writeln!(f, "  then: {end}")?;
                }
            }
            (None, None) => {
                let again = if epoch > 1 { format!(", in epoch {epoch}") } else { String::new() };
                let (here, all) = (self.ranks.len(), self.world_size as usize);
                let ranks = plural(all, "rank");
                if here < all {
                    writeln!(f, "ryz: this node's {here} of {ranks} ended well{again}")?;
                } else {
                    let every = if all == 1 { "" } else { "all " };
                    writeln!(f, "ryz: {every}{ranks} ended well{again}")?;
                }
            }
        }
        for log in &self.unwritten {
            writeln!(f, "  {log}")?;
        }
        for process in &self.left_over {
            writeln!(f, "  could not be killed: {process}")?;
        }
        Ok(())
    }
}
