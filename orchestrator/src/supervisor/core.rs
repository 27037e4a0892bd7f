//! Decides the fate of a job when ranks exit: the first failure, whom to notify, when to kill, and whether to restart. No
//! processes, signals or clock here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ryzanstein_process_group::{Epoch, Rank};

/// The exit code after which a job is not restarted: wrong usage or configuration, which a retry cannot fix.
pub(crate) const DO_NOT_RESTART: i32 = 2;

/// Signal numbers, the same on every Linux.
pub(crate) mod signal {
    /// Sent by Ctrl-C.
    pub(crate) const INTERRUPT: i32 = 2;
    /// Cannot be caught or ignored.
    pub(crate) const KILL: i32 = 9;
    /// A request to exit.
    pub(crate) const TERMINATE: i32 = 15;
}

/// The way in which a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exit {
    /// The process exited with this code.
    Code(i32),
    /// This signal ended the process.
    Signal(i32),
    /// The process could not be started.
    NotStarted,
}

impl Exit {
    /// Returns the exit code as a shell reports it: 128 plus the signal for a process that a signal ended.
    pub(crate) const fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::NotStarted => 1,
        }
    }

    /// Returns true if the process exited with code 0.
    pub(crate) const fn is_success(self) -> bool {
        matches!(self, Self::Code(0))
    }
}

/// The origin of a rank's failure, as far as the rank's own report or output tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// The rank itself, or unknown.
    Itself,
    /// This other rank.
    Rank(Rank),
    /// Another rank that is not named: the rank waited in vain, or lost a connection.
    Another,
}

/// Limits set by the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
    /// Time after the first failure in which the other ranks may exit by themselves, with an error of their own, before
    /// SIGTERM.
    pub exit_window: Duration,
    /// Maximum number of restarts of the job.
    pub max_restarts: u32,
    /// True if all ranks of the job are on this node.
    pub is_whole: bool,
}

/// An event of the job.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A rank's process exited.
    Exited {
        /// The rank.
        rank: Rank,
        /// Exit of the rank.
        exit: Exit,
        /// The origin of the failure.
        origin: Origin,
    },
    /// This signal stopped a rank's process: it runs no more until it is continued.
    Stopped(Rank, i32),
    /// The process of a stopped rank runs again.
    Continued(Rank),
    /// The launcher received this signal: the job must end.
    Interrupted(i32),
    /// The launcher has died.
    LifelineClosed,
    /// This node has lost contact with another one, or another one has failed: the ranks can never finish.
    CutOff,
    /// The other nodes have left, or this one has told them all that it can.
    OthersLeft,
    /// Time has passed.
    Tick,
}

/// An action of the supervisor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Start every rank in this epoch. No process of an earlier epoch is left.
    Start(Epoch),
    /// Tell every rank at the rendezvous that this rank failed.
    Announce(Rank),
    /// Tell the user that this signal stopped a rank.
    TellStopped(Rank, i32),
    /// Tell the user that a stopped rank continues.
    TellContinued(Rank),
    /// Send this signal to every rank's process group.
    Signal(i32),
    /// Tell the user that this signal changes nothing: the ranks have been asked to end, and are killed after this time.
    TellAskedBefore(i32, Duration),
    /// Kill all descendants of the launcher.
    Kill,
    /// End all leftovers of the ranks, and tell the user that the job is restarted.
    Restart {
        /// The epoch that starts then.
        epoch: Epoch,
        /// Number of the restart, from 1; again from 1 after an epoch that made progress.
        number: u32,
        /// Time until it starts.
        wait: Duration,
    },
    /// All ranks of this node have ended: end all leftovers, and tell the other nodes.
    Leave(Outcome),
    /// The job is over.
    Finish(Outcome),
}

/// The outcome of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Outcome {
    /// The last epoch.
    pub epoch: Epoch,
    /// The rank that failed first, and its exit.
    pub first_failure: Option<FirstFailure>,
    /// The signal that asked the job to end.
    pub interrupted: Option<i32>,
    /// The launcher's exit code.
    pub exit_code: i32,
}

/// The failure that caused the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FirstFailure {
    /// The rank that failed.
    pub rank: Rank,
    /// Exit of the rank; `None` if it was still there: stopped, stuck, or cut off from the others. With code 0, it left while others
    /// needed it.
    pub exit: Option<Exit>,
    /// The signal that stopped it, if it is stopped.
    pub stopped: Option<i32>,
    /// The first rank that exited with a failure because of it, or itself.
    pub gave_up: Rank,
    /// The launcher's exit code.
    pub code: i32,
}

/// Exit of one rank, with its time.
#[derive(Clone, Copy, Debug)]
struct ExitRecord {
    exit: Exit,
    origin: Origin,
    /// Time at which the supervisor saw it. Exits seen at the same time have no order.
    seen: Duration,
    sequence: usize,
    /// True if the rank exited after the supervisor had sent it a signal.
    requested: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Running,
    AwaitingExits {
        until: Duration,
    },
    Terminating {
        kill_at: Duration,
    },
    /// Processes that fork while they are killed need more than one round.
    Killing {
        again: Duration,
        give_up: Duration,
    },
    /// All ranks have ended. The next epoch starts at this time.
    AwaitingRestart {
        until: Duration,
    },
    /// All ranks have ended, and other nodes have not left. If the job has failed, they are told until this time.
    Leaving {
        until: Option<Duration>,
    },
    Finished,
}

/// Interval between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(50);
/// Interrupts within this time are one request. Nobody presses Ctrl-C twice so quickly.
const AT_ONCE: Duration = Duration::from_millis(100);
/// Time for killed processes to disappear: the kernel can hold one in an uninterruptible wait for ever.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to tell the other nodes of a failure: a heartbeat, an examination of it, and their exchange.
const TELL_TIMEOUT: Duration = Duration::from_secs(3);
/// Wait before the first restart; it doubles with each.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Maximum wait before a restart.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Duration from which on an epoch has made progress: the restarts before it do not count any more.
const PROGRESS: Duration = Duration::from_secs(300);

/// The state of one job.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Core {
    policy: Policy,
    ranks: Vec<Rank>,
    epoch: Epoch,
    /// Time of the start of this epoch.
    began: Duration,
    restarts: u32,
    phase: Phase,
    exits: BTreeMap<Rank, ExitRecord>,
    /// The stopped ranks, each with the signal that stopped it.
    stopped: BTreeMap<Rank, i32>,
    /// True while the ranks are stopped because the launcher is.
    suspended: bool,
    interrupted: Option<i32>,
    /// True if [`Event::CutOff`] came before any rank of this node had failed.
    cut_off: bool,
    have_others_left: bool,
}

impl Core {
    /// Creates the core for the ranks of this node. Begin with [`Core::start`].
    pub(crate) const fn new(ranks: Vec<Rank>, policy: Policy) -> Self {
        Self {
            policy,
            ranks,
            epoch: Epoch(1),
            began: Duration::ZERO,
            restarts: 0,
            phase: Phase::Running,
            exits: BTreeMap::new(),
            stopped: BTreeMap::new(),
            suspended: false,
            interrupted: None,
            cut_off: false,
            have_others_left: policy.is_whole,
        }
    }

    /// Returns the first action.
    pub(crate) const fn start(&self) -> Action {
        Action::Start(self.epoch)
    }

    /// Returns the time at which [`Event::Tick`] is due.
    pub(crate) const fn next_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::AwaitingExits { until } | Phase::AwaitingRestart { until } => Some(until),
            Phase::Terminating { kill_at } => Some(kill_at),
            Phase::Killing { again, .. } => Some(again),
            Phase::Leaving { until } => until,
            Phase::Running | Phase::Finished => None,
        }
    }

    /// Takes an event and returns what to do.
    pub(crate) fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match self.phase {
            Phase::Finished => Vec::new(),
            Phase::AwaitingRestart { .. } | Phase::Leaving { .. } => self.without_ranks(now, event),
            _ => self.during_an_epoch(now, event),
        }
    }

    fn during_an_epoch(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Exited { rank, exit, origin } => self.exited(now, rank, exit, origin),
            Event::Stopped(..) if self.suspended => Vec::new(),
            Event::Stopped(rank, signal) => {
                let is_new = self.stopped.insert(rank, signal).is_none() && self.is_undisturbed();
                is_new.then_some(Action::TellStopped(rank, signal)).into_iter().collect()
            }
            Event::Continued(rank) => {
                let is_new = self.stopped.remove(&rank).is_some() && self.is_undisturbed();
                is_new.then_some(Action::TellContinued(rank)).into_iter().collect()
            }
            Event::Interrupted(signal) => match self.phase {
                // The second Ctrl-C kills. No other signal takes the grace away, nor do two at once: `timeout` signals a
                // process, and then its group.
                Phase::Terminating { kill_at } if self.interrupted.is_some() => {
                    let asked = kill_at.saturating_sub(self.policy.grace);
                    match signal {
                        _ if now.saturating_sub(asked) < AT_ONCE => Vec::new(),
                        signal::INTERRUPT => self.kill(now),
                        _ => vec![Action::TellAskedBefore(signal, kill_at.saturating_sub(now))],
                    }
                }
                Phase::Running | Phase::AwaitingExits { .. } | Phase::Terminating { .. } => {
                    self.interrupted = Some(signal);
                    self.phase = Phase::Terminating { kill_at: now + self.policy.grace };
                    vec![Action::Signal(signal)]
                }
                // The job is being killed already; it must not be restarted.
                Phase::Killing { .. } => {
                    self.interrupted.get_or_insert(signal);
                    Vec::new()
                }
                Phase::AwaitingRestart { .. } | Phase::Leaving { .. } | Phase::Finished => Vec::new(),
            },
            Event::LifelineClosed => {
                self.interrupted = Some(signal::KILL);
                self.kill(now)
            }
            Event::CutOff if self.is_running() => {
                self.cut_off = true;
                self.phase = Phase::AwaitingExits { until: now + self.policy.exit_window };
                Vec::new()
            }
            Event::CutOff => Vec::new(),
            Event::OthersLeft => {
                self.have_others_left = true;
                Vec::new()
            }
            Event::Tick => match self.phase {
                Phase::AwaitingExits { until } if until <= now => {
                    self.phase = Phase::Terminating { kill_at: now + self.policy.grace };
                    vec![Action::Signal(signal::TERMINATE)]
                }
                Phase::Terminating { kill_at } if kill_at <= now => self.kill(now),
                Phase::Killing { give_up, .. } if give_up <= now => vec![self.conclude(now)],
                Phase::Killing { again, .. } if again <= now => self.kill(now),
                _ => Vec::new(),
            },
        }
    }

    /// Handles an event while no rank runs.
    fn without_ranks(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match (event, self.phase) {
            // An interrupt of a job that has failed already does not hide the failure.
            (Event::Interrupted(_) | Event::LifelineClosed, Phase::Leaving { until: Some(_) })
            | (Event::OthersLeft, Phase::Leaving { .. }) => vec![self.finish()],
            (Event::Interrupted(signal), _) => {
                self.interrupted = Some(signal);
                vec![self.finish()]
            }
            (Event::LifelineClosed, _) => {
                self.interrupted = Some(signal::KILL);
                vec![self.finish()]
            }
            (Event::Tick, Phase::AwaitingRestart { until }) if until <= now => {
                self.epoch = Epoch(self.epoch.0 + 1);
                self.began = now;
                self.exits.clear();
                self.stopped.clear();
                self.phase = Phase::Running;
                vec![Action::Start(self.epoch)]
            }
            (Event::CutOff, Phase::Leaving { until: None }) => {
                self.cut_off = true;
                self.phase = Phase::Leaving { until: Some(now + TELL_TIMEOUT) };
                Vec::new()
            }
            (Event::Tick, Phase::Leaving { until: Some(until) }) if until <= now => vec![self.finish()],
            _ => Vec::new(),
        }
    }

    /// Returns true if all ranks run, or have ended well.
    pub(crate) const fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// Returns true if all ranks run or have ended well, and other nodes are needed.
    pub(crate) const fn is_well(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Leaving { until: None })
    }

    /// Returns the current epoch.
    pub(crate) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns true if a signal has stopped this rank.
    pub(crate) fn is_stopped(&self, rank: Rank) -> bool {
        self.stopped.contains_key(&rank)
    }

    /// Returns true while the ranks are stopped because the launcher is.
    pub(crate) const fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Takes whether the ranks are stopped because the launcher is. Meanwhile their stops do not count, but continuations do: each
    /// may end a stop from before.
    pub(crate) const fn suspend(&mut self, suspended: bool) {
        self.suspended = suspended;
    }

    /// Returns true if the supervisor has sent no signal yet.
    const fn is_undisturbed(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::AwaitingExits { .. })
    }

    fn kill(&mut self, now: Duration) -> Vec<Action> {
        let give_up = match self.phase {
            Phase::Killing { give_up, .. } => give_up,
            _ => now + KILL_TIMEOUT,
        };
        self.phase = Phase::Killing { again: now + KILL_INTERVAL, give_up };
        vec![Action::Kill]
    }

    fn exited(&mut self, now: Duration, rank: Rank, exit: Exit, origin: Origin) -> Vec<Action> {
        let sequence = self.exits.len();
        let requested = !self.is_undisturbed();
        self.exits.entry(rank).or_insert(ExitRecord { exit, origin, seen: now, sequence, requested });
        let mut actions = Vec::new();
        if !exit.is_success() && self.phase == Phase::Running {
            self.phase = Phase::AwaitingExits { until: now + self.policy.exit_window };
            actions.push(Action::Announce(rank));
        }
        if self.exits.len() == self.ranks.len() {
            actions.push(self.conclude(now));
        }
        actions
    }

    /// Returns the rank whose failure made the others fail. Of those that exited with a failure: root causes before secondary
    /// failures, then the one seen first; of those seen at the same time, one that a signal ended before one that exited. If that
    /// one failed because of another rank, the other rank failed first.
    pub(crate) fn first_failure(&self) -> Option<FirstFailure> {
        let own = self.exits.iter().filter(|(_, ended)| !ended.requested);
        let (gave_up, ended) = own.filter(|(_, ended)| !ended.exit.is_success()).min_by_key(|(_, e)| {
            (e.origin != Origin::Itself, e.seen, !matches!(e.exit, Exit::Signal(_)), e.sequence)
        })?;
        let (gave_up, code) = (*gave_up, ended.exit.code());
        let culprit = match ended.origin {
            Origin::Itself => None,
            Origin::Rank(_) | Origin::Another => self.culprit(gave_up),
        };
        let rank = culprit.unwrap_or(gave_up);
        let exit = self.exits.get(&rank).filter(|ended| !ended.requested).map(|ended| ended.exit);
        let stopped = if exit.is_none() { self.stopped.get(&rank).copied() } else { None };
        Some(FirstFailure { rank, exit, stopped, gave_up, code })
    }

    /// Returns the rank that a rank gave up because of: one that is stopped, the one that it blames, or else, if it blames none, one
    /// that left with success before, or the only one that has neither failed nor waited in vain. Ranks of other nodes are unknown
    /// here, so the last two hold only without other nodes.
    fn culprit(&self, gave_up: Rank) -> Option<Rank> {
        let failed = self.exits.get(&gave_up)?;
        let is_there = |rank: &Rank| self.exits.get(rank).is_none_or(|ended| ended.requested);
        let blamed = self.blamed(gave_up);
        let mut stopped = self.stopped.keys().copied().filter(is_there);
        let is_stopped = |rank: &Rank| is_there(rank) && self.stopped.contains_key(rank);
        if let Some(rank) = blamed.filter(is_stopped).or_else(|| stopped.next()) {
            return Some(rank);
        }
        if let Origin::Rank(_) = failed.origin {
            let has_left = |rank: &Rank| self.exits.get(rank).is_some_and(|ended| ended.exit.is_success());
            return blamed.filter(|rank| is_there(rank) || has_left(rank));
        }
        let left = self.exits.iter().filter(|(_, e)| e.exit.is_success() && e.sequence < failed.sequence);
        // One that waited in vain itself may have got the signal before it exited.
        let waited = |rank: &Rank| self.exits.get(rank).is_some_and(|ended| ended.origin == Origin::Another);
        let mut others = self.ranks.iter().copied().filter(|rank| is_there(rank) && !waited(rank));
        let inferred = left
            .min_by_key(|(_, ended)| ended.sequence)
            .map(|(rank, _)| *rank)
            .or_else(|| others.next().filter(|_| others.next().is_none()));
        inferred.filter(|_| self.policy.is_whole)
    }

    /// Follows the blame from `rank` to its end. Ranks of other nodes are unknown here, and ranks may blame each other in a circle:
    /// neither leads to an end.
    fn blamed(&self, mut rank: Rank) -> Option<Rank> {
        let mut seen = BTreeSet::from([rank]);
        let mut last = None;
        while let Some(Origin::Rank(blamed)) = self.exits.get(&rank).map(|ended| ended.origin) {
            if !self.ranks.contains(&blamed) || !seen.insert(blamed) {
                return None;
            }
            rank = blamed;
            last = Some(rank);
        }
        last
    }

    fn conclude(&mut self, now: Duration) -> Action {
        let Some(failure) = self.outcome().first_failure else { return self.leave(now) };
        if now.saturating_sub(self.began) >= PROGRESS {
            self.restarts = 0;
        }
        let is_permanent = failure.code == DO_NOT_RESTART || failure.exit == Some(Exit::NotStarted);
        if is_permanent || self.restarts >= self.policy.max_restarts {
            return self.leave(now);
        }
        self.restarts += 1;
        let wait = FIRST_WAIT.saturating_mul(2_u32.saturating_pow(self.restarts - 1)).min(LONGEST_WAIT);
        self.phase = Phase::AwaitingRestart { until: now + wait };
        Action::Restart { epoch: Epoch(self.epoch.0 + 1), number: self.restarts, wait }
    }

    fn leave(&mut self, now: Duration) -> Action {
        if self.have_others_left {
            return self.finish();
        }
        let outcome = self.outcome();
        self.phase = Phase::Leaving { until: (outcome.exit_code != 0).then(|| now + TELL_TIMEOUT) };
        Action::Leave(outcome)
    }

    fn finish(&mut self) -> Action {
        self.phase = Phase::Finished;
        Action::Finish(self.outcome())
    }

    /// Returns the outcome, once the job has ended or must end.
    pub(crate) fn outcome(&self) -> Outcome {
        // A node that is cut off had not failed before.
        let is_ended = self.interrupted.is_some() || self.cut_off;
        let first_failure = if is_ended { None } else { self.first_failure() };
        let exit_code = match (self.interrupted, first_failure) {
            (Some(signal), _) => 128 + signal,
            (None, Some(failure)) => failure.code,
            (None, None) => i32::from(self.cut_off),
        };
        Outcome { epoch: self.epoch, first_failure, interrupted: self.interrupted, exit_code }
    }
}

#[cfg(test)]
mod every_run;
#[cfg(test)]
mod tests;
