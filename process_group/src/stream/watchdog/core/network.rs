//! A group of watchdog cores in virtual time, with its links, its GPUs, its callers and their faults. Nothing happens
//! without a step: the rules play a script, and the runs choose every step.

use std::cell::Cell;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ryzanstein_explorer::identify_by_debug;

use super::*;
use crate::paths::Path;
use crate::stream::control_mesh::PeerEvent;
use crate::testing;
use crate::types::dtype::DType;
use crate::types::operation::{Operation, ReduceOp};

/// Interval at which a driver looks.
pub(super) const LOOK: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Life {
    Lives,
    /// It makes no more calls. Its watchdog continues.
    Stalled,
    /// Its process is stopped. Its GPU continues with its queue.
    Stopped,
    /// It makes no more calls, and says goodbye when its calls are done.
    Leaves,
    Left,
    Dead,
}

/// A call in the queue of a GPU.
#[derive(Clone)]
struct Enqueued {
    call: CallFingerprint,
    /// Sender and receiver of a message; none for a collective.
    route: Option<(usize, usize)>,
    /// Its number among the calls with this route.
    number: u64,
    at: Instant,
}

/// A mark in the queue of a GPU.
#[derive(Clone, Copy, Hash)]
struct Mark {
    /// Number of calls before it.
    calls: usize,
    at: Instant,
    /// Deadline of the calls since the previous mark.
    deadline: Instant,
}

/// One member: its watchdog's core, its GPU and its caller.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) core: Core,
    /// Hash of its state, until the state changes.
    identity: Cell<Option<u64>>,
    pub(super) life: Life,
    /// At most one failure in a correct core.
    pub(super) failures: Vec<(Instant, Error)>,
    pub(super) verified: Option<Result<Unverified>>,
    /// The reports that a member has stopped responding, or responds again.
    pub(super) told: Vec<(Instant, usize, bool)>,
    next_look: Instant,
    gpu: Vec<Enqueued>,
    /// Number of calls that its GPU has executed.
    done: usize,
    /// Number of calls that its watchdog knows to be done.
    known: usize,
    /// Marks that its watchdog does not know to be reached.
    marks: VecDeque<Mark>,
    /// Time at which a late mark is placed, and the number of calls of the core before it.
    late_mark: Option<(Instant, u64)>,
    entries: u64,
    exits: u64,
    /// The error that its library reports.
    pub(super) error: Option<Error>,
    /// The driver does not report the progress of the GPU.
    pub(super) is_held_up: bool,
}

impl Node {
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failures.first().map(|(_, error)| error)
    }

    /// Returns true if its watchdog runs.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.life, Life::Lives | Life::Stalled | Life::Leaves)
    }

    /// Returns true if it takes part in the group.
    pub(super) fn plays(&self) -> bool {
        self.is_open() && self.failures.is_empty()
    }

    /// Returns true if its caller can make calls.
    pub(super) fn is_up(&self) -> bool {
        self.life == Life::Lives && self.plays()
    }

    /// Returns true if it waits for others.
    pub(super) fn waits(&self) -> bool {
        self.plays() && (self.known < self.gpu.len() || self.core.is_asking())
    }

    /// Returns the number of its next call with a route.
    fn next_number(&self, route: Option<(usize, usize)>) -> u64 {
        1 + self.gpu.iter().filter(|enqueued| enqueued.route == route).count() as u64
    }

    /// Returns the number of its next collective.
    pub(super) fn next_collective(&self) -> u64 {
        self.next_number(None)
    }

    /// Returns the time at which it enqueued a collective.
    pub(super) fn enqueued(&self, collective: u64) -> Option<Instant> {
        let is_it = |enqueued: &&Enqueued| (enqueued.route, enqueued.number) == (None, collective);
        self.gpu.iter().find(is_it).map(|enqueued| enqueued.at)
    }

    fn identity(&self) -> u64 {
        let identity = self.identity.get().unwrap_or_else(|| {
            let (mut hasher, core) = (DefaultHasher::new(), &self.core);
            // The members never change. The explored worlds launch no graphs and verify no calls, and their GPUs always answer.
            let state = (&core.phase, &core.log, &core.detector, &core.messages, &core.pending);
            identify_by_debug(
                &(state, &core.entry, core.exits, &core.progress, &core.heartbeats),
                &mut hasher,
            );
            (core.is_leaving, core.has_announced_exit, self.life, self.failures.len()).hash(&mut hasher);
            for enqueued in &self.gpu {
                enqueued.at.hash(&mut hasher);
            }
            (self.done, self.known, &self.marks, self.late_mark).hash(&mut hasher);
            hasher.finish()
        });
        self.identity.set(Some(identity));
        identity
    }
}

#[derive(Clone)]
pub(super) struct Network {
    pub(super) now: Instant,
    pub(super) nodes: Vec<Rc<Node>>,
    /// The events in transit from each member to each other, oldest first, each with the time of its arrival.
    links: Vec<VecDeque<(Instant, PeerEvent)>>,
    /// Broken links.
    pub(super) cut: Vec<(usize, usize)>,
    /// Deadline of each call.
    pub(super) timeout: Duration,
    /// The smallest step of time.
    pub(super) step: Duration,
    /// Interval at which each member looks.
    pub(super) look: Duration,
    /// Time of an event in transit.
    pub(super) delay: Duration,
    /// Duration of a call once all its members have entered it. A late mark takes as long.
    pub(super) takes: Duration,
    /// A call gets no mark if another one got its mark less than this time ago.
    pub(super) mark_interval: Duration,
    /// True if collectives that differ wait for each other; false if they end with wrong values.
    pub(super) divergent_calls_hang: bool,
    /// Collectives from this number on never end, although all members have entered them.
    pub(super) hangs_from: Option<u64>,
}

/// Returns an all-reduce of this number of elements.
pub(super) fn all_reduce(count: usize) -> CallFingerprint {
    CallFingerprint::new(Operation::AllReduce(ReduceOp::Sum), DType::F32, count)
}

pub(super) fn send(to: u32, count: usize) -> CallFingerprint {
    CallFingerprint::new(Operation::Send { to: Rank(to) }, DType::F32, count)
}

pub(super) fn recv(from: u32, count: usize) -> CallFingerprint {
    CallFingerprint::new(Operation::Recv { from: Rank(from) }, DType::F32, count)
}

/// Returns the sender and the receiver of a member's message.
fn route(member: usize, call: &CallFingerprint) -> Option<(usize, usize)> {
    match call.operation {
        Operation::Send { to } => Some((member, to.index())),
        Operation::Recv { from } => Some((from.index(), member)),
        _ => None,
    }
}

/// Returns the global rank of a member: not its position, so that a confusion of the two is detected.
pub(super) fn rank(position: usize) -> Rank {
    Rank(10 + position as u32)
}

/// Returns the ranks that an error blames, its own or that of the member that gave up first.
pub(super) fn blamed(error: &Error) -> Vec<Rank> {
    let Error::PeerAborted { reason, .. } = error else { return error.caused_by() };
    let numbers = |text: &str| -> Vec<Rank> {
        let words = text.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
        words.filter_map(|word| word.parse().ok()).map(Rank).collect()
    };
    if let Some((_, lost)) = reason.split_once("lost rank ") {
        return numbers(lost).into_iter().take(1).collect();
    }
    let before = [" is unresponsive", " is not there", " are not there"].map(|end| reason.split_once(end));
    let before = before.into_iter().flatten().next().map(|(before, _)| before);
    before.and_then(|before| before.rsplit("rank").next()).map_or_else(Vec::new, numbers)
}

impl Network {
    pub(super) fn new(members: usize) -> Self {
        let now = Instant::now();
        let member = |position: usize| Member {
            host: format!("host-{position}"),
            pid: 1000 + position as u32,
            ..testing::member(rank(position))
        };
        let all: Vec<Member> = (0..members).map(member).collect();
        let node = |position| Node {
            core: Core::new(Arc::new(GroupMembers { group: "g".into(), all: all.clone(), position })),
            identity: Cell::new(None),
            life: Life::Lives,
            failures: Vec::new(),
            verified: None,
            told: Vec::new(),
            next_look: now,
            gpu: Vec::new(),
            done: 0,
            known: 0,
            marks: VecDeque::new(),
            late_mark: None,
            entries: 0,
            exits: 0,
            error: None,
            is_held_up: false,
        };
        Self {
            now,
            nodes: (0..members).map(|position| Rc::new(node(position))).collect(),
            links: vec![VecDeque::new(); members * members],
            cut: Vec::new(),
            timeout: Duration::from_secs(3),
            step: Duration::from_millis(2),
            look: LOOK,
            delay: Duration::from_millis(2),
            takes: Duration::from_millis(1),
            mark_interval: Duration::from_micros(100),
            divergent_calls_hang: true,
            hangs_from: None,
        }
    }

    pub(super) fn identify(&self, identity: &mut impl Hasher) {
        (self.now, &self.cut).hash(identity);
        for node in &self.nodes {
            (node.identity(), node.next_look <= self.now).hash(identity);
        }
        for link in &self.links {
            // Of the times, only the next one can force a delivery.
            link.front().map(|(arrival, _)| *arrival).hash(identity);
            identify_by_debug(&link.iter().map(|(_, event)| event).collect::<Vec<_>>(), identity);
        }
    }

    pub(super) fn node(&mut self, member: usize) -> &mut Node {
        let node = Rc::make_mut(&mut self.nodes[member]);
        node.identity.set(None);
        node
    }

    fn others(&self, member: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.nodes.len()).filter(move |other| *other != member)
    }

    // ---- callers ------------------------------------------------------------------------------------------------------

    /// A member enqueues a call, and returns from the library at once.
    pub(super) fn call(&mut self, member: usize, call: CallFingerprint) {
        if self.nodes[member].is_up() {
            self.enter(member, call);
            self.enqueue(member, &[call]);
        }
    }

    pub(super) fn all_call(&mut self, call: CallFingerprint) {
        (0..self.nodes.len()).for_each(|member| self.call(member, call));
    }

    /// A member enters the library with a call, and stays there.
    pub(super) fn enter(&mut self, member: usize, call: CallFingerprint) {
        let (at, deadline, entry) = self.next_entry(member);
        let sequence = self.nodes[member].next_number(route(member, &call));
        let called = Called { stream: 0, entry, call, sequence, at, deadline, is_captured: false };
        self.report(member, CallerEvent::Called(called));
    }

    /// A member launches a graph of these calls.
    pub(super) fn launch(&mut self, member: usize, calls: &[CallFingerprint]) {
        if self.nodes[member].is_up() {
            let (at, deadline, entry) = self.next_entry(member);
            let mut graph = GraphCalls::default();
            for call in calls {
                graph.push(*call, Path::Nccl);
            }
            self.report(member, CallerEvent::Launching { entry, at, deadline, calls: Arc::new(graph) });
            self.report(member, CallerEvent::Launched);
            self.enqueue(member, calls);
        }
    }

    /// A member makes calls as one group.
    pub(super) fn group(&mut self, member: usize, calls: &[CallFingerprint]) {
        if self.nodes[member].is_up() {
            let (at, deadline, entry) = self.next_entry(member);
            self.report(member, CallerEvent::GroupStarted { entry, at });
            for call in calls {
                self.report(member, CallerEvent::GroupCalled { call: *call, is_captured: false });
            }
            self.report(member, CallerEvent::GroupEnded { deadline, is_captured: false });
            self.enqueue(member, calls);
        }
    }

    fn next_entry(&mut self, member: usize) -> (Instant, Instant, u64) {
        let (now, deadline, node) = (self.now, self.now + self.timeout, self.node(member));
        node.entries += 1;
        (now, deadline, node.entries)
    }

    /// The calls of a member are enqueued on its GPU, and its caller returns from the library.
    fn enqueue(&mut self, member: usize, calls: &[CallFingerprint]) {
        for call in calls {
            let (at, route) = (self.now, route(member, call));
            let number = self.nodes[member].next_number(route);
            self.node(member).gpu.push(Enqueued { call: *call, route, number, at });
        }
        let (at, timeout, interval) = (self.now, self.timeout, self.mark_interval);
        let node = self.node(member);
        node.exits = node.entries;
        let is_recent = node.marks.back().is_some_and(|mark| at < mark.at + interval);
        if !is_recent && node.core.marked(0) {
            let first = node.marks.back().map_or(node.known, |mark| mark.calls);
            let deadline = node.gpu[first].at + timeout;
            node.marks.push_back(Mark { calls: node.gpu.len(), at, deadline });
        }
    }

    /// A member's caller reports something.
    pub(super) fn report(&mut self, member: usize, event: CallerEvent) {
        self.with(member, |core, now, out| core.caller(now, event, out));
    }

    /// These members make no more calls, and verify that all members have made the same.
    pub(super) fn leave_verified(&mut self, members: impl IntoIterator<Item = usize>, timeout: Duration) {
        let deadline = self.now + timeout;
        for member in members {
            self.report(member, CallerEvent::Leaving);
            self.report(member, CallerEvent::VerifyCalls { deadline });
        }
    }

    // ---- faults -------------------------------------------------------------------------------------------------------

    /// A member's process dies.
    pub(super) fn kill(&mut self, member: usize) {
        self.end_links(member, Life::Dead, &PeerEvent::Lost("its connection closed".into()));
    }

    /// The link between two members breaks.
    pub(super) fn cut(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            self.put(from, to, PeerEvent::Lost("connection reset".into()));
            self.cut.push((from, to));
        }
    }

    /// A member leaves in good order: after its calls, unless it waits for others forever.
    pub(super) fn leave(&mut self, member: usize) {
        self.node(member).life = Life::Leaves;
        self.report(member, CallerEvent::Leaving);
    }

    /// A member hears no more. The others learn of it by this event.
    fn end_links(&mut self, member: usize, life: Life, event: &PeerEvent) {
        self.node(member).life = life;
        for other in self.others(member) {
            self.put(member, other, event.clone());
            let n = self.nodes.len();
            self.links[other * n + member].clear();
        }
    }

    // ---- links and time -----------------------------------------------------------------------------------------------

    fn put(&mut self, from: usize, to: usize, event: PeerEvent) {
        let (n, arrival) = (self.nodes.len(), self.now + self.delay);
        let is_gone = matches!(self.nodes[to].life, Life::Left | Life::Dead);
        if !is_gone && !self.cut.contains(&(from, to)) {
            self.links[from * n + to].push_back((arrival, event));
        }
    }

    /// Returns true if a member can receive an event from another.
    pub(super) fn is_in_transit(&self, from: usize, to: usize) -> bool {
        self.nodes[to].is_open() && !self.links[from * self.nodes.len() + to].is_empty()
    }

    /// Returns true if a member looks or receives an event before time passes, so that no driver is late.
    pub(super) fn is_due(&self, member: usize, looks: bool) -> bool {
        let n = self.nodes.len();
        let arrivals = (0..n).filter_map(|from| self.links[from * n + member].front());
        let has_arrived = |(arrival, _): &(Instant, PeerEvent)| *arrival <= self.now;
        self.nodes[member].is_open() && (looks && self.wants_look(member) || { arrivals }.any(has_arrived))
    }

    /// Returns true if a member has not looked for an interval.
    pub(super) fn wants_look(&self, member: usize) -> bool {
        self.nodes[member].next_look <= self.now
    }

    /// Delivers the oldest events on a link, at most this number.
    pub(super) fn deliver(&mut self, from: usize, to: usize, most: usize) {
        let n = self.nodes.len();
        let link = &mut self.links[from * n + to];
        let batch = link.drain(..most.min(link.len())).map(|(_, event)| (from, event)).collect();
        self.with(to, |core, now, out| core.peers(now, batch, out));
    }

    /// Lets this amount of time pass. Members get all events that have arrived in one batch, as a driver reads them.
    pub(super) fn run_for(&mut self, time: Duration) {
        let (until, n) = (self.now + time, self.nodes.len());
        while self.now < until {
            self.now = until.min(self.now + self.step);
            for member in 0..n {
                if self.is_due(member, false) {
                    let (now, mut batch) = (self.now, Vec::new());
                    for from in 0..n {
                        let link = &mut self.links[from * n + member];
                        while let Some((_, event)) = link.pop_front_if(|(arrival, _)| *arrival <= now) {
                            batch.push((from, event));
                        }
                    }
                    self.with(member, |core, now, out| core.peers(now, batch, out));
                }
            }
            for member in 0..n {
                if self.nodes[member].is_open() && self.wants_look(member) {
                    self.look(member);
                }
            }
        }
    }

    pub(super) fn look(&mut self, member: usize) {
        self.compute();
        let (now, timeout, next_look) = (self.now, self.timeout, self.now + self.look);
        let node = self.node(member);
        node.next_look = next_look;
        if let Some((_, calls)) = node.late_mark.take_if(|(at, _)| *at <= now)
            && node.core.marked_late(calls, now)
        {
            node.marks.push_back(Mark { calls: node.gpu.len(), at: now, deadline: now + timeout });
        }
        let (has_answered, done, mut reached) = (!node.is_held_up, node.done, 0);
        while has_answered && let Some(mark) = node.marks.pop_front_if(|mark| mark.calls <= done) {
            node.known = mark.calls;
            reached += 1;
        }
        let seen =
            Observation { has_answered, exits: node.exits, reached: [reached, 0], error: node.error.clone() };
        self.with(member, |core, now, out| core.observe(now, seen, out));
        let node = &self.nodes[member];
        if node.life == Life::Leaves && node.plays() && node.done == node.gpu.len() {
            self.end_links(member, Life::Left, &PeerEvent::Message(ControlMessage::Goodbye));
        }
    }

    /// Calls a member's core, and executes its actions.
    fn with(&mut self, member: usize, what: impl FnOnce(&mut Core, Instant, &mut Vec<Action>)) {
        let (now, late_mark, mut actions) = (self.now, self.now + self.takes, Vec::new());
        what(&mut self.node(member).core, now, &mut actions);
        for action in actions {
            match action {
                Action::Send(to, message) => self.put(member, to, PeerEvent::Message(message)),
                Action::Broadcast(message) => {
                    for to in self.others(member) {
                        self.put(member, to, PeerEvent::Message(message.clone()));
                    }
                }
                Action::Fail(error) => self.node(member).failures.push((now, error)),
                Action::PlaceMark(calls) => self.node(member).late_mark = Some((late_mark, calls)),
                Action::Unresponsive(other, is_silent) => {
                    self.node(member).told.push((now, other, is_silent));
                }
                Action::Verified(outcome) => self.node(member).verified = Some(outcome),
            }
        }
    }

    // ---- GPUs ---------------------------------------------------------------------------------------------------------

    /// Executes every call that all its members have entered.
    pub(super) fn compute(&mut self) {
        loop {
            let ready: Vec<usize> = (0..self.nodes.len()).filter(|member| self.is_ready(*member)).collect();
            if ready.is_empty() {
                return;
            }
            for member in ready {
                self.node(member).done += 1;
            }
        }
    }

    /// Returns true if a GPU finishes the oldest call in its queue.
    fn is_ready(&self, member: usize) -> bool {
        let node = &self.nodes[member];
        let Some(mine) = node.gpu.get(node.done) else { return false };
        match mine.route {
            // Short messages are buffered.
            Some((from, _)) if from == member && mine.call.count < 1000 => self.meets(mine, member),
            Some((from, to)) => self.meets(mine, from) && self.meets(mine, to),
            None if self.hangs_from.is_some_and(|from| mine.number >= from) => false,
            None => (0..self.nodes.len()).all(|other| self.meets(mine, other)),
        }
    }

    /// Returns true if a member's GPU executes its part of a call, or has done so.
    fn meets(&self, mine: &Enqueued, member: usize) -> bool {
        let node = &self.nodes[member];
        let is_part = |theirs: &Enqueued| (theirs.route, theirs.number) == (mine.route, mine.number);
        let Some(index) = node.gpu.iter().position(is_part) else { return false };
        let theirs = &node.gpu[index];
        let waits = match mine.route {
            Some(_) => theirs.call.count != mine.call.count,
            None => theirs.call != mine.call && self.divergent_calls_hang,
        };
        // Earlier work comes first. The kernels of a lost member, or of one that has given up, end with it.
        let executes = index == node.done && node.life != Life::Dead && node.failures.is_empty();
        (index < node.done || executes) && !waits && theirs.at.max(mine.at) + self.takes <= self.now
    }

    // ---- for judges ---------------------------------------------------------------------------------------------------

    /// Returns the deadline of the calls that a member waits for.
    pub(super) fn deadline(&self, member: usize) -> Option<Instant> {
        self.next_mark(member, self.nodes[member].known).map(|(_, deadline)| deadline)
    }

    /// Returns the first place with a mark behind a number of calls of a member, or the end of the queue, and the deadline there.
    fn next_mark(&self, member: usize, calls: usize) -> Option<(usize, Instant)> {
        let node = &self.nodes[member];
        let unmarked = || {
            let first = node.marks.back().map_or(node.known, |mark| mark.calls);
            node.gpu.get(first).map(|enqueued| (node.gpu.len(), enqueued.at + self.timeout))
        };
        let mark = node.marks.iter().find(|mark| mark.calls > calls);
        mark.map(|mark| (mark.calls, mark.deadline)).or_else(unmarked)
    }

    /// Returns the members that are late when the deadline of a member's calls has passed, and whether they have come by now. Those
    /// are late whose calls could not be done by the deadline, and those that do not answer.
    pub(super) fn late(&self, member: usize) -> Vec<(usize, bool)> {
        let node = &self.nodes[member];
        let Some((calls, deadline)) = self.next_mark(member, node.done).filter(|(_, at)| *at <= self.now)
        else {
            return Vec::new();
        };
        let made = node.gpu[..calls].iter().filter(|enqueued| enqueued.route.is_none()).count() as u64;
        let late = self.nodes.iter().enumerate().filter_map(|(other, node)| {
            let came = node.enqueued(made);
            let is_late = node.life == Life::Stopped || came.is_none_or(|at| at + self.takes >= deadline);
            is_late.then_some((other, came.is_some()))
        });
        late.collect()
    }
}
