//! A group of watchdog cores in virtual time: links with delays, GPUs that execute calls when all members have enqueued them, and
//! methods that inject faults. One seed decides everything that is unspecified.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::membership::roster::Cpus;
use crate::paths::Path;
use crate::stream::control_mesh::PeerEvent;
use crate::types::dtype::DType;
use crate::types::operation::{Operation, ReduceOp};
use crate::types::rank::LocalRank;

/// Interval at which a driver looks.
pub(super) const LOOK: Duration = Duration::from_millis(20);
/// Time for the other members to learn of a failure before calls are aborted.
const HEARD: Duration = Duration::from_millis(20);

/// A call in the queue of a GPU.
#[derive(Debug)]
struct Enqueued {
    call: CallFingerprint,
    /// Its number among the member's collectives, or among its messages with the peer in this direction.
    number: u64,
    at: Instant,
    /// Its duration once all its members have entered it.
    takes: Duration,
    is_done: bool,
}

/// One member: its watchdog's core, its GPU and its caller.
#[allow(clippy::struct_excessive_bools, reason = "faults come together in any way")]
pub(super) struct Node {
    core: Core,
    is_alive: bool,
    /// Its process is stopped: only its GPU continues.
    is_stopped: bool,
    /// It has been told to leave, and says goodbye when its calls are done.
    is_leaving: bool,
    has_left: bool,
    /// Time at which its calls were aborted, after its group failed.
    aborted_at: Option<Instant>,
    pub(super) failure: Option<(Instant, Error)>,
    pub(super) verified: Option<Result<Vec<Rank>>>,
    /// Times at which it reported that a member stopped responding, or responds again.
    pub(super) told: Vec<(Instant, usize, bool)>,
    next_look: Instant,
    gpu: Vec<Enqueued>,
    collectives: u64,
    messages: BTreeMap<(usize, bool), u64>,
    /// Marks that have not been reached, each with the number of calls before it.
    marks: VecDeque<usize>,
    /// Time at which a late mark will be placed, and the number of calls of the core before it.
    late_mark: Option<(Instant, u64)>,
    entries: u64,
    exits: u64,
    error: Option<Error>,
    /// The driver does not answer.
    is_held_up: bool,
    /// Events that arrived while it was stopped.
    unread: Vec<(usize, PeerEvent)>,
}

impl Node {
    pub(super) fn core_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

/// An event in transit on a link.
struct InFlight {
    at: Instant,
    from: usize,
    to: usize,
    event: PeerEvent,
}

pub(super) struct Network {
    pub(super) seed: u64,
    pub(super) now: Instant,
    pub(super) nodes: Vec<Node>,
    pub(super) rng: StdRng,
    wire: Vec<InFlight>,
    /// Broken links.
    cut: Vec<(usize, usize)>,
    /// Deadline of each call.
    pub(super) timeout: Duration,
    /// True if collectives that differ wait for each other; false if they end with wrong values.
    pub(super) divergent_calls_hang: bool,
    /// Collectives from this number on never end, although all members have entered them.
    pub(super) hangs_from: Option<u64>,
    pub(super) actions: u64,
}

/// Returns an all-reduce of this number of elements.
pub(super) fn all_reduce(count: usize) -> CallFingerprint {
    CallFingerprint { operation: Operation::AllReduce(ReduceOp::Sum), dtype: DType::F32, count }
}

pub(super) fn send(to: u32, count: usize) -> CallFingerprint {
    CallFingerprint { operation: Operation::Send { to: Rank(to) }, dtype: DType::F32, count }
}

pub(super) fn recv(from: u32, count: usize) -> CallFingerprint {
    CallFingerprint { operation: Operation::Recv { from: Rank(from) }, dtype: DType::F32, count }
}

/// Returns the global rank of a member: not its position, so that a confusion of the two is detected.
pub(super) fn rank(position: usize) -> Rank {
    Rank(10 + position as u32)
}

impl Network {
    pub(super) fn new(members: usize, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let start = Instant::now();
        let all: Vec<Member> = (0..members)
            .map(|position| Member {
                rank: rank(position),
                local_rank: LocalRank(position as u32),
                node_rank: 0,
                host: format!("host-{position}"),
                pid: 1000 + position as u32,
                cpus: Cpus::default(),
                data_address: None,
            })
            .collect();
        let nodes = (0..members)
            .map(|position| {
                let members = GroupMembers { group: "g".into(), all: all.clone(), position };
                Node {
                    core: Core::new(Arc::new(members)),
                    is_alive: true,
                    is_stopped: false,
                    is_leaving: false,
                    has_left: false,
                    aborted_at: None,
                    failure: None,
                    verified: None,
                    told: Vec::new(),
                    next_look: start + LOOK.mul_f64(rng.random()),
                    gpu: Vec::new(),
                    collectives: 0,
                    messages: BTreeMap::new(),
                    marks: VecDeque::new(),
                    late_mark: None,
                    entries: 0,
                    exits: 0,
                    error: None,
                    is_held_up: false,
                    unread: Vec::new(),
                }
            })
            .collect();
        Self {
            seed,
            now: start,
            nodes,
            rng,
            wire: Vec::new(),
            cut: Vec::new(),
            timeout: Duration::from_secs(3),
            divergent_calls_hang: true,
            hangs_from: None,
            actions: 0,
        }
    }

    // ---- actions of callers -------------------------------------------------------------------------------------------

    /// Returns true if the member's caller can still act.
    pub(super) fn is_up(&self, member: usize) -> bool {
        let node = &self.nodes[member];
        node.is_alive && !node.is_stopped && !node.is_leaving && node.failure.is_none()
    }

    /// A member enqueues a call, and returns from the library at once.
    pub(super) fn call(&mut self, member: usize, call: CallFingerprint) {
        if !self.is_up(member) {
            return;
        }
        self.enter(member, call);
        self.nodes[member].exits = self.nodes[member].entries;
        self.enqueue(member, call);
        if self.rng.random_bool(0.4) {
            self.mark(member);
        }
    }

    /// From now on the member's driver does not report the progress of the GPU.
    pub(super) fn hold_up(&mut self, member: usize) {
        self.nodes[member].is_held_up = true;
    }

    pub(super) fn all_call(&mut self, call: CallFingerprint) {
        for member in 0..self.nodes.len() {
            self.call(member, call);
        }
    }

    /// A member enters the library with a call, and stays there.
    pub(super) fn enter(&mut self, member: usize, call: CallFingerprint) {
        let (now, deadline) = (self.now, self.now + self.timeout);
        let node = &mut self.nodes[member];
        node.entries += 1;
        let (entry, sequence) = (node.entries, node.gpu.len() as u64 + 1);
        let called = Called { stream: 0, entry, call, sequence, at: now, deadline, is_captured: false };
        self.report(member, CallerEvent::Called(called));
    }

    /// A member launches a graph of these calls.
    pub(super) fn launch(&mut self, member: usize, calls: &[CallFingerprint]) {
        if !self.is_up(member) {
            return;
        }
        let mut graph = GraphCalls::default();
        for call in calls {
            graph.push(*call, Path::Nccl);
        }
        let (at, deadline) = (self.now, self.now + self.timeout);
        self.nodes[member].entries += 1;
        let entry = self.nodes[member].entries;
        self.report(member, CallerEvent::Launching { entry, at, deadline, calls: Arc::new(graph) });
        self.report(member, CallerEvent::Launched);
        self.nodes[member].exits = entry;
        for call in calls {
            self.enqueue(member, *call);
        }
        self.mark(member);
    }

    /// A member makes calls as one group.
    pub(super) fn group(&mut self, member: usize, calls: &[CallFingerprint]) {
        if !self.is_up(member) {
            return;
        }
        let (at, deadline) = (self.now, self.now + self.timeout);
        self.nodes[member].entries += 1;
        let entry = self.nodes[member].entries;
        self.report(member, CallerEvent::GroupStarted { entry, at });
        for call in calls {
            self.report(member, CallerEvent::GroupCalled { call: *call, is_captured: false });
        }
        self.report(member, CallerEvent::GroupEnded { deadline, is_captured: false });
        self.nodes[member].exits = entry;
        for call in calls {
            self.enqueue(member, *call);
        }
        self.mark(member);
    }

    fn enqueue(&mut self, member: usize, call: CallFingerprint) {
        let takes = Duration::from_micros(self.rng.random_range(5..3000));
        let node = &mut self.nodes[member];
        let number = match call.operation {
            Operation::Send { to } => node.messages.entry((to.index(), true)).or_default(),
            Operation::Recv { from } => node.messages.entry((from.index(), false)).or_default(),
            _ => &mut node.collectives,
        };
        *number += 1;
        let number = *number;
        node.gpu.push(Enqueued { call, number, at: self.now, takes, is_done: false });
    }

    pub(super) fn mark(&mut self, member: usize) {
        let node = &mut self.nodes[member];
        if node.core.marked(0) {
            node.marks.push_back(node.gpu.len());
        }
    }

    /// A member's caller reports something.
    pub(super) fn report(&mut self, member: usize, event: CallerEvent) {
        let mut actions = Vec::new();
        self.nodes[member].core.caller(self.now, event, &mut actions);
        self.act(member, actions);
    }

    // ---- faults -------------------------------------------------------------------------------------------------------

    /// A member's process dies.
    pub(super) fn kill(&mut self, member: usize) {
        self.nodes[member].is_alive = false;
        self.wire.retain(|flight| flight.to != member);
        for other in (0..self.nodes.len()).filter(|other| *other != member) {
            self.put(member, other, PeerEvent::Lost("its connection closed".into()));
        }
    }

    /// The link between two members breaks.
    pub(super) fn cut(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            self.put(from, to, PeerEvent::Lost("connection reset".into()));
            self.cut.push((from, to));
        }
    }

    /// A member's process is stopped. Its GPU continues with its queue.
    pub(super) fn stop(&mut self, member: usize) {
        self.nodes[member].is_stopped = true;
    }

    pub(super) fn resume(&mut self, member: usize) {
        let (now, node) = (self.now, &mut self.nodes[member]);
        node.is_stopped = false;
        node.next_look = now;
        let unread = std::mem::take(&mut node.unread);
        self.hear(member, unread);
    }

    /// A member leaves in good order: after its calls, unless it waits for others forever.
    pub(super) fn leave(&mut self, member: usize) {
        self.nodes[member].is_leaving = true;
        self.report(member, CallerEvent::Leaving);
    }

    /// The member's library reports an error from now on.
    pub(super) fn fail_library(&mut self, member: usize, error: Error) {
        self.nodes[member].error = Some(error);
    }

    // ---- time ---------------------------------------------------------------------------------------------------------

    /// Lets this amount of time pass.
    pub(super) fn run_for(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let looks =
                self.nodes.iter().filter(|node| node.is_alive && !node.has_left).map(|node| node.next_look);
            let arrivals = self.wire.iter().map(|flight| flight.at);
            let Some(next) = looks.chain(arrivals).min().filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            self.deliver();
            for member in 0..self.nodes.len() {
                if self.nodes[member].next_look <= self.now {
                    self.nodes[member].next_look = self.now + LOOK;
                    self.look(member);
                }
            }
        }
        self.now = until;
    }

    /// Delivers the events that arrive now: all events for a member in one batch, as a driver reads them.
    fn deliver(&mut self) {
        let (now, nodes) = (self.now, self.nodes.len());
        let mut batches: Vec<Vec<(usize, PeerEvent)>> = (0..nodes).map(|_| Vec::new()).collect();
        let wire = std::mem::take(&mut self.wire);
        for flight in wire {
            if flight.at <= now {
                batches[flight.to].push((flight.from, flight.event));
            } else {
                self.wire.push(flight);
            }
        }
        for (member, batch) in batches.into_iter().enumerate().filter(|(_, batch)| !batch.is_empty()) {
            if self.nodes[member].is_stopped {
                self.nodes[member].unread.extend(batch);
            } else {
                self.hear(member, batch);
            }
        }
    }

    fn hear(&mut self, member: usize, batch: Vec<(usize, PeerEvent)>) {
        if self.nodes[member].is_alive && !self.nodes[member].has_left {
            let mut actions = Vec::new();
            self.nodes[member].core.peers(self.now, batch, &mut actions);
            self.act(member, actions);
        }
    }

    fn look(&mut self, member: usize) {
        self.compute();
        let now = self.now;
        let node = &mut self.nodes[member];
        if !node.is_alive || node.is_stopped || node.has_left {
            return;
        }
        if let Some((_, calls)) = node.late_mark.take_if(|(at, _)| *at <= now)
            && node.core.marked_late(calls, now)
        {
            node.marks.push_back(node.gpu.len());
        }
        let has_answered = !node.is_held_up;
        let done = node.gpu.iter().take_while(|enqueued| enqueued.is_done).count();
        let mut reached = 0;
        while has_answered && node.marks.pop_front_if(|mark| *mark <= done).is_some() {
            reached += 1;
        }
        let seen =
            Observation { has_answered, exits: node.exits, reached: [reached, 0], error: node.error.clone() };
        let mut actions = Vec::new();
        node.core.observe(now, seen, &mut actions);
        self.act(member, actions);
        let node = &mut self.nodes[member];
        if node.is_leaving && node.failure.is_none() && node.gpu.iter().all(|enqueued| enqueued.is_done) {
            node.has_left = true;
            for other in (0..self.nodes.len()).filter(|other| *other != member) {
                self.put(member, other, PeerEvent::Message(ControlMessage::Goodbye));
            }
        }
    }

    fn act(&mut self, member: usize, actions: Vec<Action>) {
        self.actions += actions.len() as u64;
        for action in actions {
            match action {
                Action::Send(to, message) => self.put(member, to, PeerEvent::Message(message)),
                Action::Broadcast(message) => {
                    for to in (0..self.nodes.len()).filter(|to| *to != member) {
                        self.put(member, to, PeerEvent::Message(message.clone()));
                    }
                }
                Action::Fail(error) => {
                    let node = &mut self.nodes[member];
                    assert!(
                        node.failure.is_none(),
                        "seed {}: member {member} fails twice: {error}",
                        self.seed
                    );
                    node.aborted_at = Some(self.now + HEARD);
                    node.failure = Some((self.now, error));
                }
                Action::PlaceMark(calls) => {
                    let delay = Duration::from_micros(self.rng.random_range(10..50_000));
                    self.nodes[member].late_mark = Some((self.now + delay, calls));
                }
                Action::Unresponsive(position, is_silent) => {
                    let now = self.now;
                    self.nodes[member].told.push((now, position, is_silent));
                }
                Action::Verified(outcome) => self.nodes[member].verified = Some(outcome),
            }
        }
    }

    /// Puts an event on a link. Events arrive in the order of their sending.
    fn put(&mut self, from: usize, to: usize, event: PeerEvent) {
        if self.cut.contains(&(from, to)) {
            return;
        }
        let earliest = self.wire.iter().filter(|f| (f.from, f.to) == (from, to)).map(|f| f.at).max();
        let delay = Duration::from_micros(self.rng.random_range(20..2000));
        let at = (self.now + delay).max(earliest.unwrap_or(self.now));
        self.wire.push(InFlight { at, from, to, event });
    }

    // ---- GPUs ---------------------------------------------------------------------------------------------------------

    /// Executes every call that all its members have entered.
    fn compute(&mut self) {
        loop {
            let ready: Vec<(usize, usize)> = (0..self.nodes.len())
                .filter_map(|member| {
                    let next = self.nodes[member].gpu.iter().position(|enqueued| !enqueued.is_done)?;
                    self.is_ready(member, next).then_some((member, next))
                })
                .collect();
            if ready.is_empty() {
                return;
            }
            for (member, next) in ready {
                self.nodes[member].gpu[next].is_done = true;
            }
        }
    }

    fn is_ready(&self, member: usize, index: usize) -> bool {
        let mine = &self.nodes[member].gpu[index];
        if self.nodes[member].aborted_at.is_some_and(|at| at <= self.now) {
            return false;
        }
        match mine.call.operation {
            // Short messages are buffered.
            Operation::Send { .. } if mine.call.count < 1000 => mine.at + mine.takes <= self.now,
            Operation::Send { to } => self.meets(mine, to.index(), |call| {
                call.operation == Operation::Recv { from: Rank(member as u32) }
            }),
            Operation::Recv { from } => self.meets(mine, from.index(), |call| {
                call.operation == Operation::Send { to: Rank(member as u32) }
            }),
            _ => (0..self.nodes.len())
                .all(|other| self.meets(mine, other, |call| !call.operation.is_point_to_point())),
        }
    }

    /// Returns true if the other member's GPU has reached the counterpart of a call, and the call's duration has passed.
    fn meets(
        &self,
        mine: &Enqueued,
        other: usize,
        is_counterpart: impl Fn(&CallFingerprint) -> bool,
    ) -> bool {
        let is_collective = !mine.call.operation.is_point_to_point();
        if is_collective && self.hangs_from.is_some_and(|from| mine.number >= from) {
            return false;
        }
        let node = &self.nodes[other];
        let theirs = node.gpu.iter().enumerate();
        let mut theirs = theirs.filter(|(_, e)| e.number == mine.number && is_counterpart(&e.call));
        let Some((index, theirs)) = theirs.next() else { return false };
        let waits = if is_collective {
            theirs.call != mine.call && self.divergent_calls_hang
        } else {
            theirs.call.count != mine.call.count
        };
        // Earlier work on the other GPU comes first.
        let is_front = node.gpu[..index].iter().all(|enqueued| enqueued.is_done);
        // The kernels of a lost member end with it, unless they were done.
        let is_there = theirs.is_done || node.is_alive && node.aborted_at.is_none_or(|at| at > self.now);
        let begins = theirs.at.max(mine.at);
        is_there && !waits && is_front && begins + mine.takes.max(theirs.takes) <= self.now
    }
}
