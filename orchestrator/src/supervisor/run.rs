//! Runs a job: feeds events to [`core`](super::core) and carries out its actions.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process_group, setrlimit, wait,
};
use rustix::thread::CpuSet;
use ryzanstein_process_group::{Epoch, Rank, units};
use tokio::sync::oneshot;

use super::affinity;
use super::core::{Action, Core, Event, Exit, FirstFailure, Origin, Outcome, Policy, signal as number};
use super::descendants;
use super::health::{Heartbeat, Notice, Process, Seen, Trouble, Watch};
use super::job::{Job, LaunchError};
use super::launcher::{FILE_TOO_LARGE, FOR_RANKS, Signals, TO_END};
use super::node_heartbeat::{self, NodeHeartbeat, NodeNotice, Nodes};
use super::output::{self, Log, Output};
use super::proc;
use super::rank_process::{RankProcess, exit, raw, running};
use super::rendezvous_host::RendezvousHost;
use super::report::{ClosingReport, Failure, RankExit, describe_exit, signal_name};
use super::spawn::Resources;
use crate::rendezvous::Server;
use crate::rendezvous::core::Report;
use crate::status::{self, Endpoint, Question, wire};
use crate::table::{Screen, printable, wrap};
use crate::{catalogue, console, heartbeat};

/// Time after the first failure in which the other ranks may exit with an error of their own.
const EXIT_WINDOW: Duration = Duration::from_millis(500);
/// Timeout for the last lines of output when the launcher's own output is blocked.
const DRAIN: Duration = Duration::from_secs(2);

/// Maximum time to read the last lines of a rank that has failed, which may tell why.
const LAST_LINES: Duration = Duration::from_millis(100);

/// Interval at which the supervisor examines the reports of ranks.
const LOOK: Duration = Duration::from_millis(500);

/// Runs a job to its end, on this thread, which must live as long as the process: the kernel kills ranks when it ends.
///
/// SIGINT, SIGTERM and SIGHUP are forwarded to the ranks. When `lifeline` closes, the job is killed. All children of this
/// process are reaped, so it must have no others: this is for a launcher's process, not for an embedding engine. Output and
/// messages go to [`console`]: write nothing past it, and [flush](console::flush) it before you exit.
///
/// # Errors
/// [`LaunchError`] when the job could not start. A job that started and failed is a report.
pub fn run(job: &Job, lifeline: Option<impl Read + Send + 'static>) -> Result<ClosingReport, LaunchError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(LaunchError::system("no runtime"))?;
    runtime.block_on(async {
        // First, because these signals would end this process. Others end a start that hangs.
        let passed_on =
            Signals::listen(FOR_RANKS).map_err(LaunchError::system("cannot listen to signals"))?;
        Supervisor::new(job)?.supervise(lifeline, passed_on).await
    })
}

struct Supervisor<'a> {
    job: &'a Job,
    rendezvous: RendezvousHost,
    output: Output,
    core: Core,
    watch: Watch,
    started: Instant,
    processes: BTreeMap<Rank, RankProcess>,
    /// Limit on open files of the ranks: the launcher's own, before it was raised.
    descriptors: Rlimit,
    /// The processors of each rank of this node; empty if they share those of this process.
    processors: Vec<CpuSet>,
    /// The logs of each rank, if the user wants them.
    logs: BTreeMap<Rank, [Log; 2]>,
    left_over: Vec<String>,
    /// True if the end of some output is lost.
    output_lost: bool,
    /// States of the other ranks when the first of this epoch failed.
    states: BTreeMap<Rank, String>,
    /// Number of processes that the kernel had killed for memory before the ranks of this epoch started.
    killed_before: Option<u64>,
    /// Heartbeats to the first node, on a node other than the first.
    beats: Option<NodeHeartbeat>,
    /// The reason why this node lost the others.
    cut_off: Option<String>,
}

impl<'a> Supervisor<'a> {
    fn new(job: &'a Job) -> Result<Self, LaunchError> {
        let ranks: Vec<Rank> = job.ranks()?.map(Rank).collect();
        // Orphans become children of their nearest subreaper, so that all of them can be found.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(LaunchError::system("cannot become the parent of orphans"))?;
        // Each rank takes two pipes and a connection, and unauthenticated connections take some.
        let descriptors = getrlimit(Resource::Nofile);
        let _ = setrlimit(
            Resource::Nofile,
            Rlimit { current: descriptors.maximum, maximum: descriptors.maximum },
        );
        let open = |rank: &Rank| Some(Log::open(*rank, &job.log_folder(*rank)?).map(|logs| (*rank, logs)));
        let logs = ranks.iter().filter_map(open).collect::<Result<_, _>>()?;
        let policy = Policy {
            grace: job.config.launch.grace,
            exit_window: EXIT_WINDOW,
            max_restarts: job.config.launch.max_restarts,
            is_whole: ranks.len() == job.world_size()? as usize,
        };
        Ok(Self {
            job,
            rendezvous: RendezvousHost::new(job)?,
            output: Output::start().map_err(LaunchError::system("no thread for the output of ranks"))?,
            processors: affinity::of_ranks(&job.config, ranks.len()),
            core: Core::new(ranks, policy),
            watch: Watch::new(heartbeat::interval(job.world_size()?)),
            started: Instant::now(),
            processes: BTreeMap::new(),
            descriptors,
            logs,
            left_over: Vec::new(),
            output_lost: false,
            states: BTreeMap::new(),
            killed_before: None,
            beats: None,
            cut_off: None,
        })
    }

    async fn supervise(
        mut self,
        lifeline: Option<impl Read + Send + 'static>,
        mut passed_on: Signals,
    ) -> Result<ClosingReport, LaunchError> {
        let mut signals = Signals::listen([Signal::CHILD].into_iter().chain(TO_END).chain([FILE_TOO_LARGE]))
            .map_err(LaunchError::system("cannot listen to signals"))?;
        if !proc::is_own() {
            tell(
                "/proc is not mounted, or is that of another PID namespace: the states of ranks are unknown, signals such as SIGUSR1 \
                 are not passed on, and only processes in the process groups of ranks are ended with them; mount it: `unshare \
                 --mount-proc`, or `mount -t proc proc /proc`",
            );
        }
        let launcher = lifeline.as_ref().and_then(|_| rustix::process::getppid());
        let mut lifeline_closed =
            watch(lifeline).map_err(LaunchError::system("no thread for the launcher's lifeline"))?;
        let endpoint = self.serve_status();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);

        // The first node's launcher examines the heartbeats of the others.
        let timeout = self.job.config.rendezvous.timeout.get();
        let mut others = Nodes::new(self.rendezvous.address.clone(), timeout);
        self.beats = self.beat()?;

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
                // Exits of ranks first: a signal sent to the whole process group must not hide them.
                biased;
                signal = signals.recv() => match signal {
                    Signal::CHILD => None,
                    FILE_TOO_LARGE => continue,
                    asked => Some(Event::Interrupted(asked.as_raw())),
                },
                signal = passed_on.recv() => {
                    self.pass_on(signal);
                    continue;
                }
                () = &mut lifeline_closed => Some(Event::LifelineClosed),
                notice = noticed(self.beats.as_mut()) => match self.take(notice) {
                    Some(event) => Some(event),
                    None => continue,
                },
                () = until(due) => Some(Event::Tick),
                question = asked(endpoint.as_ref()) => {
                    question.answer(&self.status());
                    continue;
                }
                _ = look.tick() => {
                    self.follow(launcher);
                    self.look();
                    match self.look_at_nodes(&mut others) {
                        Some(event) => Some(event),
                        None => continue,
                    }
                }
            };
            if matches!(event, Some(Event::LifelineClosed)) {
                lifeline_closed = Box::pin(std::future::pending());
            }
            let now = self.started.elapsed();
            todo = match event {
                Some(event) => self.core.handle(now, event),
                None => self.reap(now),
            };
        }
    }

    /// Sends a signal to the processes of the ranks that handle it. It would end the others.
    fn pass_on(&self, signal: Signal) {
        let running = |process: &RankProcess| process.pid.filter(|_| process.exit.is_none());
        let groups: Vec<u32> = self.processes.values().filter_map(running).map(raw).collect();
        let handle =
            |process: &proc::Process| groups.contains(&process.group) && process.handles(signal.as_raw());
        let mut count = 0;
        for process in proc::Process::all().filter(handle) {
            let pid = rustix::process::Pid::from_raw(process.pid.cast_signed());
            count += usize::from(pid.is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok()));
        }
        let name = signal_name(signal.as_raw(), "", "");
        tell(&match count {
            0 if !proc::is_own() => {
                format!(
                    "received {name}, which is not passed on: /proc does not show which processes handle it"
                )
            }
            0 => format!("received {name}, which no process of the ranks handles"),
            _ => format!("passed {name} on to {}", plural_of(count, "process", "processes")),
        });
    }

    /// Stops the ranks while the launcher is stopped, as by Ctrl-Z, and continues them with it.
    fn follow(&mut self, launcher: Option<Pid>) {
        let process = launcher.and_then(|pid| proc::Process::read(raw(pid)));
        let is_stopped = process.is_some_and(|process| process.state == 'T');
        if is_stopped != self.core.is_suspended() {
            self.core.suspend(is_stopped);
            self.signal(if is_stopped { Signal::STOP } else { Signal::CONT });
            let told = if is_stopped { "are stopped with it (fg or bg continues them)" } else { "continue" };
            tell(&format!(
                "the launcher {}; the ranks {told}",
                if is_stopped { "is stopped" } else { "continues" }
            ));
        }
    }

    /// Sends a signal to the process group of each rank that runs.
    fn signal(&self, signal: Signal) {
        for process in self.processes.values().filter(|process| process.exit.is_none()) {
            // Not reaped yet, so the kernel cannot have given its pid to another process.
            if let Some(pid) = process.pid {
                let _ = kill_process_group(pid, signal);
            }
        }
    }

    /// Serves the state of the job. A job without this service is better than none.
    fn serve_status(&self) -> Option<Endpoint> {
        let folder = self.job.status_folder.as_ref()?;
        Endpoint::serve(folder)
            .inspect_err(|error| {
                tell(&format!(
                    "`ryz status` cannot show this job: {error}; it looks in XDG_RUNTIME_DIR, if that is a folder of this user"
                ));
            })
            .ok()
    }

    /// Tells the user of troubles of ranks that run.
    fn look(&mut self) {
        if !self.core.is_running() || self.core.is_suspended() {
            return;
        }
        let seen = self.seen();
        for notice in self.watch.look(self.started.elapsed(), &seen) {
            tell(&match notice {
                Notice::Wrong(rank, Trouble::Silent(age, state)) => {
                    let state = match state {
                        Some(letter) => format!("its process is {}", status::process_state(letter)),
                        None => "the state of its process is not known here".into(),
                    };
                    format!("{} is silent: no heartbeat for {} s; {state}", self.name(rank), age.as_secs())
                }
                Notice::Wrong(rank, Trouble::NoProgress(call, own)) => {
                    format!("rank {rank} makes no progress: {}", status::no_progress(&call, own.as_ref()))
                }
                Notice::Speaks(rank) => format!("rank {rank} sends heartbeats again"),
                Notice::Continues(rank, call) => format!(
                    "rank {rank} continues: it has begun call {} ({}) of group '{}'",
                    call.call, call.operation, call.group
                ),
            });
        }
    }

    /// Returns every rank of this node, and those of other nodes that have reported.
    fn seen(&self) -> BTreeMap<Rank, Seen> {
        let beats = self.rendezvous.server.as_ref().map(Server::beats).unwrap_or_default();
        let mut seen: BTreeMap<Rank, Seen> = self
            .processes
            .iter()
            .map(|(rank, process)| {
                let process = match (process.exit, process.pid) {
                    (Some(_), _) | (None, None) => Process::Ended,
                    _ if self.core.is_stopped(*rank) => Process::Stopped,
                    (None, Some(pid)) => {
                        Process::Running(proc::Process::program(raw(pid)).map(|program| program.state))
                    }
                };
                (*rank, Seen { process, beat: None })
            })
            .collect();
        for (rank, beat) in beats {
            let heard = beat.heard.saturating_duration_since(self.started);
            seen.entry(rank).or_insert(Seen { process: Process::Elsewhere, beat: None }).beat =
                Some(Heartbeat { heard, report: beat.report });
        }
        seen
    }

    /// Returns the state that `ryz status` shows.
    fn status(&self) -> wire::Job {
        let now = self.started.elapsed();
        let arguments = self.job.arguments.iter().map(|argument| argument.to_string_lossy().into_owned());
        let program = std::iter::once(self.job.program.display().to_string()).chain(arguments);
        wire::Job {
            name: self.job.config.job.name.clone(),
            pid: std::process::id(),
            host: crate::host_name(),
            program: program.collect::<Vec<_>>().join(" "),
            epoch: self.core.epoch().0,
            world_size: self.job.world_size().unwrap_or_default(),
            uptime_s: units::seconds(now),
            ranks: self.seen().iter().map(|(rank, seen)| self.rank_status(now, *rank, seen)).collect(),
        }
    }

    fn rank_status(&self, now: Duration, rank: Rank, seen: &Seen) -> wire::Rank {
        let process = self.processes.get(&rank);
        let (exit_code, signal) = parts(process.and_then(|process| process.exit));
        let trouble = self.watch.trouble(rank);
        let state = match (seen.process, trouble) {
            (Process::Ended, _) => wire::State::Exited,
            (Process::Stopped, _) => wire::State::Stopped,
            (_, Some(Trouble::Silent(..))) => wire::State::Silent,
            (_, Some(Trouble::NoProgress(..))) => wire::State::NoProgress,
            (_, None) => wire::State::Running,
        };
        let pid = process.and_then(|process| process.pid).map(raw);
        let program = pid.filter(|_| seen.process != Process::Ended).and_then(proc::Process::program);
        let report = seen.beat.as_ref().map(|beat| &beat.report);
        wire::Rank {
            rank: rank.0,
            pid,
            state,
            process_state: program.as_ref().map(|program| program.state.to_string()),
            cpu_s: program.as_ref().map(|program| units::seconds(program.cpu)),
            resident_bytes: program
                .as_ref()
                .map(|program| program.resident_bytes)
                .or(report.and_then(|report| report.resident_bytes)),
            cpus: program.as_ref().and_then(proc::Process::cpus),
            waits_in: program.filter(|program| program.state != 'R').and_then(|program| program.waits_in()),
            exit_code,
            signal,
            heartbeat_age_s: seen.beat.as_ref().map(|beat| units::seconds(now.saturating_sub(beat.heard))),
            no_progress: match trouble {
                Some(Trouble::NoProgress(call, _)) if state == wire::State::NoProgress => Some(call.clone()),
                _ => None,
            },
            groups: report.map(|report| report.groups.clone()),
            gpu: report.and_then(|report| report.gpu.clone()),
            gpu_memory: report.and_then(|report| report.gpu_memory.clone()),
        }
    }

    /// Sends heartbeats to the first node, on every other node. The first tells the others what job it runs.
    fn beat(&self) -> Result<Option<NodeHeartbeat>, LaunchError> {
        let (config, world_size) = (&self.job.config, self.job.world_size()?);
        let RendezvousHost { server, address, key, .. } = &self.rendezvous;
        if let Some(server) = server {
            node_heartbeat::tell_size(server, config, world_size);
            return Ok(None);
        }
        NodeHeartbeat::start(config, world_size, address.clone(), key.clone()).map(Some)
    }

    /// Examines what the other nodes have told the first.
    fn look_at_nodes(&mut self, others: &mut Nodes) -> Option<Event> {
        let server = self.rendezvous.server.as_ref()?;
        let (now, nodes) = (self.started.elapsed(), self.job.config.launch.nnodes.get());
        let seen = others.look(now, node_heartbeat::counts(server, nodes));
        let notice = node_heartbeat::failure(server, nodes).or(seen);
        let event = notice.and_then(|notice| self.take(notice));
        event.or_else(|| others.have_left(now).then_some(Event::OthersLeft))
    }

    /// Tells the user, and the ranks that wait at the rendezvous, what is noticed of other nodes.
    fn take(&mut self, notice: NodeNotice) -> Option<Event> {
        match notice {
            NodeNotice::Left => Some(Event::OthersLeft),
            // This node ends for a reason of its own.
            _ if !self.core.is_well() => None,
            NodeNotice::Waits(what) => {
                tell(&what);
                None
            }
            NodeNotice::CutOff(why) => {
                if let Some(server) = &self.rendezvous.server {
                    server.fail(&why);
                    node_heartbeat::tell_failure(server, why.clone());
                }
                if self.core.is_running() {
                    tell(&format!("{why}. Ending the ranks of this node"));
                }
                self.cut_off = Some(why);
                Some(Event::CutOff)
            }
        }
    }

    /// Tells the other nodes how this one has ended, or why it ends its ranks.
    fn tell_nodes(&self, outcome: &Outcome) {
        let node = self.job.config.launch.node_rank;
        let why = match (outcome.interrupted, outcome.first_failure) {
            (Some(signal), _) => {
                let name = signal_name(signal, " (", ")");
                Some(format!("node {node}: its launcher was ended by signal {signal}{name}"))
            }
            (None, Some(first)) => Some(format!("node {node}: {}", self.failure(first).line())),
            (None, None) => self.cut_off.clone(),
        };
        if let Some(beats) = &self.beats {
            beats.leave(why.map_or(Ok(()), Err));
        } else if let (Some(server), Some(why)) = (&self.rendezvous.server, why) {
            node_heartbeat::tell_failure(server, why);
        }
    }

    /// Reaps every process that ended, orphans included, and tells the core which ranks ended, stopped or continued.
    fn reap(&mut self, now: Duration) -> Vec<Action> {
        let what = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
        let mut seen = Vec::new();
        while let Ok(Some((pid, status))) = wait(what) {
            let Some((rank, process)) = running(&mut self.processes, pid) else { continue };
            if let Some(exit) = exit(status) {
                process.exit = Some(exit);
            }
            seen.push((rank, status));
        }
        let has_failed = |process: &&RankProcess| process.exit.is_some_and(|exit| !exit.is_success());
        let ended = seen.iter().filter_map(|(rank, _)| self.processes.get(rank)).filter(has_failed);
        output::wait_for_end(&ended.flat_map(|process| &process.readers).collect::<Vec<_>>(), LAST_LINES);
        let mut actions = Vec::new();
        for (rank, status) in seen {
            let event = match (exit(status), status.stopping_signal()) {
                (Some(exit), _) => self.exited(rank, exit),
                (None, Some(signal)) => Event::Stopped(rank, signal),
                (None, None) => Event::Continued(rank),
            };
            actions.extend(self.core.handle(now, event));
        }
        actions
    }

    fn exited(&self, rank: Rank, exit: Exit) -> Event {
        let server = self.rendezvous.server.as_ref();
        if exit.is_success() {
            if let Some(server) = server {
                server.rank_exited(rank, "exited with code 0");
            }
            if let Some(beats) = &self.beats {
                beats.rank_left(rank);
            }
        }
        Event::Exited { rank, exit, origin: self.origin(rank) }
    }

    /// Returns the origin of a rank's failure: as it reported it, or else as the end of its output tells it.
    fn origin(&self, rank: Rank) -> Origin {
        let report = self.rendezvous.server.as_ref().and_then(|server| server.report(rank));
        if let Some(rank) = report.as_ref().and_then(|report| report.caused_by) {
            return Origin::Rank(rank);
        }
        let text = report.map(|report| report.cause).or_else(|| self.processes.get(&rank)?.last_output());
        if text.is_some_and(|text| catalogue::is_echo(&text)) { Origin::Another } else { Origin::Itself }
    }

    /// Notes what the ranks do that have not ended.
    fn note_states(&mut self) {
        let running = self.processes.iter().filter(|(_, process)| process.exit.is_none());
        self.states = running
            .filter_map(|(rank, process)| {
                let program = proc::Process::program(raw(process.pid?))?;
                let waits = program.waits_in().filter(|_| program.state != 'R');
                let waits = waits.map_or_else(String::new, |call| format!(", in {call}"));
                let (state, cpu) = (status::process_state(program.state), program.cpu.as_secs_f64());
                Some((
                    *rank,
                    format!("{} was in state {state}{waits}, after {cpu:.1} s of CPU time", program.name),
                ))
            })
            .collect();
    }

    fn act(&mut self, action: &Action) -> Vec<Action> {
        match *action {
            Action::Start(epoch) => return self.start(epoch),
            Action::Announce(rank) => {
                self.note_states();
                if let Some(server) = &self.rendezvous.server {
                    server.fail(&self.describe(rank));
                }
            }
            Action::TellStopped(rank, signal) => {
                let is_alone = self.job.world_size().unwrap_or_default() == 1;
                tell(&format!(
                    "{} is unresponsive: stopped by signal {signal}{}{} (kill -CONT {} continues it)",
                    self.name(rank),
                    signal_name(signal, " (", ")"),
                    if is_alone { "" } else { "; the other ranks wait for it" },
                    self.pid(rank)
                ));
            }
            Action::TellContinued(rank) => tell(&format!("rank {rank} continues")),
            Action::Signal(number) => {
                self.tell_nodes(&self.core.outcome());
                if let Some(signal) = Signal::from_named_raw(number) {
                    self.signal(signal);
                }
            }
            Action::TellAskedBefore(signal, left) => tell(&format!(
                "received {}; the ranks have been asked to end already, and are killed in {} s, or at once by SIGINT (Ctrl-C)",
                signal_name(signal, "", ""),
                left.as_secs_f64().ceil()
            )),
            Action::Kill => descendants::kill(&self.pids()),
            Action::Restart { epoch, number, wait } => {
                metrics::counter!(crate::metric_names::RESTARTS.name).increment(1);
                tell(&self.restart_notice(epoch, number, wait));
                self.end_leftovers();
            }
            Action::Leave(outcome) => {
                self.tell_nodes(&outcome);
                self.end_leftovers();
            }
            Action::Finish(_) => unreachable!("handled by the caller"),
        }
        Vec::new()
    }

    fn start(&mut self, epoch: Epoch) -> Vec<Action> {
        if let Some(server) = self.rendezvous.server.as_ref().filter(|_| epoch.0 > 1) {
            server.advance(epoch);
        }
        self.processes.clear();
        self.states.clear();
        self.killed_before = proc::killed_for_memory();
        self.watch.clear();
        let mut actions = Vec::new();
        for (local_rank, rank) in self.job.ranks().unwrap_or_default().map(Rank).enumerate() {
            let processors = self.processors.get(local_rank).copied();
            let process = RankProcess::spawn(
                self.job,
                &self.rendezvous,
                &self.output,
                rank,
                epoch,
                self.logs.get(&rank).cloned().map_or([None, None], |logs| logs.map(Some)),
                Resources { descriptors: self.descriptors, processors },
            )
            .unwrap_or_else(|error| {
                let program = self.job.program.display();
                let hint = if error.kind() == std::io::ErrorKind::NotFound && self.job.program.exists() {
                    format!("; the file exists, but not its loader, which `readelf -l {program}` names")
                } else {
                    String::new()
                };
                RankProcess::not_started(format!("cannot run `{program}`: {error}{hint}"))
            });
            let failed = process.pid.is_none();
            self.processes.insert(rank, process);
            if failed {
                let event = Event::Exited { rank, exit: Exit::NotStarted, origin: Origin::Itself };
                actions.extend(self.core.handle(self.started.elapsed(), event));
            }
        }
        if self.core.is_suspended() {
            self.signal(Signal::STOP);
        }
        actions
    }

    /// Ends all leftovers of the ranks, and reads the rest of their output.
    fn end_leftovers(&mut self) {
        let ranks = self.pids();
        let processes = &mut self.processes;
        self.left_over = descendants::sweep(&ranks, |pid, status| {
            if let Some((_, process)) = running(processes, pid) {
                process.exit = exit(status);
            }
        });
        let readers: Vec<_> =
            self.processes.values_mut().flat_map(|process| std::mem::take(&mut process.readers)).collect();
        self.output_lost |= !self.output.drain(&readers, DRAIN);
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
            world_size: self.job.world_size().unwrap_or_default(),
            ranks: ranks.collect(),
            first_failure: outcome.first_failure.map(|first| self.failure(first)),
            cut_off: self.cut_off,
            exit_code: outcome.exit_code,
            interrupted: outcome.interrupted,
            unwritten: self.output.unwritten(),
            left_over: self.left_over,
            output_lost: self.output_lost,
        }
    }

    fn failure(&self, first: FirstFailure) -> Failure {
        let FirstFailure { rank, exit, stopped, gave_up, .. } = first;
        let reports = self.rendezvous.server.as_ref().map(Server::reports).unwrap_or_default();
        let own = reports.iter().find(|(from, _)| *from == rank).map(|(_, report)| report);
        // Of the ranks that it made fail, the first that gave up.
        let others: Vec<&(Rank, Report)> =
            reports.iter().filter(|(_, report)| report.caused_by == Some(rank)).collect();
        let accuser = others.iter().find(|(from, _)| *from == gave_up).or(others.first());

        let process = self.processes.get(&rank);
        let (exit_code, signal) = parts(exit);
        let written = |rank: Rank| self.processes.get(&rank).and_then(RankProcess::last_output);
        let told = written(rank).map(|text| catalogue::telling(&text));
        let not_started = process.and_then(|process| process.spawn_error.clone());
        // A program that SIGKILL ends cannot say so: its last words are about something else.
        let is_silenced = signal == Some(number::KILL);
        let accusation = || {
            let reported = accuser.map(|(from, report)| format!("rank {from} reported: {}", report.cause));
            let wrote = || Some(format!("rank {gave_up} wrote: {}", catalogue::telling(&written(gave_up)?)));
            reported.or_else(|| wrote().filter(|_| gave_up != rank))
        };
        let cause = match (stopped, own) {
            (Some(signal), _) => {
                Some(format!("its process is stopped (signal {signal}{})", signal_name(signal, ", ", "")))
            }
            (None, Some(report)) => Some(report.cause.clone()),
            (None, None) if gave_up != rank => accusation(),
            (None, None) if is_silenced => self.killed_for_memory(),
            (None, None) => not_started.or_else(|| told.clone()),
        };
        let last_call = match own {
            Some(report) => report.last_call.clone(),
            // The rank could not report it: the others were in the same call, or wait for it in the next.
            None => accuser.and_then(|(_, report)| report.last_call.clone()),
        };
        let pid = process.and_then(|process| process.pid).map(raw);
        let ended = format!("it {}", describe_exit(pid, exit_code, signal));
        let nothing = if told.is_some() { "" } else { " and wrote nothing" };
        let cause = cause.unwrap_or_else(|| format!("{ended}{nothing}"));
        Failure {
            explanation: catalogue::explain(&cause).or_else(|| catalogue::explain(&ended)),
            rank: rank.0,
            host: crate::host_name(),
            pid,
            exit_code,
            signal,
            last_output: told.filter(|text| *text != cause && own.is_none()).map(|text| printable(&text)),
            state: self.states.get(&rank).filter(|_| exit.is_none() && stopped.is_none()).cloned(),
            is_reported: own.is_some() && exit.is_some(),
            others_ran: exit.is_some_and(Exit::is_success),
            cause: printable(&cause),
            last_call,
            joined: self.rendezvous.server.as_ref().is_some_and(Server::joined),
        }
    }

    /// Returns the cause of a SIGKILL if the kernel has killed processes for memory while this job ran.
    fn killed_for_memory(&self) -> Option<String> {
        let killed = proc::killed_for_memory()?.saturating_sub(self.killed_before?);
        (killed > 0).then(|| {
            format!(
                "memory may have run out: the kernel's out-of-memory killer has ended {} on this host since the ranks started",
                plural_of(killed as usize, "process", "processes")
            )
        })
    }

    fn pids(&self) -> Vec<Pid> {
        self.processes.values().filter_map(|process| process.pid).collect()
    }

    fn pid(&self, rank: Rank) -> u32 {
        self.processes.get(&rank).and_then(|process| process.pid).map_or(0, raw)
    }

    fn name(&self, rank: Rank) -> String {
        if !self.processes.contains_key(&rank) {
            return format!("rank {rank} (on another node)");
        }
        format!("rank {rank} (host {}, pid {})", crate::host_name(), self.pid(rank))
    }

    /// Describes the rank and its exit.
    fn describe(&self, rank: Rank) -> String {
        let process = self.processes.get(&rank);
        let (exit_code, signal) = parts(process.and_then(|process| process.exit));
        let pid = process.and_then(|process| process.pid).map(raw);
        format!("{} {}", self.name(rank), describe_exit(pid, exit_code, signal))
    }

    fn restart_notice(&self, epoch: Epoch, number: u32, wait: Duration) -> String {
        let failure = self.core.first_failure().map(|first| self.failure(first));
        let failed = failure.map(|failure| failure.line()).unwrap_or_default();
        let most = self.job.config.launch.max_restarts;
        format!("{failed}; restart {number} of {most} in {} s, as epoch {epoch}", wait.as_secs())
    }
}

fn plural_of(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

fn tell(message: &str) {
    let width = terminal_size::terminal_size_of(io::stderr()).map(|(width, _)| width.0.into());
    let text = wrap(&format!("ryz: {message}"), 2, Screen { width, ..Screen::PLAIN });
    console::stderr().say(&(text + "\n"));
}

/// Resolves when the lifeline closes; never, if there is none.
fn watch(
    lifeline: Option<impl Read + Send + 'static>,
) -> io::Result<std::pin::Pin<Box<dyn Future<Output = ()>>>> {
    let Some(mut lifeline) = lifeline else { return Ok(Box::pin(std::future::pending())) };
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("ryz-lifeline".into()).spawn(move || {
        let _ = io::copy(&mut lifeline, &mut io::sink());
        console::shorten_flush_timeout();
        let _ = ended.send(());
    })?;
    Ok(Box::pin(async move { drop(end.await) }))
}

/// Resolves at a request for the state of the job.
async fn asked(endpoint: Option<&Endpoint>) -> Question {
    match endpoint {
        Some(endpoint) => endpoint.asked().await,
        None => std::future::pending().await,
    }
}

/// Resolves when this node notices something of the first.
async fn noticed(beats: Option<&mut NodeHeartbeat>) -> NodeNotice {
    match beats {
        Some(beats) => beats.notice().await,
        None => std::future::pending().await,
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

fn parts(exit: Option<Exit>) -> (Option<i32>, Option<i32>) {
    match exit {
        Some(Exit::Code(code)) => (Some(code), None),
        Some(Exit::Signal(signal)) => (None, Some(signal)),
        Some(Exit::NotStarted) | None => (None, None),
    }
}
