//! Every run of a small job's rendezvous: requests and replies in transit for any time, connections that close, ranks that die
//! or never join, deadlines that pass, and a restart with requests of the old epoch still in transit.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use ryzanstein_config::BackendChoice;
use ryzanstein_explorer::{World, explore, identify_by_debug};
use ryzanstein_process_group::{BackendKind, Capability, Cpus};

use super::*;
use ryzanstein_process_group::Candidate;

const TIMEOUT: Time = Duration::from_secs(10);
const PAUSE: Time = Duration::from_secs(3);
const KEY: &str = "key";

/// The next request of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Want {
    Join,
    Set,
    Get,
}

/// The requests of each rank, in this order.
const PROGRAMS: [&[Want]; 3] =
    [&[Want::Join, Want::Set, Want::Join], &[Want::Join, Want::Get, Want::Join], &[Want::Join, Want::Join]];

/// The state of a rank's request.
#[derive(Clone, PartialEq, Debug)]
enum Request {
    None,
    /// In transit to the rendezvous.
    Sent(RequestId),
    /// Pending in the core, with its deadline.
    Pending(RequestId, Time),
    /// Answered, with the reply in transit.
    Answered(RequestId, Result<Reply, Refusal>),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Life {
    Lives,
    /// The process has made all its requests.
    Done,
    /// The process has been refused, or has lost its connection, and gives up.
    GaveUp,
    /// The process has died.
    Dead,
}

/// A rank's process in one epoch.
#[derive(Clone, PartialEq, Debug)]
struct Process {
    rank: Rank,
    epoch: Epoch,
    /// Number of requests that have been granted so far.
    done: usize,
    request: Request,
    life: Life,
}

impl Process {
    fn new(rank: usize, epoch: Epoch) -> Self {
        Self { rank: Rank(rank as u32), epoch, done: 0, request: Request::None, life: Life::Lives }
    }

    fn want(&self) -> Option<Want> {
        PROGRAMS[self.rank.index()].get(self.done).copied()
    }
}

/// Maximum numbers of rare events in a run.
#[derive(Clone, Hash, Debug)]
struct Budget {
    deaths: u32,
    /// Number of connections that close while their processes live on.
    closures: u32,
    restarts: u32,
    pauses: u32,
    /// Number of ranks that leave with code 0 before they join.
    desertions: u32,
}

#[derive(Debug)]
enum Step {
    Send(usize),
    /// The rendezvous receives the request.
    Deliver(usize),
    /// The process receives the reply.
    Reply(usize),
    /// The process's connection closes.
    Close(usize),
    Die(usize),
    Desert(usize),
    /// The rendezvous is notified of a closed connection.
    HearOfClosure(usize),
    /// The launcher tells the rendezvous that the job has failed.
    TellFailure,
    /// The launcher tells the rendezvous that this rank will not join.
    TellDesertion(Rank),
    Restart,
    /// Some time passes.
    Pause,
    /// Time passes up to the next deadline. The order of the tick and of other events at that time is open.
    UntilDeadline,
    Tick,
}

#[derive(Clone, Debug)]
struct SmallRendezvous {
    core: Core,
    now: Time,
    budget: Budget,
    requests: u64,
    /// Processes of both epochs.
    processes: Vec<Process>,
    ranks: usize,
    /// Requests whose connections have closed without notice to the core, with their ranks.
    closed: Vec<(RequestId, Rank)>,
    /// True if the launcher has detected a failure and has not reported it.
    failure_to_tell: bool,
    deserters: Vec<Rank>,
    /// True if an event or a passed deadline may make requests of this epoch fail.
    has_reason: bool,
}

impl SmallRendezvous {
    fn new(ranks: usize, budget: Budget) -> Self {
        let epoch = Epoch(1);
        Self {
            core: Core::new(ranks as u32, "1", epoch),
            now: Duration::ZERO,
            budget,
            requests: 0,
            processes: (0..ranks).map(|rank| Process::new(rank, epoch)).collect(),
            ranks,
            closed: Vec::new(),
            failure_to_tell: false,
            deserters: Vec::new(),
            has_reason: false,
        }
    }

    /// Returns the living processes of the current epoch.
    fn current(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().filter(|process| process.epoch == self.core.epoch)
    }

    fn event(&self, index: usize, id: RequestId, deadline: Time) -> Event {
        let Process { rank, epoch, .. } = self.processes[index];
        match self.processes[index].want() {
            Some(Want::Join) | None => {
                let candidate = Candidate {
                    host: "h".into(),
                    pid: 100 * epoch.0 as u32 + rank.0,
                    cpus: Cpus::default(),
                    data_address: None,
                    wanted: BackendChoice::Tcp,
                    capabilities: vec![Capability::usable(BackendKind::Tcp)],
                };
                let participant =
                    Participant { rank: Some(rank), local_rank: None, node_rank: None, candidate };
                let (world_size, version) = (self.ranks as u32, "1".into());
                Event::Join(id, Join { epoch: Some(epoch), world_size, version, deadline, participant })
            }
            Some(Want::Set) => Event::Set(id, epoch, KEY.into(), value(epoch)),
            Some(Want::Get) => Event::Get(id, epoch, KEY.into(), deadline),
        }
    }

    fn tell(&mut self, event: Event) -> Result<(), String> {
        let waited = self.waiting();
        self.tell_while(&waited, event)
    }

    /// Tells the core of an event that occurs while these requests wait, according to the model.
    fn tell_while(&mut self, waited: &[(Want, Rank)], event: Event) -> Result<(), String> {
        let is_late = self.core.next_deadline().is_some_and(|due| due <= self.now);
        self.has_reason |= is_late;
        let actions = self.core.handle(self.now, event);
        for (request, answer) in actions {
            self.answer(request, answer, waited)?;
        }
        self.books_balance()
    }

    fn waiting(&self) -> Vec<(Want, Rank)> {
        let pending = self.current().filter(|process| matches!(process.request, Request::Pending(..)));
        pending.filter_map(|process| Some((process.want()?, process.rank))).collect()
    }

    fn answer(
        &mut self,
        id: RequestId,
        answer: Result<Reply, Refusal>,
        waited: &[(Want, Rank)],
    ) -> Result<(), String> {
        let current = self.core.epoch;
        let Some(process) = self
            .processes
            .iter_mut()
            .find(|process| matches!(process.request, Request::Pending(pending, _) if pending == id))
        else {
            // The reply to a request whose connection has closed is dropped.
            return ensure(self.closed.iter().any(|(closed, _)| *closed == id), || {
                format!("{id:?} is answered, which nobody waits for")
            });
        };
        let want = process.want().ok_or("a process that wants nothing is answered")?;
        match &answer {
            Ok(reply) => {
                ensure(process.epoch == current, || {
                    format!("{reply:?} for a rank of epoch {}", process.epoch)
                })?;
                let fits = match (want, reply) {
                    (Want::Join, Reply::Rank(rank)) => *rank == process.rank,
                    (Want::Get, Reply::Value(got)) => *got == value(process.epoch),
                    (Want::Set, Reply::Done) => true,
                    _ => false,
                };
                ensure(fits, || format!("{want:?} of rank {} is answered with {reply:?}", process.rank))?;
            }
            Err(refusal) => {
                let is_stale = process.epoch != current;
                ensure(is_stale || self.has_reason, || {
                    format!("{want:?} is refused without a reason: {refusal:?}")
                })?;
                if let Refusal::Timeout { missing, .. } = refusal {
                    let rank = process.rank;
                    let there = |r: &Rank| *r == rank || waited.contains(&(want, *r));
                    let absent = Rank::all(self.ranks).filter(|rank| want != Want::Get && !there(rank));
                    // The core may not have been notified of these.
                    let is_known = |rank: &Rank| self.closed.iter().all(|(_, closed)| closed != rank);
                    let expected: Vec<Rank> = absent.filter(is_known).collect();
                    let blamed: Vec<Rank> = missing.iter().copied().filter(is_known).collect();
                    ensure(blamed == expected, || {
                        format!("{want:?}: {missing:?} is blamed, not {expected:?}")
                    })?;
                }
            }
        }
        process.request = Request::Answered(id, answer);
        Ok(())
    }

    /// Checks that the state of the core matches the model.
    fn books_balance(&self) -> Result<(), String> {
        let mut pending: Vec<(Time, RequestId)> = Vec::new();
        for process in &self.processes {
            if let Request::Pending(id, deadline) = process.request {
                pending.push((deadline, id));
            }
        }
        pending.sort_unstable();
        let late = pending.iter().find(|(deadline, _)| *deadline <= self.now);
        ensure(late.is_none(), || format!("{late:?} waits past its deadline"))?;
        let kept = |(_, id): &&(Time, RequestId)| self.closed.iter().all(|(closed, _)| closed != id);
        let known: Vec<_> = self.core.deadlines.iter().filter(kept).copied().collect();
        ensure(known == pending, || format!("the core knows {known:?}, and {pending:?} wait"))?;
        ensure(self.core.waits.len() == self.core.deadlines.len(), || "a wait has no deadline".into())?;
        let for_keys: usize = self.core.waiting_for_key.values().map(BTreeSet::len).sum();
        let joins = self.core.waits.values().filter(|wait| wait.key.is_none()).count();
        ensure(for_keys + joins == self.core.waits.len(), || {
            format!("{for_keys} for keys, {joins} joins of {}", self.core.waits.len())
        })?;
        if let Some(joined) = self.core.joined() {
            ensure(joined.roster.epoch == self.core.epoch, || "a roster of another epoch".into())?;
            let members = joined.roster.members.iter().map(|member| (member.rank, member.pid));
            let expected = Rank::all(self.ranks).map(|rank| (rank, 100 * self.core.epoch.0 as u32 + rank.0));
            ensure(members.eq(expected), || format!("the roster {joined:?}"))?;
        }
        Ok(())
    }

    /// Closes the connection of a process, with all its requests.
    fn close(&mut self, index: usize) {
        match std::mem::replace(&mut self.processes[index].request, Request::None) {
            Request::Pending(id, _) => self.closed.push((id, self.processes[index].rank)),
            Request::None | Request::Sent(_) | Request::Answered(..) => {}
        }
    }
}

fn value(epoch: Epoch) -> Bytes {
    Bytes::from(format!("of epoch {epoch}"))
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

impl World for SmallRendezvous {
    type Step = Step;

    fn identify(&self, identity: &mut impl Hasher) {
        let Core {
            epoch, admission, joined, exited, closed, values, waiting_for_key, waits, deadlines, ..
        } = &self.core;
        // Hash maps show their entries in any order.
        let waiting: BTreeMap<_, _> = waiting_for_key.iter().collect();
        let waits: BTreeMap<_, _> = waits.iter().collect();
        let core = (
            epoch,
            admission,
            joined.is_some(),
            (exited, closed),
            values.get(KEY),
            waiting,
            waits,
            deadlines,
        );
        identify_by_debug(&core, identity);
        identify_by_debug(&(&self.processes, &self.closed, &self.deserters), identity);
        (self.now, &self.budget, self.failure_to_tell, self.has_reason).hash(identity);
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let failed = self.processes.iter().any(|process| process.life == Life::Dead);
        for (index, process) in self.processes.iter().enumerate() {
            let is_current = process.epoch == self.core.epoch;
            match process.request {
                Request::None if process.life == Life::Lives && process.want().is_some() => {
                    steps.push(Step::Send(index));
                    if process.want() == Some(Want::Join) && self.budget.desertions > 0 {
                        steps.push(Step::Desert(index));
                    }
                }
                Request::None | Request::Pending(..) => {}
                Request::Sent(_) => steps.push(Step::Deliver(index)),
                Request::Answered(..) => steps.push(Step::Reply(index)),
            }
            if process.request != Request::None && self.budget.closures > 0 && process.life == Life::Lives {
                steps.push(Step::Close(index));
            }
            if is_current && process.life == Life::Lives && self.budget.deaths > 0 {
                steps.push(Step::Die(index));
            }
        }
        steps.extend((0..self.closed.len()).map(Step::HearOfClosure));
        steps.extend(self.failure_to_tell.then_some(Step::TellFailure));
        steps.extend(self.deserters.iter().map(|rank| Step::TellDesertion(*rank)));
        if failed && self.budget.restarts > 0 {
            steps.push(Step::Restart);
        }
        if self.budget.pauses > 0 {
            steps.push(Step::Pause);
        }
        match self.core.next_deadline() {
            Some(due) if due <= self.now => steps.push(Step::Tick),
            Some(_) => steps.push(Step::UntilDeadline),
            None => {}
        }
        steps
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
        match *step {
            Step::Send(index) => {
                self.requests += 1;
                self.processes[index].request = Request::Sent(RequestId(self.requests));
                Ok(())
            }
            Step::Deliver(index) => {
                let Request::Sent(id) = self.processes[index].request else { return Ok(()) };
                // The server computes the deadline from the timeout of the request when it arrives.
                let deadline = self.now + TIMEOUT;
                let (event, waited) = (self.event(index, id, deadline), self.waiting());
                self.processes[index].request = Request::Pending(id, deadline);
                self.tell_while(&waited, event)?;
                if self.processes[index].life == Life::Dead {
                    self.close(index);
                }
                Ok(())
            }
            Step::Reply(index) => {
                let process = &mut self.processes[index];
                let Request::Answered(_, answer) = std::mem::replace(&mut process.request, Request::None)
                else {
                    return Ok(());
                };
                match answer {
                    _ if process.life != Life::Lives => {}
                    Err(_) => process.life = Life::GaveUp,
                    Ok(_) => {
                        process.done += 1;
                        if process.want().is_none() {
                            process.life = Life::Done;
                        }
                    }
                }
                Ok(())
            }
            Step::Close(index) => {
                self.budget.closures -= 1;
                self.has_reason = true;
                self.close(index);
                // A request to join is repeated. For any other request, it is unknown whether it was carried out.
                if self.processes[index].done > 0 {
                    self.processes[index].life = Life::GaveUp;
                }
                Ok(())
            }
            Step::Die(index) => {
                self.budget.deaths -= 1;
                self.has_reason = true;
                // A request in transit may still arrive; a pending one gets no reply.
                if !matches!(self.processes[index].request, Request::Sent(_)) {
                    self.close(index);
                }
                self.processes[index].life = Life::Dead;
                self.failure_to_tell = true;
                Ok(())
            }
            Step::Desert(index) => {
                self.budget.desertions -= 1;
                self.has_reason = true;
                self.processes[index].life = Life::Done;
                self.deserters.push(self.processes[index].rank);
                Ok(())
            }
            Step::HearOfClosure(index) => {
                let (id, _) = self.closed[index];
                self.tell(Event::Disconnected(id))?;
                self.closed.remove(index);
                Ok(())
            }
            Step::TellFailure => {
                self.failure_to_tell = false;
                self.tell(Event::JobFailed("a rank died".into()))
            }
            Step::TellDesertion(rank) => {
                self.deserters.retain(|deserter| *deserter != rank);
                self.tell(Event::ProcessExited(rank, "exited".into()))
            }
            Step::Restart => {
                self.budget.restarts -= 1;
                // The launcher has killed all processes, but requests in transit may still arrive.
                for index in 0..self.processes.len() {
                    if !matches!(self.processes[index].request, Request::Sent(_)) {
                        self.close(index);
                    }
                    self.processes[index].life = Life::Dead;
                }
                (self.failure_to_tell, self.has_reason) = (false, false);
                self.deserters.clear();
                let next = Epoch(self.core.epoch.0 + 1);
                self.tell(Event::NewEpoch(next))?;
                self.processes.extend((0..self.ranks).map(|rank| Process::new(rank, next)));
                Ok(())
            }
            Step::Pause => {
                self.budget.pauses -= 1;
                self.now += PAUSE;
                Ok(())
            }
            Step::UntilDeadline => {
                self.now = self.core.next_deadline().unwrap_or(self.now);
                Ok(())
            }
            Step::Tick => self.tell(Event::Tick),
        }
    }

    fn end(&self) -> Result<(), String> {
        let waiting = self.current().find(|process| process.life == Life::Lives);
        ensure(waiting.is_none(), || format!("{waiting:?} waits for ever"))?;
        let live = self.processes.iter().find(|p| p.epoch != self.core.epoch && p.life == Life::Lives);
        ensure(live.is_none(), || format!("{live:?} outlives its epoch"))?;
        ensure(self.core.waiting() == 0, || "the core waits for nobody".into())?;
        let all_done = self.current().all(|process| process.life == Life::Done);
        ensure(all_done || self.has_reason, || "a job without a fault has not ended well".into())
    }
}

fn every_run(ranks: usize, budget: Budget, most: usize) {
    match explore(SmallRendezvous::new(ranks, budget), most) {
        Ok(visited) => println!("{ranks} ranks: {visited}"),
        Err(found) => panic!("{found}"),
    }
}

#[test]
fn every_run_of_two_ranks_with_a_death_and_a_restart_ends_well() {
    every_run(2, Budget { deaths: 1, closures: 0, restarts: 1, pauses: 0, desertions: 0 }, 1_000_000);
}

#[test]
fn every_run_of_two_ranks_with_closed_connections_and_a_desertion_ends_well() {
    every_run(2, Budget { deaths: 0, closures: 1, restarts: 0, pauses: 1, desertions: 1 }, 1_000_000);
}

#[test]
fn every_run_of_three_ranks_with_a_death_ends_well() {
    every_run(3, Budget { deaths: 1, closures: 0, restarts: 0, pauses: 0, desertions: 0 }, 1_000_000);
}

#[test]
#[ignore = "minutes, and gigabytes of memory"]
fn every_run_of_three_ranks_with_all_faults_ends_well() {
    every_run(3, Budget { deaths: 1, closures: 1, restarts: 1, pauses: 1, desertions: 1 }, 20_000_000);
}
