//! Every run of small jobs: ranks that fail, blame each other, are stopped or cannot be killed, signals to the launcher, a
//! restart, and a late clock, in every order.

use std::hash::Hasher;

use ryzanstein_explorer::{World, explore, identify_by_debug};

use super::*;

const GRACE: Duration = Duration::from_secs(5);
const EXIT_WINDOW: Duration = Duration::from_millis(500);
/// A moment: exits one moment apart are seen one after the other.
const MOMENT: Duration = Duration::from_millis(1);
const STOP: i32 = 19;

/// The state of a rank's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Process {
    Runs,
    /// The process has been stopped. The core has been notified.
    Stopped,
    /// The process has been killed, and the kernel may take its time.
    Killed,
    Ended(Exit),
    /// The kernel could not end the process in time.
    LeftBehind,
}

/// Maximum numbers of rare events in a run.
#[derive(Clone, Debug)]
struct Budget {
    stops: u32,
    interrupts: u32,
    lifelines: u32,
    cuts: u32,
    /// Number of times that all other nodes leave; a job of several nodes has some.
    leaves: u32,
    moments: u32,
    /// Number of rounds of killing that are examined one by one; those after them pass at once.
    rounds: u32,
}

/// One event.
#[derive(Debug)]
enum Step {
    Exit(usize, Exit, Origin),
    Stop(usize),
    Continue(usize),
    Interrupt,
    LifelineCloses,
    CutOff,
    OthersLeave,
    /// A little time passes.
    Moment,
    /// Time passes up to the next deadline. The order of the tick and of other events at that time is open.
    UntilDeadline,
    /// Killing continues until it is given up.
    UntilGivenUp,
    Tick,
}

#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "what has happened so far; any of it may have")]
struct SmallJob {
    core: Core,
    now: Duration,
    budget: Budget,
    processes: Vec<Process>,
    /// The ranks of this epoch that ended before the supervisor sent a signal: exit, origin, time and order of the end.
    by_themselves: BTreeMap<Rank, (Exit, Origin, Duration, usize)>,
    /// The ranks that the core knows to be stopped.
    stopped: BTreeSet<Rank>,
    is_announced: bool,
    is_signalled: bool,
    killed_at: Option<Duration>,
    /// Time from which on the job must end.
    ends_since: Option<Duration>,
    interrupted: Vec<i32>,
    is_cut_off: bool,
    awaited: Option<Epoch>,
    restarts: u32,
    is_over: bool,
}

impl SmallJob {
    fn new(ranks: u32, max_restarts: u32, budget: Budget) -> Self {
        let is_whole = budget.leaves == 0;
        let policy = Policy { grace: GRACE, exit_window: EXIT_WINDOW, max_restarts, is_whole };
        let core = Core::new(Rank::all(ranks as usize).collect(), policy);
        let Action::Start(epoch) = core.start() else { panic!("a job begins with a start") };
        let mut job = Self {
            core,
            now: Duration::ZERO,
            budget,
            processes: vec![Process::LeftBehind; ranks as usize],
            by_themselves: BTreeMap::new(),
            stopped: BTreeSet::new(),
            is_announced: false,
            is_signalled: false,
            killed_at: None,
            ends_since: None,
            interrupted: Vec::new(),
            is_cut_off: false,
            awaited: Some(epoch),
            restarts: 0,
            is_over: false,
        };
        job.start(epoch).expect("the first epoch");
        job
    }

    /// Returns true if the job has failed and only tells the other nodes so.
    fn has_failed(&self) -> bool {
        matches!(self.core.phase, Phase::Leaving { until: Some(_) })
    }

    fn is_live(&self) -> bool {
        self.processes.iter().any(|p| matches!(p, Process::Runs | Process::Stopped | Process::Killed))
    }

    fn start(&mut self, epoch: Epoch) -> Result<(), String> {
        ensure(self.awaited.take() == Some(epoch), || format!("epoch {epoch} starts unasked"))?;
        ensure(!self.is_live(), || format!("epoch {epoch} starts beside processes of the last one"))?;
        ensure(self.interrupted.is_empty(), || "an interrupted job starts again".into())?;
        self.processes.fill(Process::Runs);
        self.by_themselves.clear();
        self.stopped.clear();
        (self.is_announced, self.is_signalled) = (false, false);
        (self.killed_at, self.ends_since) = (None, None);
        Ok(())
    }

    fn tell(&mut self, event: Event) -> Result<(), String> {
        for action in self.core.handle(self.now, event) {
            self.act(&action)?;
        }
        self.in_time()
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        ensure(!self.is_over, || format!("{action:?} after the end"))?;
        match action {
            Action::Start(epoch) => self.start(*epoch)?,
            Action::Announce(rank) => {
                let own = self.by_themselves.get(rank);
                ensure(own.is_some_and(|own| !own.0.is_success()), || format!("{rank} has not failed"))?;
                ensure(!self.is_announced, || "two failures are announced in one epoch".into())?;
                self.is_announced = true;
            }
            Action::TellStopped(rank, _) => {
                ensure(self.processes[rank.index()] == Process::Stopped, || {
                    format!("{rank} is not stopped")
                })?;
            }
            Action::TellContinued(rank) => {
                ensure(self.processes[rank.index()] == Process::Runs, || format!("{rank} does not run"))?;
            }
            Action::TellAskedBefore(..) => {
                let is_asked = self.is_signalled && self.killed_at.is_none();
                ensure(is_asked, || "the ranks have not been asked, or are being killed".into())?;
            }
            Action::Signal(_) => self.is_signalled = true,
            Action::Kill => {
                self.is_signalled = true;
                self.killed_at.get_or_insert(self.now);
                for process in &mut self.processes {
                    if matches!(process, Process::Runs | Process::Stopped) {
                        *process = Process::Killed;
                    }
                }
            }
            Action::Restart { epoch, number, .. } => {
                self.all_have_ended()?;
                ensure(self.interrupted.is_empty(), || "an interrupted job is restarted".into())?;
                ensure(!self.is_cut_off, || "a job without one of its nodes is restarted".into())?;
                ensure(epoch.0 == self.core.epoch.0 + 1, || format!("epoch {epoch} follows"))?;
                self.restarts += 1;
                let most = self.core.policy.max_restarts;
                ensure(self.restarts == *number && *number <= most, || {
                    format!("restart {number} of {most}")
                })?;
                self.is_consistent(self.core.first_failure())?;
                self.awaited = Some(*epoch);
                self.ends_since = None;
            }
            Action::Leave(outcome) => {
                self.all_have_ended()?;
                ensure(self.budget.leaves > 0, || "it waits for nodes that have left".into())?;
                self.judge(outcome)?;
            }
            Action::Finish(outcome) => {
                if self.awaited.is_none() {
                    self.all_have_ended()?;
                }
                self.is_over = true;
                self.judge(outcome)?;
            }
        }
        Ok(())
    }

    /// Checks that every process has ended, or that the kernel's time to end it has passed since it was killed.
    fn all_have_ended(&mut self) -> Result<(), String> {
        for process in &mut self.processes {
            match process {
                Process::Runs | Process::Stopped => return Err("a process that runs is left behind".into()),
                Process::Killed => {
                    let killed = self.killed_at.is_some_and(|at| self.now >= at + KILL_TIMEOUT);
                    ensure(killed, || "a killed process has had no time to end".into())?;
                    *process = Process::LeftBehind;
                }
                Process::Ended(_) | Process::LeftBehind => {}
            }
        }
        Ok(())
    }

    fn judge(&self, outcome: &Outcome) -> Result<(), String> {
        if !self.interrupted.is_empty() {
            let known = outcome.interrupted.filter(|signal| self.interrupted.contains(signal));
            let code = known.map(|signal| 128 + signal);
            ensure(code == Some(outcome.exit_code), || format!("the end after an interrupt: {outcome:?}"))?;
            return ensure(outcome.first_failure.is_none(), || "an interrupted job has a culprit".into());
        }
        ensure(outcome.interrupted.is_none(), || "nobody has interrupted the job".into())?;
        if self.is_cut_off {
            let is_said = outcome.first_failure.is_none() && outcome.exit_code == 1;
            return ensure(is_said, || format!("the end of a node that was cut off: {outcome:?}"));
        }
        self.is_consistent(outcome.first_failure)?;
        let code = outcome.first_failure.map_or(0, |failure| failure.code);
        ensure(outcome.exit_code == code, || format!("the exit code of {outcome:?}"))?;
        let all_well = self.processes.iter().all(|p| *p == Process::Ended(Exit::Code(0)));
        ensure(all_well == (code == 0), || format!("{outcome:?} of {:?}", self.processes))
    }

    /// Checks that the first failure is the one that an observer of all processes would name.
    fn is_consistent(&self, named: Option<FirstFailure>) -> Result<(), String> {
        let failures = || self.by_themselves.iter().filter(|(_, own)| !own.0.is_success());
        let Some(named) = named else {
            return ensure(failures().next().is_none(), || "a job with failures has no culprit".into());
        };
        let context = || format!("{named:?} of {:?}", self.by_themselves);
        let first = failures().min_by_key(|(_, (exit, origin, seen, order))| {
            (*origin != Origin::Itself, *seen, !matches!(exit, Exit::Signal(_)), *order)
        });
        let Some((gave_up, own_of_first)) = first else {
            return Err(format!("nobody has failed: {}", context()));
        };
        ensure(named.gave_up == *gave_up, || format!("another gave up first: {}", context()))?;
        let own = self.by_themselves.get(&named.rank);
        ensure(own.map(|own| own.0) == named.exit, || format!("it has not ended like that: {}", context()))?;
        if named.rank == *gave_up {
            return Ok(());
        }
        // Another rank is named only if the first that gave up did so because of others, and only one that has not failed.
        let is_secondary = own_of_first.1 != Origin::Itself;
        ensure(is_secondary && own.is_none_or(|own| own.0.is_success()), || {
            format!("an innocent rank is named: {}", context())
        })?;
        let is_stopped = |rank: &Rank| self.stopped.contains(rank);
        let stands_out =
            is_stopped(&named.rank) || self.stopped.iter().all(|rank| self.by_themselves.contains_key(rank));
        ensure(stands_out, || format!("a rank is stopped, and another is named: {}", context()))
    }

    /// Checks that a job that must end does so in bounded time.
    fn in_time(&self) -> Result<(), String> {
        let longest = EXIT_WINDOW + 2 * GRACE + KILL_TIMEOUT + 2 * KILL_INTERVAL + TELL_TIMEOUT + 8 * MOMENT;
        let late = self.ends_since.filter(|since| !self.is_over && self.now > *since + longest);
        ensure(late.is_none(), || format!("the job should have ended {longest:?} after {late:?}"))?;
        let due = self.core.next_deadline();
        ensure(due.is_some() || self.is_over || self.ends_since.is_none(), || "nothing ends the job".into())
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

impl World for SmallJob {
    type Step = Step;

    fn identify(&self, identity: &mut impl Hasher) {
        // Nothing follows an end, so all ends are equivalent.
        if !self.is_over {
            identify_by_debug(self, identity);
        }
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.is_over {
            return steps;
        }
        for (rank, process) in self.processes.iter().enumerate() {
            match process {
                Process::Runs => {
                    let by_signal = if self.is_signalled { signal::TERMINATE } else { signal::KILL };
                    for exit in
                        [0, 1, DO_NOT_RESTART].map(Exit::Code).into_iter().chain([Exit::Signal(by_signal)])
                    {
                        steps.push(Step::Exit(rank, exit, Origin::Itself));
                    }
                    let others = (0..self.processes.len()).filter(|other| *other != rank);
                    let others =
                        others.map(|other| Origin::Rank(Rank(other as u32))).chain([Origin::Another]);
                    steps.extend(others.map(|origin| Step::Exit(rank, Exit::Code(1), origin)));
                    if self.budget.stops > 0 {
                        steps.push(Step::Stop(rank));
                    }
                }
                Process::Stopped => {
                    steps.push(Step::Continue(rank));
                    steps.push(Step::Exit(rank, Exit::Signal(signal::KILL), Origin::Itself));
                }
                Process::Killed => steps.push(Step::Exit(rank, Exit::Signal(signal::KILL), Origin::Itself)),
                Process::Ended(_) | Process::LeftBehind => {}
            }
        }
        if self.budget.interrupts > 0 {
            steps.push(Step::Interrupt);
        }
        if self.budget.lifelines > 0 {
            steps.push(Step::LifelineCloses);
        }
        // A node that ends for a reason of its own does not look at the others.
        if self.budget.cuts > 0 && self.core.is_well() {
            steps.push(Step::CutOff);
        }
        if self.budget.leaves > 0 {
            steps.push(Step::OthersLeave);
        }
        if self.budget.moments > 0 {
            steps.push(Step::Moment);
        }
        match (self.core.next_deadline(), self.core.phase) {
            (Some(due), _) if due <= self.now => steps.push(Step::Tick),
            (Some(_), Phase::Killing { .. }) => {
                steps.push(Step::UntilGivenUp);
                if self.budget.rounds > 0 {
                    steps.push(Step::UntilDeadline);
                }
            }
            (Some(_), _) => steps.push(Step::UntilDeadline),
            (None, _) => {}
        }
        steps
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
        match *step {
            Step::Exit(rank, exit, origin) => {
                self.processes[rank] = Process::Ended(exit);
                let rank = Rank(rank as u32);
                if !self.is_signalled {
                    let order = self.by_themselves.len();
                    self.by_themselves.insert(rank, (exit, origin, self.now, order));
                    if !exit.is_success() {
                        self.ends_since.get_or_insert(self.now);
                    }
                }
                self.tell(Event::Exited { rank, exit, origin })
            }
            Step::Stop(rank) => {
                self.budget.stops -= 1;
                self.processes[rank] = Process::Stopped;
                self.stopped.insert(Rank(rank as u32));
                self.tell(Event::Stopped(Rank(rank as u32), STOP))
            }
            Step::Continue(rank) => {
                self.processes[rank] = Process::Runs;
                self.stopped.remove(&Rank(rank as u32));
                self.tell(Event::Continued(Rank(rank as u32)))
            }
            Step::Interrupt => {
                self.budget.interrupts -= 1;
                if !self.has_failed() {
                    self.interrupted.push(signal::INTERRUPT);
                }
                self.ends_since.get_or_insert(self.now);
                self.tell(Event::Interrupted(signal::INTERRUPT))
            }
            Step::LifelineCloses => {
                self.budget.lifelines -= 1;
                if !self.has_failed() {
                    self.interrupted.push(signal::KILL);
                }
                self.ends_since.get_or_insert(self.now);
                self.tell(Event::LifelineClosed)
            }
            Step::CutOff => {
                self.budget.cuts -= 1;
                self.is_cut_off = true;
                self.ends_since.get_or_insert(self.now);
                self.tell(Event::CutOff)
            }
            Step::OthersLeave => {
                self.budget.leaves -= 1;
                self.tell(Event::OthersLeft)
            }
            Step::Moment => {
                self.budget.moments -= 1;
                self.now += MOMENT;
                self.in_time()
            }
            Step::UntilDeadline => {
                if matches!(self.core.phase, Phase::Killing { .. }) {
                    self.budget.rounds -= 1;
                }
                self.now = self.core.next_deadline().unwrap_or(self.now);
                self.in_time()
            }
            Step::UntilGivenUp => {
                let Phase::Killing { give_up, .. } = self.core.phase else { return Ok(()) };
                // The next round may begin slightly later than that.
                self.now = self.core.next_deadline().map_or(give_up, |due| due.max(give_up));
                self.in_time()
            }
            Step::Tick => self.tell(Event::Tick),
        }
    }

    fn end(&self) -> Result<(), String> {
        ensure(self.is_over, || format!("the job neither runs nor ends: {self:?}"))
    }
}

fn every_run(ranks: u32, max_restarts: u32, budget: Budget, most: usize) {
    match explore(SmallJob::new(ranks, max_restarts, budget), most) {
        Ok(visited) => println!("{ranks} ranks, {max_restarts} restarts: {visited}"),
        Err(found) => panic!("{found}"),
    }
}

#[test]
fn every_run_of_two_ranks_with_a_restart_ends_well() {
    let budget = Budget { stops: 1, interrupts: 1, lifelines: 0, cuts: 0, leaves: 0, moments: 1, rounds: 1 };
    every_run(2, 1, budget, 1_000_000);
}

#[test]
fn every_run_of_three_ranks_ends_well() {
    let budget = Budget { stops: 1, interrupts: 0, lifelines: 0, cuts: 0, leaves: 0, moments: 1, rounds: 0 };
    every_run(3, 0, budget, 1_000_000);
}

#[test]
fn every_run_ends_well_whatever_signals_the_launcher_gets() {
    let budget = Budget { stops: 0, interrupts: 2, lifelines: 1, cuts: 0, leaves: 0, moments: 1, rounds: 1 };
    every_run(2, 1, budget, 1_000_000);
}

#[test]
fn every_run_of_a_node_that_is_cut_off_ends_well() {
    let budget = Budget { stops: 0, interrupts: 1, lifelines: 0, cuts: 1, leaves: 1, moments: 1, rounds: 1 };
    every_run(2, 0, budget, 1_000_000);
}

#[test]
#[ignore = "minutes, and gigabytes of memory"]
fn every_run_of_three_ranks_with_a_restart_and_an_interrupt_ends_well() {
    let budget = Budget { stops: 1, interrupts: 1, lifelines: 0, cuts: 0, leaves: 0, moments: 1, rounds: 1 };
    every_run(3, 1, budget, 20_000_000);
}
