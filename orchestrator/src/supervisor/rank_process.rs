//! The process of one rank: its start, and its state.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, WaitStatus};
use ryzanstein_process_group::{Epoch, Rank};
use tokio::task::JoinHandle;

use super::core::Exit;
use super::job::{Job, RankOutput};
use super::output::{self, Log, Output, Sink, Tail};
use super::rendezvous_host::RendezvousHost;
use super::spawn::{self, Resources};
use crate::console::{self, Stream, Writer};

/// A rank's process.
#[derive(Default)]
pub(super) struct RankProcess {
    pub(super) pid: Option<Pid>,
    pub(super) exit: Option<Exit>,
    /// The reason why it could not be started.
    pub(super) spawn_error: Option<String>,
    /// The ends of its standard output and standard error.
    tails: [Tail; 2],
    /// The tasks that forward its output.
    pub(super) readers: Vec<JoinHandle<()>>,
}

impl RankProcess {
    /// Starts the job's program as this rank. `logs` are those of its standard output and standard error.
    pub(super) fn spawn(
        job: &Job,
        rendezvous: &RendezvousHost,
        output: &Output,
        rank: Rank,
        epoch: Epoch,
        logs: [Option<Log>; 2],
        resources: Resources,
    ) -> io::Result<Self> {
        let mut command = command(job, rendezvous, rank, epoch);
        let is_direct = job.output == RankOutput::Direct && rank.0 == 0;
        // With a log, its output passes through this process.
        let [out_log, err_log] = logs;
        let inherits_output = is_direct && out_log.is_none();
        if inherits_output {
            command.stdout(Stdio::inherit());
        }
        let inherits_error = is_direct && err_log.is_none() && io::stderr().is_terminal();
        if inherits_error {
            command.stderr(Stdio::inherit());
        }
        let mut child = spawn::spawn(
            &mut command,
            Arc::clone(&rendezvous.secret),
            resources,
            inherits_output || inherits_error,
        )?;
        let pid = Pid::from_child(&child);
        let sink = |stream: &Stream, number: usize| {
            if job.output != RankOutput::Direct && !job.config.launch.show_ranks.includes(rank.0) {
                return None;
            }
            let color = match job.output {
                RankOutput::Direct if is_direct && number == 0 => {
                    return Some(Sink { stream: stream.clone(), writer: None });
                }
                RankOutput::Direct => false,
                RankOutput::Prefixed { stdout, stderr } => [stdout, stderr][number],
            };
            let writer = Writer { id: 2 * rank.index() + number, prefix: prefix(rank, color) };
            Some(Sink { stream: stream.clone(), writer: Some(writer) })
        };
        let forward = |stream: Option<OwnedFd>, to: Option<Sink>, log: Option<Log>| {
            stream.map(|stream| output.forward(stream, to, log)).transpose()
        };
        let stdout = forward(child.stdout.take().map(Into::into), sink(console::stdout(), 0), out_log)?;
        let stderr = forward(child.stderr.take().map(Into::into), sink(console::stderr(), 1), err_log)?;
        let mut process = Self { pid: Some(pid), ..Self::default() };
        for (stream, tail) in [stdout, stderr].into_iter().zip(&mut process.tails) {
            if let Some((kept, reader)) = stream {
                *tail = kept;
                process.readers.push(reader);
            }
        }
        Ok(process)
    }

    /// Returns the state of a rank whose process could not be started.
    pub(super) fn not_started(error: String) -> Self {
        Self { exit: Some(Exit::NotStarted), spawn_error: Some(error), ..Self::default() }
    }

    /// Returns the end of what it wrote to stderr, or else to stdout.
    pub(super) fn last_output(&self) -> Option<String> {
        let [stdout, stderr] = &self.tails;
        [stderr, stdout].into_iter().map(output::text).find(|text| !text.trim().is_empty())
    }
}

/// Returns the prefix of the lines of a rank; with colours, neighbouring ranks have different ones.
fn prefix(rank: Rank, color: bool) -> String {
    const COLORS: [u8; 6] = [36, 35, 34, 32, 33, 31];
    let code = COLORS[rank.index() % COLORS.len()];
    if color { format!("\x1b[{code}m[rank {rank}]\x1b[0m ") } else { format!("[rank {rank}] ") }
}

/// Settings of glibc's allocator: the number of free bytes that it keeps, and the size up to which arrays are among them. By
/// default it returns a prompt's activations to the system after each layer, which clears their pages for the next one.
/// Larger arrays, such as weights, are still returned immediately. Other allocators ignore both.
const ALLOCATOR: [(&str, &str); 2] =
    [("MALLOC_TRIM_THRESHOLD_", "268435456"), ("MALLOC_MMAP_THRESHOLD_", "33554432")];

fn command(job: &Job, rendezvous: &RendezvousHost, rank: Rank, epoch: Epoch) -> Command {
    let ranks = job.ranks().unwrap_or_default();
    let mut command = Command::new(&job.program);
    let has_choice = ALLOCATOR.iter().any(|(name, _)| std::env::var_os(name).is_some());
    if !has_choice {
        command.envs(ALLOCATOR);
    }
    if job.output == RankOutput::Direct {
        // The launcher tells the errors that such ranks report.
        command.env("RYZ_DIRECT", "1");
    }
    // Python would buffer what a rank prints into a pipe.
    if std::env::var_os("PYTHONUNBUFFERED").is_none() {
        command.env("PYTHONUNBUFFERED", "1");
    }
    command
        .args(&job.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .envs(job.environment.iter().map(|(name, value)| (name, value)))
        .env_remove("RYZ_SECRET_FILE")
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", job.world_size().unwrap_or_default().to_string())
        .env("LOCAL_RANK", (rank.0 - ranks.start).to_string())
        .env("LOCAL_WORLD_SIZE", ranks.len().to_string())
        .env("GROUP_RANK", job.config.launch.node_rank.to_string())
        .env("GROUP_WORLD_SIZE", job.config.launch.nnodes.to_string())
        // As torchrun names them.
        .env("TORCHELASTIC_RUN_ID", &job.config.job.name)
        .env("TORCHELASTIC_RESTART_COUNT", epoch.0.saturating_sub(1).to_string())
        .env("TORCHELASTIC_MAX_RESTARTS", job.config.launch.max_restarts.to_string())
        .env("MASTER_ADDR", rendezvous.address.host())
        .env("MASTER_PORT", rendezvous.master_port.to_string())
        .env("RYZ_RENDEZVOUS", rendezvous.address.to_string())
        .env("RYZ_EPOCH", epoch.to_string())
        .env("RYZ_SECRET_FD", spawn::number(&rendezvous.secret).to_string());
    command
}

/// Returns the exit of a process that was waited for; `None` if it only stopped or continued.
pub(super) fn exit(status: WaitStatus) -> Option<Exit> {
    status.exit_status().map(Exit::Code).or_else(|| status.terminating_signal().map(Exit::Signal))
}

/// Returns the rank whose process this is. The kernel may give the process id of a reaped rank to another process.
pub(super) fn running(
    processes: &mut BTreeMap<Rank, RankProcess>,
    pid: Pid,
) -> Option<(Rank, &mut RankProcess)> {
    let found = processes.iter_mut().find(|(_, process)| process.pid == Some(pid) && process.exit.is_none());
    found.map(|(rank, process)| (*rank, process))
}

/// Returns a process id as the reports write it.
pub(super) fn raw(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_id_that_is_used_again_is_not_that_of_the_rank() {
        let pid = Pid::from_raw(7);
        let rank = RankProcess { pid, ..RankProcess::default() };
        let mut processes = BTreeMap::from([(Rank(0), RankProcess::default()), (Rank(1), rank)]);
        let pid = pid.expect("a pid");
        let (rank, process) = running(&mut processes, pid).expect("it runs");
        assert_eq!(rank, Rank(1));
        process.exit = Some(Exit::Code(0));
        assert!(running(&mut processes, pid).is_none());
    }
}
