//! Every run of small groups: members that call in any order or not at all, messages that overtake those of other links, and one
//! fault. Time advances in steps: in each, every watchdog looks once, at any moment among the messages.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use ryzanstein_explorer::{World, explore, identify_by_debug};

use super::network::{all_reduce, rank};
use super::*;
use crate::membership::roster::Cpus;
use crate::types::rank::LocalRank;

/// A fault that may happen in a run, once, to any member and at any moment. A missing call is no fault: members may omit calls in
/// every run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    Kill,
    Cut,
    Stop,
    /// It leaves, and the other members continue to call.
    Leave,
    /// Its calls differ from those of the members before it.
    Diverge,
    /// A collective never ends, although all members have entered it.
    Hang,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    fault: Fault,
    members: usize,
    calls: usize,
    /// The deadline of a call.
    timeout: Duration,
    /// A step of time.
    step: Duration,
    /// True if messages may stay in transit until the next step.
    is_slow: bool,
    /// Number of members that have made their first call when the run begins.
    callers: usize,
    /// True if all messages on a link are delivered at once, as to a driver that reads late.
    is_batched: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Life {
    Lives,
    Stopped,
    /// It makes no more calls, and says goodbye when it has looked.
    Leaves,
    Left,
    Dead,
}

#[derive(Clone)]
struct Node {
    core: Rc<Core>,
    /// Identity of the core's state.
    identity: u64,
    life: Life,
    /// Deadline of each call that it has enqueued.
    called: Vec<Instant>,
    /// Number of calls that its GPU has done, and number of calls that its watchdog knows to be done.
    done: usize,
    known: usize,
    failure: Option<Error>,
    /// It has looked in this step of time.
    has_looked: bool,
}

#[derive(Clone)]
struct SmallGroup {
    limits: Limits,
    start: Instant,
    time: u32,
    nodes: Vec<Node>,
    /// The messages from each member to each other, with the time of sending, oldest first.
    links: Vec<VecDeque<(u32, PeerEvent)>>,
    has_struck: bool,
    /// The members that may be blamed: for a fault, or for being late.
    guilty: BTreeSet<usize>,
    cut: Vec<(usize, usize)>,
    /// A late member has made its call, before all other members knew that it was late.
    has_come_late: bool,
}

#[derive(Debug)]
enum Step {
    Call(usize),
    Deliver { from: usize, to: usize },
    Look(usize),
    TimePasses,
    Kill(usize),
    Cut(usize, usize),
    Stop(usize),
    Leave(usize),
}

impl SmallGroup {
    fn new(limits: Limits) -> Self {
        let n = limits.members;
        let all: Vec<Member> = (0..n)
            .map(|position| Member {
                rank: rank(position),
                local_rank: LocalRank(position as u32),
                node_rank: 0,
                host: "h".into(),
                pid: 1000 + position as u32,
                cpus: Cpus::default(),
                data_address: None,
            })
            .collect();
        let node = |position| Node {
            core: Rc::new(Core::new(Arc::new(GroupMembers {
                group: "g".into(),
                all: all.clone(),
                position,
            }))),
            identity: 0,
            life: Life::Lives,
            called: Vec::new(),
            done: 0,
            known: 0,
            failure: None,
            has_looked: false,
        };
        let guilty = if limits.fault == Fault::Diverge { (0..n).collect() } else { BTreeSet::new() };
        Self {
            limits,
            start: Instant::now(),
            time: 0,
            nodes: (0..n).map(node).collect(),
            links: vec![VecDeque::new(); n * n],
            has_struck: false,
            guilty,
            cut: Vec::new(),
            has_come_late: false,
        }
    }

    fn now(&self) -> Instant {
        self.start + self.limits.step * self.time
    }

    fn others(&self, position: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.limits.members).filter(move |other| *other != position)
    }

    fn link(&mut self, from: usize, to: usize) -> &mut VecDeque<(u32, PeerEvent)> {
        let n = self.limits.members;
        &mut self.links[from * n + to]
    }

    fn put(&mut self, from: usize, to: usize, event: PeerEvent) {
        let time = self.time;
        if !self.cut.contains(&(from, to)) && self.nodes[to].life != Life::Dead {
            self.link(from, to).push_back((time, event));
        }
    }

    /// Calls a member's core, and executes its actions.
    fn with(
        &mut self,
        position: usize,
        what: impl FnOnce(&mut Core, Instant, &mut Vec<Action>),
    ) -> Result<(), String> {
        let (now, mut actions) = (self.now(), Vec::new());
        let node = &mut self.nodes[position];
        let core = Rc::make_mut(&mut node.core);
        what(core, now, &mut actions);
        let mut hasher = DefaultHasher::new();
        // All fields except the members, which never change.
        identify_by_debug(
            &(&core.phase, &core.log, &core.detector, &core.messages, &core.pending),
            &mut hasher,
        );
        identify_by_debug(&(&core.entry, core.exits, &core.progress, &core.heartbeats), &mut hasher);
        (core.is_leaving, core.has_announced_exit).hash(&mut hasher);
        node.identity = hasher.finish();
        for action in actions {
            match action {
                Action::Send(to, message) => self.put(position, to, PeerEvent::Message(message)),
                Action::Broadcast(message) => {
                    for to in self.others(position) {
                        self.put(position, to, PeerEvent::Message(message.clone()));
                    }
                }
                Action::Fail(error) => self.fail(position, error)?,
                Action::PlaceMark(_) => return Err("every call has its mark".into()),
                Action::Verified(_) => {}
                Action::Unresponsive(other, is_silent) => {
                    let is_right =
                        !is_silent || self.nodes[other].life == Life::Stopped || self.is_cut(other);
                    ensure(is_right, || format!("member {position} suspects {other}"))?;
                }
            }
        }
        Ok(())
    }

    fn is_cut(&self, position: usize) -> bool {
        self.cut.iter().any(|(from, _)| *from == position)
    }

    /// Judges an error: it must only blame members that are guilty.
    fn fail(&mut self, position: usize, error: Error) -> Result<(), String> {
        let said = error.to_string();
        let context = || format!("member {position} fails: {said}; to blame: {:?}", self.guilty);
        ensure(self.nodes[position].failure.is_none(), || format!("twice: {}", context()))?;
        let blamed: Vec<Rank> = match &error {
            Error::PeerLost { rank, .. } | Error::PeerUnresponsive { rank, .. } => vec![*rank],
            Error::Timeout { missing, .. } => missing.clone(),
            Error::Mismatch { .. } => {
                ensure(self.limits.fault == Fault::Diverge, context)?;
                Vec::new()
            }
            Error::PeerAborted { rank: from, reason } => {
                let from = (0..self.limits.members).find(|member| rank(*member) == *from);
                let gives_up = from.is_some_and(|from| {
                    let node = &self.nodes[from];
                    node.failure.is_some() || node.core.is_asking() || node.life == Life::Dead
                });
                ensure(gives_up, || format!("nobody has given up: {}", context()))?;
                named(reason)
            }
            _ => return Err(format!("an error without a reason: {}", context())),
        };
        let innocent =
            blamed.iter().find(|blamed| !self.guilty.iter().any(|guilty| rank(*guilty) == **blamed));
        ensure(innocent.is_none(), || format!("an innocent member is blamed: {}", context()))?;
        // A call that hangs is the fault of no rank that can be named; calls that differ are named together. A member that calls
        // between the deadline and the question about missing members counts as present when it answers.
        let is_nameless = matches!(self.limits.fault, Fault::Hang | Fault::Diverge) || self.has_come_late;
        ensure(is_nameless || !blamed.is_empty(), || format!("nobody is blamed: {}", context()))?;
        let is_loss = matches!(error, Error::PeerLost { .. }) || said.contains("lost rank");
        let may_lose = matches!(self.limits.fault, Fault::Kill | Fault::Cut | Fault::Leave);
        ensure(!is_loss || may_lose && self.has_struck, || format!("nobody is lost: {}", context()))?;
        self.nodes[position].failure = Some(error);
        Ok(())
    }

    /// The GPUs execute every call that all members have entered.
    fn compute(&mut self) {
        if matches!(self.limits.fault, Fault::Hang) {
            return;
        }
        loop {
            let is_ready = |position: usize| {
                let number = self.nodes[position].done;
                let is_there = |other: &Node| {
                    // The kernels of a lost member end with it, unless they were done.
                    let runs = other.failure.is_none() && other.life != Life::Dead;
                    other.done > number || other.called.len() > number && runs
                };
                self.nodes[position].called.len() > number
                    && self.nodes[position].failure.is_none()
                    && self.limits.fault != Fault::Diverge
                    && self.nodes.iter().all(is_there)
            };
            let ready: Vec<usize> = (0..self.limits.members).filter(|position| is_ready(*position)).collect();
            if ready.is_empty() {
                return;
            }
            for position in ready {
                self.nodes[position].done += 1;
            }
        }
    }

    /// Returns true if a member still takes part.
    fn plays(&self, position: usize) -> bool {
        let node = &self.nodes[position];
        matches!(node.life, Life::Lives | Life::Leaves) && node.failure.is_none()
    }

    /// Returns true if a member waits for the others.
    fn waits(&self, position: usize) -> bool {
        let node = &self.nodes[position];
        self.plays(position) && (node.known < node.called.len() || node.core.is_asking())
    }

    /// Returns true if a message has to be delivered before time passes.
    fn is_due(&self, from: usize, to: usize) -> bool {
        let oldest = self.links[from * self.limits.members + to].front();
        let is_open = matches!(self.nodes[to].life, Life::Lives | Life::Leaves);
        is_open && oldest.is_some_and(|(sent, _)| !self.limits.is_slow || *sent < self.time)
    }

    /// Checks that no member waits past the deadline and the time for answers.
    fn in_time(&self) -> Result<(), String> {
        for position in (0..self.limits.members).filter(|position| self.waits(*position)) {
            let node = &self.nodes[position];
            let Some(deadline) = node.called.get(node.known) else { continue };
            let latest = *deadline + ANSWERS + 2 * self.limits.step;
            ensure(self.now() <= latest, || format!("member {position} waits past its deadline"))?;
        }
        Ok(())
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

/// Returns the ranks that another member's reason blames.
fn named(reason: &str) -> Vec<Rank> {
    let numbers = |text: &str| -> Vec<Rank> {
        let words = text.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
        words.filter_map(|word| word.parse().ok()).map(Rank).collect()
    };
    let blamed = |part: &str| numbers(part.rsplit("rank").next().unwrap_or_default());
    if let Some((_, lost)) = reason.split_once("lost rank ") {
        return numbers(lost).into_iter().take(1).collect();
    }
    for end in [" is unresponsive", " is not there", " are not there"] {
        if let Some((before, _)) = reason.split_once(end) {
            return blamed(before);
        }
    }
    Vec::new()
}

impl World for SmallGroup {
    type Step = Step;

    fn identify(&self, identity: &mut impl Hasher) {
        self.time.hash(identity);
        for node in &self.nodes {
            (node.identity, node.life, &node.called, node.done, node.known, node.has_looked).hash(identity);
            node.failure.is_some().hash(identity);
        }
        for link in &self.links {
            // The time of sending matters only if it forces a delivery.
            link.front().map(|(sent, _)| *sent).hash(identity);
            identify_by_debug(&link.iter().map(|(_, event)| event).collect::<Vec<_>>(), identity);
        }
        (self.has_struck, self.has_come_late, &self.guilty, &self.cut).hash(identity);
    }

    fn steps(&self) -> Vec<Step> {
        let (mut steps, n) = (Vec::new(), self.limits.members);
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let is_open = matches!(self.nodes[to].life, Life::Lives | Life::Leaves);
            if is_open && !self.links[from * n + to].is_empty() {
                steps.push(Step::Deliver { from, to });
            }
        }
        if !(0..n).any(|position| self.plays(position)) {
            return steps;
        }
        let may_strike = !self.has_struck;
        for position in (0..n).filter(|position| self.plays(*position)) {
            let node = &self.nodes[position];
            if node.life == Life::Lives && node.called.len() < self.limits.calls {
                steps.push(Step::Call(position));
            }
            let is_needed = self.waits(position) || node.life == Life::Leaves;
            if !node.has_looked && is_needed {
                steps.push(Step::Look(position));
            }
            match self.limits.fault {
                Fault::Kill if may_strike => steps.push(Step::Kill(position)),
                Fault::Stop if may_strike => steps.push(Step::Stop(position)),
                Fault::Leave if may_strike => steps.push(Step::Leave(position)),
                Fault::Cut if may_strike => {
                    steps.extend((0..position).map(|other| Step::Cut(position, other)));
                }
                _ => {}
            }
        }
        let somebody_waits = (0..n).any(|position| self.waits(position));
        let all_have_looked = (0..n).all(|position| !self.waits(position) || self.nodes[position].has_looked);
        let is_due = (0..n * n).any(|link| self.is_due(link / n, link % n));
        if somebody_waits && all_have_looked && !is_due {
            steps.push(Step::TimePasses);
        }
        steps
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
        match *step {
            Step::Call(position) => {
                let (at, deadline) = (self.now(), self.now() + self.limits.timeout);
                let entry = self.nodes[position].called.len() as u64 + 1;
                let is_other = self.limits.fault == Fault::Diverge && position == 0;
                let call = all_reduce(8 + usize::from(is_other));
                let called =
                    Called { stream: 0, entry, call, sequence: entry, at, deadline, is_captured: false };
                self.has_come_late |= self.guilty.contains(&position);
                self.nodes[position].called.push(deadline);
                self.with(position, |core, now, out| {
                    core.caller(now, CallerEvent::Called(called), out);
                    core.marked(0);
                })
            }
            Step::Deliver { from, to } => {
                let most = if self.limits.is_batched { usize::MAX } else { 1 };
                let link = self.link(from, to);
                let batch: Vec<_> =
                    link.drain(..most.min(link.len())).map(|(_, event)| (from, event)).collect();
                self.with(to, |core, now, out| core.peers(now, batch, out))
            }
            Step::Look(position) => {
                self.compute();
                let now = self.now();
                let node = &mut self.nodes[position];
                node.has_looked = true;
                let reached = [node.done - node.known, 0];
                node.known = node.done;
                // A member that has not entered a call whose deadline has passed is late.
                if node.called.get(node.known).is_some_and(|deadline| *deadline <= now) {
                    let number = node.known;
                    let late =
                        (0..self.limits.members).filter(|other| self.nodes[*other].called.len() <= number);
                    self.guilty.extend(late.collect::<Vec<_>>());
                }
                let exits = self.nodes[position].called.len() as u64;
                let seen = Observation { has_answered: true, exits, reached, error: None };
                self.with(position, |core, now, out| core.observe(now, seen, out))?;
                let node = &mut self.nodes[position];
                if node.life == Life::Leaves && node.failure.is_none() && node.known == node.called.len() {
                    node.life = Life::Left;
                    for other in self.others(position) {
                        self.put(position, other, PeerEvent::Message(ControlMessage::Goodbye));
                    }
                }
                Ok(())
            }
            Step::TimePasses => {
                self.time += 1;
                self.nodes.iter_mut().for_each(|node| node.has_looked = false);
                self.in_time()
            }
            Step::Kill(position) => {
                self.has_struck = true;
                self.guilty.insert(position);
                for other in self.others(position) {
                    self.put(position, other, PeerEvent::Lost("closed".into()));
                    self.link(other, position).clear();
                }
                self.nodes[position].life = Life::Dead;
                Ok(())
            }
            Step::Cut(a, b) => {
                self.has_struck = true;
                self.guilty.extend([a, b]);
                for (from, to) in [(a, b), (b, a)] {
                    self.put(from, to, PeerEvent::Lost("reset".into()));
                    self.cut.push((from, to));
                }
                Ok(())
            }
            Step::Stop(position) => {
                self.has_struck = true;
                self.guilty.insert(position);
                self.nodes[position].life = Life::Stopped;
                Ok(())
            }
            Step::Leave(position) => {
                self.has_struck = true;
                if self.nodes[position].called.len() < self.limits.calls {
                    self.guilty.insert(position);
                }
                self.nodes[position].life = Life::Leaves;
                self.with(position, |core, now, out| core.caller(now, CallerEvent::Leaving, out))
            }
        }
    }

    fn end(&self) -> Result<(), String> {
        for (position, node) in self.nodes.iter().enumerate().filter(|(position, _)| self.plays(*position)) {
            let is_done = node.known == self.limits.calls;
            ensure(is_done, || format!("member {position} is left waiting: {:?}", node.core))?;
        }
        Ok(())
    }
}

fn every_run(limits: Limits, most: usize) {
    let mut group = SmallGroup::new(limits);
    for position in 0..limits.callers {
        group.take(&Step::Call(position)).expect("a call");
    }
    match explore(group, most) {
        Ok(visited) => println!("{:?}, {} members: {visited}", limits.fault, limits.members),
        Err(found) => panic!("{:?}: {found}", limits.fault),
    }
}

const SMALL: Limits = Limits {
    fault: Fault::None,
    members: 2,
    calls: 2,
    timeout: Duration::from_secs(1),
    step: Duration::from_millis(500),
    is_slow: false,
    callers: 0,
    is_batched: false,
};

#[test]
fn every_run_of_two_members_with_one_fault_is_decided_in_time_and_blames_nobody_else() {
    for fault in [Fault::None, Fault::Kill, Fault::Cut, Fault::Leave, Fault::Diverge, Fault::Hang] {
        every_run(Limits { fault, ..SMALL }, 1_000_000);
    }
}

#[test]
fn every_run_of_two_members_of_which_one_is_stopped_is_decided_in_time() {
    let limits = Limits {
        fault: Fault::Stop,
        calls: 1,
        timeout: Duration::from_secs(5),
        step: Duration::from_secs(1),
        ..SMALL
    };
    every_run(limits, 1_000_000);
}

#[test]
#[ignore = "more than a million states"]
fn every_run_of_three_members_with_one_fault_is_decided_in_time_and_blames_nobody_else() {
    for fault in [Fault::Kill, Fault::Cut] {
        let limits = Limits { fault, members: 3, calls: 1, callers: 2, is_batched: true, ..SMALL };
        every_run(limits, 20_000_000);
    }
}

#[test]
#[ignore = "minutes, and gigabytes of memory"]
fn every_run_of_larger_groups_with_one_fault_is_decided_in_time_and_blames_nobody_else() {
    for fault in [Fault::None, Fault::Kill, Fault::Cut, Fault::Leave, Fault::Diverge, Fault::Hang] {
        let step = Duration::from_millis(200);
        every_run(Limits { fault, is_slow: true, step, ..SMALL }, 20_000_000);
        every_run(Limits { fault, members: 3, calls: 1, ..SMALL }, 20_000_000);
    }
}
