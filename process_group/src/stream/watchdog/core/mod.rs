//! The decisions of a watchdog. Pure: events and the time in, actions out; no socket, clock, thread or GPU.
//!
//! A core watches one rank's end of a group. It receives the calls of the rank, the messages of the other members' watchdogs, and
//! the progress of the GPU. It gives the group up when the group cannot continue: a member is lost or has left without its part,
//! calls differ, a deadline has passed, or the library reports an error.

#[cfg(test)]
mod every_run;
mod heartbeats;
#[cfg(test)]
mod network;
#[cfg(test)]
mod rules;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, missing_ranks};
use crate::membership::roster::Member;
use crate::stream::call_log::{CallLog, Divergence};
use crate::stream::capture::GraphCalls;
use crate::stream::control_mesh::PeerEvent;
use crate::stream::control_message::{ControlMessage, MAX_CALLS};
use crate::stream::desync::{DesyncDetector, Finding, Verdict};
use crate::stream::messages::{MessageCounts, PeerSet, UnmatchedMessage};
use crate::stream::pending::{PendingCall, PendingCalls};
use crate::types::blame;
use crate::types::operation::CallFingerprint;
use crate::types::rank::Rank;
use heartbeats::Heartbeats;

/// Timeout for the other members' progress at a deadline.
const ANSWERS: Duration = Duration::from_millis(500);
/// Time for which a message that no rank receives may be pending: a library buffers short ones, after work that was enqueued
/// earlier.
const BUFFERED: Duration = Duration::from_secs(1);
/// Time without an answer of the GPU after which the knowledge of it counts as out of date.
const OUTDATED: Duration = Duration::from_millis(200);
/// Timeout for the verdict of a member that has made more calls: it may find one that differs, which is more informative.
const REBUTTAL: Duration = Duration::from_millis(200);

/// The members of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupMembers {
    /// Name of the group.
    pub(crate) group: String,
    /// The members, in group order.
    pub(crate) all: Vec<Member>,
    /// This rank's position.
    pub(crate) position: usize,
}

impl GroupMembers {
    /// Returns the global rank of the member at a position.
    pub(crate) fn rank(&self, position: usize) -> Rank {
        self.all[position].rank
    }

    /// Returns the positions of all other members.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.position;
        (0..self.all.len()).filter(move |position| *position != me)
    }
}

/// A call as its caller's thread reports it, just before the library gets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called {
    /// Index of the group's stream on which it is enqueued.
    pub(crate) stream: usize,
    /// Number of the caller's entry into the library.
    pub(crate) entry: u64,
    pub(crate) call: CallFingerprint,
    /// Its number in the group; for messages, in their pair and direction.
    pub(crate) sequence: u64,
    pub(crate) at: Instant,
    pub(crate) deadline: Instant,
    /// True if it goes into a graph: then it counts at each launch.
    pub(crate) is_captured: bool,
}

/// An event that the calling thread reports or requests.
#[derive(Clone, Debug)]
pub(crate) enum CallerEvent {
    Called(Called),
    /// A group of calls begins, with this entry into the library. It waits for no rank until it ends.
    GroupStarted {
        entry: u64,
        at: Instant,
    },
    /// A call of the group of calls.
    GroupCalled {
        call: CallFingerprint,
        is_captured: bool,
    },
    /// The group of calls goes to the library, to be done by the deadline.
    GroupEnded {
        deadline: Instant,
        is_captured: bool,
    },
    /// A graph is about to be launched.
    Launching {
        entry: u64,
        at: Instant,
        deadline: Instant,
        calls: Arc<GraphCalls>,
    },
    /// The graph has been launched.
    Launched,
    /// All streams are idle.
    Idle,
    /// The rank makes no more calls.
    Leaving,
    /// Compare the calls of all members, until the deadline.
    VerifyCalls {
        deadline: Instant,
    },
    /// Give up the group.
    Abort(Error),
    /// A wait has reached its deadline: identify the missing rank, which can only be `peer` if there is one, and give up.
    Expire {
        what: String,
        waited: Duration,
        peer: Option<Rank>,
    },
}

/// The result of a watchdog's look.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observation {
    /// True if the GPU has answered. It does not while the caller is blocked in a copy: the driver's queries wait then.
    pub(crate) has_answered: bool,
    /// Number of the newest entry into the library that has returned.
    pub(crate) exits: u64,
    /// Number of newly reached marks of each stream.
    pub(crate) reached: [usize; 2],
    /// An error that the library or the GPU reports.
    pub(crate) error: Option<Error>,
}

/// An action of the watchdog.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    /// Send a message to the member at this position.
    Send(usize, ControlMessage),
    /// Send a message to all others.
    Broadcast(ControlMessage),
    /// The group has failed: callers return with this error, and work on the GPU is aborted.
    Fail(Error),
    /// Place a mark on the first stream, after this many calls, from a thread that the GPU may block.
    PlaceMark(u64),
    /// The calls of all members have been compared as far as possible.
    Verified(Result<Unverified>),
    /// Report that the member at this position has stopped responding while this rank waits, or that it responds again.
    Unresponsive(usize, bool),
}

/// Members whose calls have not been compared in time.
pub(crate) type Unverified = Vec<Rank>;

/// The group of calls, graph or single call that is inside the library.
#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    call: Option<CallFingerprint>,
    peers: PeerSet,
    since: Instant,
    deadline: Option<Instant>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Phase {
    Watching,
    /// Waits for the members' progress, to identify those that have not entered collective `sequence`.
    Asking {
        sequence: u64,
        until: Instant,
        expired: Expired,
    },
    Failed,
}

/// The object whose deadline has passed.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Expired {
    Here { what: String, waited: Duration },
    At { rank: Rank, what: String },
}

#[derive(Clone, Copy, Debug)]
struct Verification {
    deadline: Instant,
    /// Time since when a member is known to have made more calls.
    more_since: Option<Instant>,
}

/// The state of a watchdog.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Core {
    members: Arc<GroupMembers>,
    phase: Phase,
    log: CallLog,
    detector: DesyncDetector,
    messages: MessageCounts,
    pending: [PendingCalls; 2],
    entry: Option<Entry>,
    exits: u64,
    /// Time of the last answer of the GPU.
    answered: Option<Instant>,
    /// The graph that is being launched.
    launching: Option<Arc<GraphCalls>>,
    /// Number of collectives that each member has reported.
    progress: Vec<Option<u64>>,
    is_leaving: bool,
    has_announced_exit: bool,
    verification: Option<Verification>,
    heartbeats: Heartbeats,
}

impl Core {
    pub(crate) fn new(members: Arc<GroupMembers>) -> Self {
        let n = members.all.len();
        Self {
            members,
            phase: Phase::Watching,
            log: CallLog::default(),
            detector: DesyncDetector::new(n),
            messages: MessageCounts::new(n),
            pending: Default::default(),
            entry: None,
            exits: 0,
            answered: None,
            launching: None,
            progress: vec![None; n],
            is_leaving: false,
            has_announced_exit: false,
            verification: None,
            heartbeats: Heartbeats::new(n),
        }
    }

    // ---- events of the caller's thread --------------------------------------------------------------------------------

    /// Processes an event of the caller's thread.
    pub(crate) fn caller(&mut self, now: Instant, event: CallerEvent, out: &mut Vec<Action>) {
        match event {
            CallerEvent::Called(called) => self.called(called),
            CallerEvent::GroupStarted { entry, at } => self.enter(entry, None, PeerSet::default(), at, None),
            CallerEvent::GroupCalled { call, is_captured } => {
                if !is_captured {
                    self.count(&call);
                }
                if let Some(entry) = &mut self.entry {
                    entry.peers = entry.peers.union(PeerSet::of(&call));
                }
            }
            CallerEvent::GroupEnded { deadline, is_captured } => self.group_ended(deadline, is_captured),
            CallerEvent::Launching { entry, at, deadline, calls } => {
                self.enter(entry, None, calls.peers(), at, Some(deadline));
                self.launching = Some(calls);
            }
            CallerEvent::Launched => self.launched(),
            CallerEvent::Idle => self.pending.iter_mut().for_each(PendingCalls::clear),
            CallerEvent::Leaving => self.is_leaving = true,
            CallerEvent::VerifyCalls { deadline } => {
                self.verification = Some(Verification { deadline, more_since: None });
            }
            CallerEvent::Abort(error) if self.is_watching() => self.give_up(error, out),
            CallerEvent::Expire { what, waited, peer } if self.is_watching() => {
                let sequence = self.log.head().sequence;
                self.expire(now, what, waited, sequence, peer, out);
            }
            // The group is already being given up.
            CallerEvent::Abort(_) | CallerEvent::Expire { .. } => {}
        }
    }

    fn called(&mut self, called: Called) {
        let Called { stream, entry, call, sequence, at, deadline, is_captured } = called;
        let peers = PeerSet::of(&call);
        self.enter(entry, Some(call), peers, at, Some(deadline));
        if is_captured {
            return;
        }
        self.count(&call);
        let collectives = self.log.head().sequence;
        let call = Some(call);
        self.pending[stream].push(PendingCall { call, sequence, collectives, peers, enqueued: at, deadline });
    }

    fn count(&mut self, call: &CallFingerprint) {
        if call.operation.is_point_to_point() {
            self.messages.count(call, 1);
        } else {
            self.log.push(*call);
        }
    }

    fn enter(
        &mut self,
        number: u64,
        call: Option<CallFingerprint>,
        peers: PeerSet,
        since: Instant,
        deadline: Option<Instant>,
    ) {
        self.entry = Some(Entry { number, call, peers, since, deadline });
    }

    fn group_ended(&mut self, deadline: Instant, is_captured: bool) {
        let Some(entry) = &mut self.entry else { return };
        entry.deadline = Some(deadline);
        let Entry { peers, since, .. } = *entry;
        if !is_captured {
            self.push_several(peers, since, deadline);
        }
    }

    fn launched(&mut self) {
        let (Some(calls), Some(entry)) = (self.launching.take(), self.entry) else { return };
        for (call, _, times) in calls.counts() {
            self.messages.count(call, *times);
        }
        calls.collectives().iter().for_each(|call| self.log.push(*call));
        self.push_several(entry.peers, entry.since, entry.deadline.unwrap_or(entry.since));
    }

    /// Adds several calls, which are waited for as one.
    fn push_several(&mut self, peers: PeerSet, enqueued: Instant, deadline: Instant) {
        let sequence = self.log.head().sequence;
        let pending = PendingCall { call: None, sequence, collectives: sequence, peers, enqueued, deadline };
        self.pending[0].push(pending);
    }

    /// Notes a mark after all calls so far of a stream. Returns `false` if there is nothing to mark.
    pub(crate) fn marked(&mut self, stream: usize) -> bool {
        self.pending[stream].mark()
    }

    /// Notes that the mark of [`Action::PlaceMark`] has been placed. Returns `false` if it is not needed any more.
    pub(crate) fn marked_late(&mut self, calls: u64, now: Instant) -> bool {
        self.pending[0].mark_late(calls, now)
    }

    /// Notes that the mark of [`Action::PlaceMark`] could not be placed.
    pub(crate) fn mark_failed(&mut self) {
        self.pending[0].mark_failed();
    }

    // ---- events of the other members ----------------------------------------------------------------------------------

    /// Processes the new events of other members, with their positions.
    pub(crate) fn peers(&mut self, now: Instant, events: Vec<(usize, PeerEvent)>, out: &mut Vec<Action>) {
        // All events are stored first: the reaction to one message may need the content of another.
        for (position, event) in &events {
            let PeerEvent::Message(message) = event else { continue };
            match message {
                ControlMessage::Progress(n) => self.progress[*position] = Some(*n),
                ControlMessage::LastHead(head) => {
                    self.detector.last_head(*position, *head);
                    self.progress[*position] = Some(head.sequence);
                }
                _ => {}
            }
        }
        for (position, event) in events {
            self.peer(now, position, event, out);
        }
        self.conclude_if_known(now, out);
    }

    fn peer(&mut self, now: Instant, position: usize, event: PeerEvent, out: &mut Vec<Action>) {
        let message = match event {
            PeerEvent::Message(message) => {
                if self.heartbeats.heard(position, now) {
                    out.push(Action::Unresponsive(position, false));
                }
                message
            }
            PeerEvent::Lost(why) => {
                if self.is_watching() {
                    self.lose(position, &why, out);
                }
                return;
            }
        };
        match message {
            ControlMessage::Ping => out.push(Action::Send(position, ControlMessage::Pong)),
            ControlMessage::LastHead(_) | ControlMessage::Goodbye => self.heartbeats.left(position, now),
            ControlMessage::Exchanged(exchange) => self.messages.ended_with(position, exchange),
            ControlMessage::Head(head) => self.detector.head(position, head),
            ControlMessage::Aborted(reason) if self.is_watching() => {
                let rank = self.members.rank(position);
                // Another member may ask at its deadline, and a failed one answers no more.
                self.tell_progress(out);
                self.fail(Error::PeerAborted { rank, reason }, out);
            }
            ControlMessage::Expired(sequence, what) if self.is_watching() => {
                let rank = self.members.rank(position);
                self.tell_progress(out);
                self.ask(now, sequence, Expired::At { rank, what });
            }
            ControlMessage::Calls(first, calls) if self.is_watching() => {
                if let Some(divergence) = self.log.divergence(first, &calls) {
                    self.mismatch(position, divergence, out);
                }
                self.detector.calls(position, first, &calls);
            }
            // Processed before, or useless by now.
            _ => {}
        }
    }

    // ---- observations of the watchdog ---------------------------------------------------------------------------------

    /// Returns true if the caller was inside the library at the last observation.
    pub(crate) fn is_inside(&self, exits: u64) -> bool {
        self.entry.is_some_and(|entry| entry.number > exits)
    }

    /// Processes an observation, and checks all conditions that no event reports.
    pub(crate) fn observe(&mut self, now: Instant, seen: Observation, out: &mut Vec<Action>) {
        self.exits = self.exits.max(seen.exits);
        if seen.has_answered {
            self.answered = Some(now);
        }
        for (pending, reached) in self.pending.iter_mut().zip(seen.reached) {
            pending.complete(reached);
        }
        if self.is_leaving {
            self.announce_exit(out);
        }
        if self.is_watching() {
            self.check_members(now, out);
            self.look(now, seen.error, out);
        }
        self.conclude_if_known(now, out);
        if self.is_watching() {
            self.verify(now, out);
        }
    }

    fn look(&mut self, now: Instant, error: Option<Error>, out: &mut Vec<Action>) {
        // This comes first: calls that differ, or a rank that has left, may be the reason why the library fails.
        if self.compare(now, out) || self.misses_collective(out) || self.misses_message(now, out) {
            return;
        }
        if let Some(error) = error {
            return self.give_up(error, out);
        }
        if let Some(entry) = self.entry.filter(|entry| entry.number > self.exits)
            && entry.deadline.is_some_and(|deadline| now >= deadline)
        {
            let sequence = self.log.head().sequence;
            let what = self.words(entry.call, sequence) + " inside the library,";
            let waited = now.saturating_duration_since(entry.since);
            return self.expire(
                now,
                what,
                waited,
                sequence,
                entry.call.as_ref().and_then(|call| call.operation.peer()),
                out,
            );
        }
        if let Some(first) = self.oldest().filter(|first| now >= first.deadline) {
            let PendingCall { call, sequence, collectives, enqueued, .. } = self.waited_for(first, now);
            let (what, waited) = (self.words(call, sequence), now.saturating_duration_since(enqueued));
            return self.expire(
                now,
                what,
                waited,
                collectives,
                call.as_ref().and_then(|call| call.operation.peer()),
                out,
            );
        }
        // While the caller is inside the library, its call may not be enqueued yet: a mark would be placed before it.
        if !self.is_inside(self.exits)
            && let Some(calls) = self.pending[0].wants_mark(now)
        {
            out.push(Action::PlaceMark(calls));
        }
    }

    /// Asks the members to respond while this rank waits for a call to end.
    fn check_members(&mut self, now: Instant, out: &mut Vec<Action>) {
        let inside = self.entry.filter(|entry| entry.number > self.exits).map(|entry| entry.since);
        let pending = self.oldest().map(|pending| pending.enqueued);
        let since = inside.into_iter().chain(pending).min();
        let checked = self.heartbeats.check(self.members.others(), since, now);
        if checked.ask {
            out.push(Action::Broadcast(ControlMessage::Ping));
        }
        out.extend(checked.fell_silent.into_iter().map(|position| Action::Unresponsive(position, true)));
    }

    /// Returns the number of collectives that this rank has called.
    pub(super) fn collectives(&self) -> u64 {
        self.log.head().sequence
    }

    /// Returns the pending call with the earliest deadline.
    pub(super) fn oldest(&self) -> Option<PendingCall> {
        self.pending.iter().filter_map(PendingCalls::oldest).min_by_key(|pending| pending.deadline)
    }

    /// Returns the calls that this rank waits for when the deadline of its oldest pending call has passed: that call, or several up
    /// to the newest if the GPU has not reported for some time which of them are done.
    fn waited_for(&self, oldest: PendingCall, now: Instant) -> PendingCall {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= OUTDATED;
        if !self.answered.is_some_and(is_old) || !self.entry.is_some_and(|entry| is_old(entry.since)) {
            return oldest;
        }
        let newer = self.pending.iter().filter_map(PendingCalls::newest);
        newer.fold(oldest, PendingCall::merge)
    }

    /// Compares the members' calls. Returns `true` if some differ: then nothing else is checked until it is known which.
    fn compare(&mut self, now: Instant, out: &mut Vec<Action>) -> bool {
        for finding in self.detector.compare(&self.log, now) {
            match finding {
                Finding::NewHead(head) => out.push(Action::Broadcast(ControlMessage::Head(head))),
                Finding::Disputed(first, calls) => broadcast_calls(first, &calls, out),
                Finding::Diverged(position, divergence) => self.mismatch(position, divergence, out),
                Finding::Unresolved(position, sequence) => {
                    let error = Error::Mismatch {
                        group: self.members.group.clone(),
                        sequence,
                        field: "a call that is not remembered any more",
                        rank: self.members.rank(self.members.position),
                        mine: "these up to it".into(),
                        peer: self.members.rank(position),
                        theirs: "others".into(),
                    };
                    self.give_up(error, out);
                }
            }
        }
        self.detector.is_disputed() || !self.is_watching()
    }

    fn mismatch(&mut self, position: usize, divergence: Divergence, out: &mut Vec<Action>) {
        let Divergence { sequence, mine, theirs } = divergence;
        let [me, peer] = [self.members.position, position].map(|position| self.members.rank(position));
        let error = Error::mismatch(&self.members.group, sequence, (me, &mine), (peer, &theirs));
        self.give_up(error, out);
    }

    /// Gives up if a member that makes no more calls has not made a collective that this rank has made.
    fn misses_collective(&mut self, out: &mut Vec<Action>) -> bool {
        let made = self.log.head().sequence;
        let Some((position, last)) = self.detector.short_of(made) else { return false };
        let number = last + 1;
        let call = self.log.call(number).map_or_else(String::new, |call| format!(", {call}"));
        self.lose(position, &format!("it has left the group without call {number}{call}"), out);
        true
    }

    /// Gives up if a member that exchanges no more messages lacks one that this rank waits for.
    fn misses_message(&mut self, now: Instant, out: &mut Vec<Action>) -> bool {
        let unmatched = self.messages.unmatched();
        if unmatched.is_empty() {
            return false;
        }
        let inside =
            self.entry.filter(|entry| entry.number > self.exits).map(|entry| (entry.peers, entry.since));
        let oldest = self.pending.iter().filter_map(PendingCalls::oldest);
        let waited: Vec<_> = oldest.map(|pending| (pending.peers, pending.enqueued)).chain(inside).collect();
        let is_waited_for = |unmatched: &&UnmatchedMessage| {
            waited.iter().any(|(peers, since)| {
                let is_stuck = unmatched.sends || now.saturating_duration_since(*since) > BUFFERED;
                unmatched.is_among(*peers) && is_stuck
            })
        };
        let Some(unmatched) = unmatched.iter().find(is_waited_for) else { return false };
        self.lose(unmatched.position, &format!("it has left the group {unmatched}"), out);
        true
    }

    /// Reports whether the calls of all members that make no more have been the same, once that is known.
    fn verify(&mut self, now: Instant, out: &mut Vec<Action>) {
        let Some(Verification { deadline, more_since }) = &mut self.verification else { return };
        let made = self.log.head().sequence;
        let outcome = match self.detector.verdict(self.members.position, made) {
            Verdict::Same => Ok(Vec::new()),
            Verdict::More(..) if now.saturating_duration_since(*more_since.get_or_insert(now)) < REBUTTAL => {
                return;
            }
            Verdict::More(position, theirs) => Err(Error::Mismatch {
                group: self.members.group.clone(),
                sequence: made + 1,
                field: "the number of calls",
                rank: self.members.rank(self.members.position),
                mine: format!("{made} collectives in all"),
                peer: self.members.rank(position),
                theirs: format!("{theirs}"),
            }),
            Verdict::Open(positions) if now >= *deadline => {
                Ok(positions.into_iter().map(|position| self.members.rank(position)).collect())
            }
            Verdict::Disputed | Verdict::Open(_) => return,
        };
        self.verification = None;
        out.push(Action::Verified(outcome));
    }

    // ---- leaving ------------------------------------------------------------------------------------------------------

    /// Tells the other members which collectives of this rank they may not have compared, their number, the messages exchanged with
    /// each of them, and that no more will follow. Does so once.
    pub(crate) fn announce_exit(&mut self, out: &mut Vec<Action>) {
        if std::mem::replace(&mut self.has_announced_exit, true) {
            return;
        }
        let (first, calls) = self.detector.uncompared(&self.log, self.members.position);
        broadcast_calls(first, &calls, out);
        for position in self.members.others() {
            out.push(Action::Send(position, ControlMessage::Exchanged(self.messages.with(position))));
        }
        out.push(Action::Broadcast(ControlMessage::LastHead(self.log.head())));
    }

    // ---- giving up ----------------------------------------------------------------------------------------------------

    fn is_watching(&self) -> bool {
        matches!(self.phase, Phase::Watching)
    }

    /// Returns true if it waits for answers at a deadline.
    pub(crate) fn is_asking(&self) -> bool {
        matches!(self.phase, Phase::Asking { .. })
    }

    fn fail(&mut self, error: Error, out: &mut Vec<Action>) {
        self.phase = Phase::Failed;
        out.push(Action::Fail(error));
    }

    /// Fails with an error that the other members must learn of.
    fn give_up(&mut self, error: Error, out: &mut Vec<Action>) {
        if self.is_watching() {
            // This comes first: a member at its deadline asks for the progress of all, and this rank answers no more.
            self.tell_progress(out);
            out.push(Action::Broadcast(ControlMessage::Aborted(error.to_string())));
            self.fail(error, out);
        }
    }

    fn lose(&mut self, position: usize, detail: &str, out: &mut Vec<Action>) {
        let member = &self.members.all[position];
        let error = Error::PeerLost {
            rank: member.rank,
            host: member.host.clone(),
            pid: member.pid,
            during: self.during(),
            detail: detail.into(),
        };
        self.give_up(error, out);
    }

    /// Handles the deadline of this rank's own call.
    fn expire(
        &mut self,
        now: Instant,
        what: String,
        waited: Duration,
        sequence: u64,
        peer: Option<Rank>,
        out: &mut Vec<Action>,
    ) {
        let reason = format!("{what} timed out after {waited:.1?}");
        // This comes first: this rank may be long past the sequence that has expired.
        self.tell_progress(out);
        out.push(Action::Broadcast(ControlMessage::Expired(sequence, reason)));
        match peer {
            Some(peer) => {
                let missing = vec![self.members.rank(peer.index())];
                self.fail(self.timeout(what, waited, missing), out);
            }
            None => self.ask(now, sequence, Expired::Here { what, waited }),
        }
    }

    /// Tells the other members how many collectives this rank has called.
    fn tell_progress(&mut self, out: &mut Vec<Action>) {
        let mine = self.log.head().sequence;
        self.progress[self.members.position] = Some(mine);
        out.push(Action::Broadcast(ControlMessage::Progress(mine)));
    }

    /// Waits until the other members report their progress.
    fn ask(&mut self, now: Instant, sequence: u64, expired: Expired) {
        self.phase = Phase::Asking { sequence, until: now + ANSWERS, expired };
    }

    /// Names the members that have not entered the collective whose deadline has passed, once all have answered, or no more answers
    /// will come.
    fn conclude_if_known(&mut self, now: Instant, out: &mut Vec<Action>) {
        let Phase::Asking { sequence, until, .. } = &self.phase else { return };
        if self.progress.iter().any(Option::is_none) && now < *until {
            return;
        }
        let sequence = *sequence;
        // Those with the fewest calls: the others may wait for them in an earlier call.
        let fewest = self.progress.iter().flatten().min().copied();
        let is_missing = |progress: &Option<u64>| {
            progress.is_none_or(|progress| progress < sequence && Some(progress) == fewest)
        };
        let members = self.members.all.iter().zip(&self.progress);
        let missing: Vec<Rank> =
            members.filter(|(_, p)| is_missing(p)).map(|(member, _)| member.rank).collect();
        let Phase::Asking { expired, .. } = std::mem::replace(&mut self.phase, Phase::Failed) else { return };
        let error = match expired {
            Expired::Here { what, waited } => self.timeout(what, waited, missing),
            Expired::At { rank, what } => {
                let names = match self.unresponsive(&missing) {
                    Some(member) => format!("rank {} is unresponsive", member.rank),
                    None => missing_ranks(&missing),
                };
                Error::PeerAborted { rank, reason: format!("{what}: {names}") }
            }
        };
        self.fail(error, out);
    }

    /// Returns the member without heartbeats that explains why these are missing, if there is one.
    fn unresponsive(&self, missing: &[Rank]) -> Option<&Member> {
        let silent = self.members.others().filter(|position| self.heartbeats.is_silent(*position));
        let rank = blame::unresponsive(silent.map(|position| self.members.rank(position)), missing)?;
        self.members.all.iter().find(|member| member.rank == rank)
    }

    fn timeout(&self, what: String, waited: Duration, missing: Vec<Rank>) -> Error {
        match self.unresponsive(&missing).cloned() {
            Some(Member { rank, host, pid, .. }) => {
                Error::PeerUnresponsive { rank, host, pid, during: what, waited }
            }
            None => Error::Timeout { what, waited, missing },
        }
    }

    /// Returns the current operation of the caller, or else the enqueued one that it waits for.
    fn during(&self) -> String {
        let inside = self.entry.filter(|entry| entry.number > self.exits).map(|entry| entry.call);
        let pending = inside.or_else(|| self.oldest().map(|pending| pending.call));
        pending.map_or_else(|| "no call".into(), words)
    }

    fn words(&self, call: Option<CallFingerprint>, sequence: u64) -> String {
        format!("call {sequence} of group `{}`, {},", self.members.group, words(call))
    }
}

fn words(call: Option<CallFingerprint>) -> String {
    call.map_or_else(|| "several calls".into(), |call| call.to_string())
}

fn broadcast_calls(first: u64, calls: &[CallFingerprint], out: &mut Vec<Action>) {
    for (index, calls) in calls.chunks(MAX_CALLS).enumerate() {
        let first = first + (index * MAX_CALLS) as u64;
        out.push(Action::Broadcast(ControlMessage::Calls(first, calls.to_vec())));
    }
}
