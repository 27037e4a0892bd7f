//! Decides what happens to a job when ranks exit: which failure was first, whom to tell, when to kill, and whether to
//! restart. No processes, signals or clock here.

use std::collections::BTreeMap;
use std::time::Duration;

use ryzanstein_process_group::{Epoch, Rank};

/// The exit code after which a job is not restarted: wrong usage or configuration, which a retry cannot fix.
pub const DO_NOT_RESTART: i32 = 2;

/// Signal numbers, the same on every Linux.
pub mod signal {
    /// The terminal was closed.
    pub const HANGUP: i32 = 1;
    /// Ctrl-C.
    pub const INTERRUPT: i32 = 2;
    /// Cannot be caught or ignored.
    pub const KILL: i32 = 9;
    /// A request to exit.
    pub const TERMINATE: i32 = 15;
}

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// It could not be started.
    NotStarted,
}

impl Exit {
    /// As a shell reports it: 128 plus the signal for a process that a signal ended.
    pub const fn code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::NotStarted => 1,
        }
    }

    /// Whether it exited with code 0.
    pub const fn is_success(self) -> bool {
        matches!(self, Self::Code(0))
    }
}

/// Limits set by the user.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
    /// How long after the first failure the other ranks may exit by themselves, with an error of their own, before SIGTERM.
    pub exit_window: Duration,
    /// How many times the job may be restarted.
    pub max_restarts: u32,
}

/// Something that happened.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A rank's process exited.
    Exited {
        /// The rank.
        rank: Rank,
        /// How it exited.
        exit: Exit,
        /// Whether the rank reported that another rank's failure caused its own.
        secondary: bool,
    },
    /// The launcher received this signal: the job is to end.
    Interrupted(i32),
    /// The launcher has died.
    LifelineClosed,
    /// Time has passed.
    Tick,
}

/// Something to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Start every rank in this epoch. No process of an earlier epoch is left.
    Start(Epoch),
    /// Tell every rank at the rendezvous that this rank failed.
    Announce(Rank),
    /// Send this signal to every rank's process group.
    Signal(i32),
    /// Kill everything that descends from the launcher.
    Kill,
    /// The job is over.
    Finish(Outcome),
}

/// How a job went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The last epoch.
    pub epoch: Epoch,
    /// The rank that failed first, and how.
    pub first_failure: Option<(Rank, Exit)>,
    /// The signal that asked the job to end.
    pub interrupted: Option<i32>,
    /// The launcher's exit code.
    pub exit_code: i32,
}

/// How and when one rank exited.
#[derive(Clone, Copy, Debug)]
struct ExitRecord {
    exit: Exit,
    secondary: bool,
    /// When the supervisor saw it. Exits seen at the same time have no order.
    seen: Duration,
    sequence: usize,
    /// It exited after the supervisor had sent it a signal.
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
    Finished,
}

/// Time between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(50);
/// How long killed processes may take to disappear: the kernel can hold one in an uninterruptible wait for ever.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of one job.
#[derive(Debug)]
pub struct Core {
    policy: Policy,
    ranks: Vec<Rank>,
    epoch: Epoch,
    restarts: u32,
    phase: Phase,
    exits: BTreeMap<Rank, ExitRecord>,
    interrupted: Option<i32>,
}

impl Core {
    /// The ranks of this node. Begin with [`Core::start`].
    pub const fn new(ranks: Vec<Rank>, policy: Policy) -> Self {
        Self {
            policy,
            ranks,
            epoch: Epoch(1),
            restarts: 0,
            phase: Phase::Running,
            exits: BTreeMap::new(),
            interrupted: None,
        }
    }

    /// The first thing to do.
    pub const fn start(&self) -> Action {
        Action::Start(self.epoch)
    }

    /// When [`Event::Tick`] is due.
    pub const fn next_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::AwaitingExits { until } => Some(until),
            Phase::Terminating { kill_at } => Some(kill_at),
            Phase::Killing { again, .. } => Some(again),
            Phase::Running | Phase::Finished => None,
        }
    }

    /// Takes an event and returns what to do.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        if self.phase == Phase::Finished {
            return Vec::new();
        }
        match event {
            Event::Exited { rank, exit, secondary } => self.exited(now, rank, exit, secondary),
            Event::Interrupted(signal) => match self.phase {
                // The second Ctrl-C kills.
                _ if self.interrupted.is_some() => self.kill(now),
                Phase::Killing { .. } | Phase::Finished => Vec::new(),
                Phase::Running | Phase::AwaitingExits { .. } | Phase::Terminating { .. } => {
                    self.interrupted = Some(signal);
                    self.phase = Phase::Terminating { kill_at: now + self.policy.grace };
                    vec![Action::Signal(signal)]
                }
            },
            Event::LifelineClosed => {
                self.interrupted = Some(signal::KILL);
                self.kill(now)
            }
            Event::Tick => match self.phase {
                Phase::AwaitingExits { until } if until <= now => {
                    self.phase = Phase::Terminating { kill_at: now + self.policy.grace };
                    vec![Action::Signal(signal::TERMINATE)]
                }
                Phase::Terminating { kill_at } if kill_at <= now => self.kill(now),
                Phase::Killing { give_up, .. } if give_up <= now => vec![self.conclude()],
                Phase::Killing { again, .. } if again <= now => self.kill(now),
                _ => Vec::new(),
            },
        }
    }

    fn kill(&mut self, now: Duration) -> Vec<Action> {
        let give_up = match self.phase {
            Phase::Killing { give_up, .. } => give_up,
            _ => now + KILL_TIMEOUT,
        };
        self.phase = Phase::Killing { again: now + KILL_INTERVAL, give_up };
        vec![Action::Kill]
    }

    fn exited(&mut self, now: Duration, rank: Rank, exit: Exit, secondary: bool) -> Vec<Action> {
        let sequence = self.exits.len();
        let requested = matches!(self.phase, Phase::Terminating { .. } | Phase::Killing { .. });
        self.exits.entry(rank).or_insert(ExitRecord { exit, secondary, seen: now, sequence, requested });
        let mut actions = Vec::new();
        if !exit.is_success() && self.phase == Phase::Running {
            self.phase = Phase::AwaitingExits { until: now + self.policy.exit_window };
            actions.push(Action::Announce(rank));
        }
        if self.exits.len() == self.ranks.len() {
            actions.push(self.conclude());
        }
        actions
    }

    /// The rank whose failure made the others fail: root causes before secondary failures, then the one seen first; of those
    /// seen at the same time, one that a signal ended before one that exited.
    pub fn first_failure(&self) -> Option<(Rank, Exit)> {
        self.exits
            .iter()
            .filter(|(_, ended)| !ended.requested && !ended.exit.is_success())
            .min_by_key(|(_, e)| (e.secondary, e.seen, !matches!(e.exit, Exit::Signal(_)), e.sequence))
            .map(|(rank, ended)| (*rank, ended.exit))
    }

    fn conclude(&mut self) -> Action {
        let first_failure = if self.interrupted.is_some() { None } else { self.first_failure() };
        if let Some((_, exit)) = first_failure
            && exit != Exit::Code(DO_NOT_RESTART)
            && exit != Exit::NotStarted
            && self.restarts < self.policy.max_restarts
        {
            self.restarts += 1;
            self.epoch = Epoch(self.epoch.0 + 1);
            self.exits.clear();
            self.phase = Phase::Running;
            return Action::Start(self.epoch);
        }
        self.phase = Phase::Finished;
        let exit_code = match (self.interrupted, first_failure) {
            (Some(signal), _) => 128 + signal,
            (None, Some((_, exit))) => exit.code(),
            (None, None) => 0,
        };
        Action::Finish(Outcome { epoch: self.epoch, first_failure, interrupted: self.interrupted, exit_code })
    }
}

#[cfg(test)]
mod tests;
