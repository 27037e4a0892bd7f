//! Runs a job: carries what happens to the decisions of [`core`](super::core), and carries out what they say.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getrlimit, kill_process_group, setrlimit, wait,
};
use ryzanstein_process_group::{Epoch, Rank};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::core::{Action, Core, Event, Exit, Outcome, Policy, signal as number};
use super::job::{Job, LaunchError};
use super::output::{self, Sink, Tail};
use super::rendezvous_host::RendezvousHost;
use super::report::{ClosingReport, Failure, RankExit, describe_exit};
use super::{descendants, spawn};
use crate::rendezvous::Server;

/// How long after the first failure the other ranks may end with an error of their own.
const EXIT_WINDOW: Duration = Duration::from_millis(500);
/// How long the launcher waits to pass on the last lines when its own output is stuck.
const DRAIN: Duration = Duration::from_secs(2);

/// Runs a job to its end, on this thread, which must live as long as the process: the kernel kills ranks when it ends.
///
/// SIGINT, SIGTERM and SIGHUP are passed on to the ranks. When `lifeline` ends, the job is killed. All children of this
/// process are reaped, so it must have none of its own: this is for a launcher's process, not for an embedded engine.
///
/// # Errors
/// [`LaunchError`] when the job could not begin. A job that failed is a report.
pub fn run(job: &Job, lifeline: Option<impl Read + Send + 'static>) -> Result<ClosingReport, LaunchError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| LaunchError::failed("no runtime", error))?;
    runtime.block_on(Supervisor::new(job)?.supervise(lifeline))
}

/// A rank's process.
struct Process {
    pid: Option<Pid>,
    exit: Option<Exit>,
    /// Why it could not be started.
    obstacle: Option<String>,
    stderr: Tail,
    readers: Vec<JoinHandle<()>>,
}

struct Supervisor<'a> {
    job: &'a Job,
    rendezvous: RendezvousHost,
    core: Core,
    started: Instant,
    processes: BTreeMap<Rank, Process>,
    epoch: Epoch,
    /// The limit on descriptors that ranks get: the launcher's own, before it was raised.
    descriptors: Rlimit,
    left_over: Vec<String>,
    /// Nobody is there any more to read what is left to say.
    abandoned: bool,
}

impl<'a> Supervisor<'a> {
    fn new(job: &'a Job) -> Result<Self, LaunchError> {
        let ranks: Vec<Rank> = job.ranks()?.map(Rank).collect();
        // Orphans become children of the subreaper nearest above them, so that none is lost sight of.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| LaunchError::failed("cannot become the parent of orphans", error))?;
        // Each rank takes two pipes and a connection, and strangers take some.
        let descriptors = getrlimit(Resource::Nofile);
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit { current: descriptors.maximum, maximum: descriptors.maximum },
        );
        for rank in &ranks {
            if let Some(folder) = job.log_folder(*rank) {
                std::fs::create_dir_all(&folder).map_err(|error| {
                    LaunchError::Failed(format!("--log-dir: cannot create {}: {error}", folder.display()))
                })?;
            }
        }
        let policy = Policy {
            grace: job.config.launch.grace,
            exit_window: EXIT_WINDOW,
            max_restarts: job.config.launch.max_restarts,
        };
        Ok(Self {
            job,
            rendezvous: RendezvousHost::new(job)?,
            core: Core::new(ranks, policy),
            started: Instant::now(),
            processes: BTreeMap::new(),
            epoch: Epoch(1),
            descriptors,
            left_over: Vec::new(),
            abandoned: false,
        })
    }

    async fn supervise(
        mut self,
        lifeline: Option<impl Read + Send + 'static>,
    ) -> Result<ClosingReport, LaunchError> {
        let listen =
            |kind| signal(kind).map_err(|error| LaunchError::failed("cannot listen to signals", error));
        let mut child = listen(SignalKind::child())?;
        let mut interrupt = listen(SignalKind::interrupt())?;
        let mut terminate = listen(SignalKind::terminate())?;
        let mut hangup = listen(SignalKind::hangup())?;
        let mut abandoned = watch(lifeline);

        let mut todo = vec![self.core.start()];
        loop {
            while !todo.is_empty() {
                let mut next = Vec::new();
                for action in todo {
                    if let Action::Finish(outcome) = action {
                        return Ok(self.finish(&outcome));
                    }
                    next.extend(self.act(&action));
                }
                todo = next;
            }
            let due = self.core.next_deadline().map(|time| self.started + time);
            let event = tokio::select! {
                // Ends of ranks first: a signal sent to all at once is not to hide them.
                biased;
                _ = child.recv() => None,
                _ = interrupt.recv() => Some(Event::Interrupted(number::INTERRUPT)),
                _ = terminate.recv() => Some(Event::Interrupted(number::TERMINATE)),
                _ = hangup.recv() => Some(Event::Interrupted(number::HANGUP)),
                () = &mut abandoned => Some(Event::LifelineClosed),
                () = until(due) => Some(Event::Tick),
            };
            if matches!(event, Some(Event::LifelineClosed)) {
                self.abandoned = true;
                abandoned = watch(None::<io::Empty>);
            }
            let now = self.started.elapsed();
            todo = match event {
                Some(event) => self.core.handle(now, event),
                None => self.reap(now),
            };
        }
    }

    /// Collects every process that ended, orphans included, and hands on which of them were ranks.
    fn reap(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let Some(exit) = exit(status) else { continue };
            let Some((rank, process)) =
                self.processes.iter_mut().find(|(_, process)| process.pid == Some(pid))
            else {
                continue;
            };
            if process.exit.replace(exit).is_some() {
                continue;
            }
            let (rank, server) = (*rank, self.rendezvous.server.as_ref());
            if let Some(server) = server.filter(|_| exit.is_success()) {
                server.left(rank, "exited with code 0");
            }
            let secondary =
                server.and_then(|s| s.report(rank)).is_some_and(|report| report.caused_by.is_some());
            actions.extend(self.core.handle(now, Event::Exited { rank, exit, secondary }));
        }
        actions
    }

    fn act(&mut self, action: &Action) -> Vec<Action> {
        match *action {
            Action::Start(epoch) => return self.start(epoch),
            Action::Announce(rank) => {
                if let Some(server) = &self.rendezvous.server {
                    server.fail(&self.describe(rank));
                }
            }
            Action::Signal(number) => {
                for process in self.processes.values().filter(|process| process.exit.is_none()) {
                    // Not reaped yet, so its number is still its own.
                    if let (Some(pid), Some(signal)) = (process.pid, Signal::from_named_raw(number)) {
                        let _ = kill_process_group(pid, signal);
                    }
                }
            }
            Action::Kill => descendants::kill(),
            Action::Finish(_) => unreachable!("handled by the caller"),
        }
        Vec::new()
    }

    fn start(&mut self, epoch: Epoch) -> Vec<Action> {
        if epoch > self.epoch {
            eprint!("{}", self.restart_notice(epoch));
            self.end_leftovers();
            if let Some(server) = &self.rendezvous.server {
                server.advance(epoch);
            }
        }
        self.epoch = epoch;
        self.processes.clear();
        let mut actions = Vec::new();
        for rank in self.job.ranks().unwrap_or_default().map(Rank) {
            let process = self.spawn(rank).unwrap_or_else(|error| Process {
                pid: None,
                exit: Some(Exit::NotStarted),
                obstacle: Some(format!("cannot run `{}`: {error}", self.job.program.display())),
                stderr: Tail::default(),
                readers: Vec::new(),
            });
            let failed = process.pid.is_none();
            self.processes.insert(rank, process);
            if failed {
                let event = Event::Exited { rank, exit: Exit::NotStarted, secondary: false };
                actions.extend(self.core.handle(self.started.elapsed(), event));
            }
        }
        actions
    }

    fn spawn(&self, rank: Rank) -> io::Result<Process> {
        let ranks = self.job.ranks().unwrap_or_default();
        let mut command = Command::new(&self.job.program);
        command
            .args(&self.job.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .envs(self.job.environment.iter().map(|(name, value)| (name, value)))
            .env_remove("RYZ_SECRET_FILE")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.job.world_size().unwrap_or_default().to_string())
            .env("LOCAL_RANK", (rank.0 - ranks.start).to_string())
            .env("LOCAL_WORLD_SIZE", ranks.len().to_string())
            .env("GROUP_RANK", self.job.config.launch.node_rank.to_string())
            .env("MASTER_ADDR", self.rendezvous.address.host())
            .env("MASTER_PORT", self.rendezvous.master_port.to_string())
            .env("RYZ_RENDEZVOUS", self.rendezvous.address.to_string())
            .env("RYZ_EPOCH", self.epoch.to_string())
            .env("RYZ_SECRET_FD", spawn::number(&self.rendezvous.secret).to_string());
        let log = |name: &str| -> io::Result<Option<File>> {
            let Some(folder) = self.job.log_folder(rank) else { return Ok(None) };
            let mut how = OpenOptions::new();
            // A new job starts a new log; a new epoch of it goes on.
            if self.epoch.0 > 1 {
                how.append(true)
            } else {
                how.write(true).truncate(true)
            };
            how.create(true).open(folder.join(name)).map(Some)
        };
        let (out_log, err_log) = (log("stdout.log")?, log("stderr.log")?);
        let mut child = spawn::spawn(&mut command, Arc::clone(&self.rendezvous.secret), self.descriptors)?;
        let pid = Pid::from_child(&child);
        let mut readers = Vec::new();
        if let Some(stream) = child.stdout.take() {
            let to = if self.job.bare_stdout { Sink::BareStdout } else { Sink::Stdout };
            readers.push(output::forward(rank, stream, to, out_log)?.1);
        }
        let mut stderr = Tail::default();
        if let Some(stream) = child.stderr.take() {
            let (tail, reader) = output::forward(rank, stream, Sink::Stderr, err_log)?;
            readers.push(reader);
            stderr = tail;
        }
        Ok(Process { pid: Some(pid), exit: None, obstacle: None, stderr, readers })
    }

    /// Ends whatever ranks left behind, and reads their last words.
    fn end_leftovers(&mut self) {
        let processes = &mut self.processes;
        self.left_over = descendants::sweep(|pid, status| {
            for process in processes.values_mut().filter(|process| process.pid == Some(pid)) {
                process.exit = process.exit.or(exit(status));
            }
        });
        let readers =
            self.processes.values_mut().flat_map(|process| std::mem::take(&mut process.readers)).collect();
        output::drain(readers, if self.abandoned { Duration::from_millis(200) } else { DRAIN });
    }

    fn finish(mut self, outcome: &Outcome) -> ClosingReport {
        self.end_leftovers();
        let ranks = self.processes.iter().map(|(rank, process)| {
            let (exit_code, signal) = parts(process.exit);
            RankExit { rank: rank.0, pid: process.pid.map(raw), exit_code, signal }
        });
        ClosingReport {
            status: if outcome.exit_code == 0 { "ok" } else { "failed" },
            epoch: outcome.epoch.0,
            ranks: ranks.collect(),
            first_failure: outcome.first_failure.map(|(rank, exit)| self.failure(rank, exit)),
            exit_code: outcome.exit_code,
            interrupted: outcome.interrupted,
            left_over: self.left_over,
        }
    }

    fn failure(&self, rank: Rank, exit: Exit) -> Failure {
        let server = self.rendezvous.server.as_ref();
        let report = server.and_then(|server| server.report(rank));
        let process = self.processes.get(&rank);
        let words = process.map(|process| stderr_tail(&process.stderr)).filter(|text| !text.is_empty());
        let (exit_code, signal) = parts(Some(exit));
        let (cause, last_call) = match report {
            Some(report) => (Some(report.cause), report.last_call),
            None => (process.and_then(|process| process.obstacle.clone()).or(words), None),
        };
        Failure {
            rank: rank.0,
            host: crate::host_name(),
            pid: process.and_then(|process| process.pid).map(raw),
            exit_code,
            signal,
            cause: cause.unwrap_or_else(|| {
                format!("it {} and wrote nothing to stderr", describe_exit(exit_code, signal))
            }),
            last_call,
            joined: server.is_some_and(Server::joined),
        }
    }

    fn describe(&self, rank: Rank) -> String {
        let process = self.processes.get(&rank);
        let (exit_code, signal) = parts(process.and_then(|process| process.exit));
        let pid = process.and_then(|process| process.pid).map_or(0, raw);
        format!("rank {rank} (host {}, pid {pid}) {}", crate::host_name(), describe_exit(exit_code, signal))
    }

    fn restart_notice(&self, epoch: Epoch) -> String {
        // The core has forgotten who it was: the processes have not.
        let failed: Vec<_> = self
            .processes
            .iter()
            .filter(|(_, process)| process.exit.is_some_and(|exit| !exit.is_success()))
            .map(|(rank, _)| self.describe(*rank))
            .collect();
        let most = self.job.config.launch.max_restarts;
        format!("ryz: {}; restart {} of {most}, as epoch {epoch}\n", failed.join("; "), epoch.0 - 1)
    }
}

/// What a process wrote last. That it is an error need not be said under `cause:`.
fn stderr_tail(stderr: &Tail) -> String {
    let text = output::text(stderr);
    text.strip_prefix("error: ").map(str::to_owned).unwrap_or(text)
}

/// Resolves when the lifeline ends; never, if there is none.
fn watch(lifeline: Option<impl Read + Send + 'static>) -> std::pin::Pin<Box<dyn Future<Output = ()>>> {
    let Some(mut lifeline) = lifeline else { return Box::pin(std::future::pending()) };
    let (ended, end) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = io::copy(&mut lifeline, &mut io::sink());
        let _ = ended.send(());
    });
    Box::pin(async move { drop(end.await) })
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

pub(super) fn exit(status: WaitStatus) -> Option<Exit> {
    status.exit_status().map(Exit::Code).or_else(|| status.terminating_signal().map(Exit::Signal))
}

fn parts(exit: Option<Exit>) -> (Option<i32>, Option<i32>) {
    match exit {
        Some(Exit::Code(code)) => (Some(code), None),
        Some(Exit::Signal(signal)) => (None, Some(signal)),
        Some(Exit::NotStarted) | None => (None, None),
    }
}

fn raw(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}
