//! The thread around a watchdog's core: listens to the other members, the caller and the [observer](super::observer), and executes
//! the actions of the core. It never calls CUDA, which can block.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::core::{Action, CallerEvent, Core, GroupMembers, Observation};
use super::monitored::{Monitored, abort_in_time};
use super::observer::{Mark, Observer, Order};
use super::status::{Pending, Status};
use crate::device::Event;
use crate::error::Error;
use crate::membership::roster::Member;
use crate::stream::control_mesh::{ControlMesh, PeerEvent};
use crate::stream::control_message::ControlMessage;

/// Interval at which the driver polls. An event on a link wakes it at once.
const INTERVAL: Duration = Duration::from_millis(20);
/// Time for the other members to learn that a group is given up. When its kernels are ended then, those of the other members
/// continue with whatever data they find.
const HEARD: Duration = Duration::from_millis(20);
/// Timeout at the end of a link for the end of the other side.
const CLOSING: Duration = Duration::from_millis(100);

/// A report of the caller's thread.
pub(super) enum Report {
    Caller(CallerEvent),
    /// A mark was placed after all calls so far of a stream.
    Mark {
        stream: usize,
        event: Arc<Event>,
        reuse: bool,
    },
}

pub(super) struct Driver {
    /// The newest enqueued calls.
    newest: Option<Pending>,
    status: Arc<Status>,
    mesh: ControlMesh,
    monitored: Monitored,
    observer: Observer,
    core: Core,
    reports: Receiver<Report>,
    /// For each stream, the numbers of the marks of the core's pending calls, oldest first.
    marks: [VecDeque<u64>; 2],
    newest_mark: u64,
}

impl Driver {
    pub(super) fn new(
        status: Arc<Status>,
        mesh: ControlMesh,
        monitored: Monitored,
        observer: Observer,
        reports: Receiver<Report>,
    ) -> Self {
        let core = Core::new(Arc::clone(&status.members));
        Self {
            newest: None,
            status,
            mesh,
            monitored,
            observer,
            core,
            reports,
            marks: Default::default(),
            newest_mark: 0,
        }
    }

    pub(super) fn run(mut self) {
        // A member that waits for others to make the communicator learns that this one is running.
        self.mesh.broadcast(&ControlMessage::Hello);
        let mut next_look = Instant::now();
        while !self.status.stop.load(Ordering::Acquire) || self.core.is_asking() {
            let heard = self.mesh.listen(next_look.saturating_duration_since(Instant::now()));
            let (now, mut actions) = (Instant::now(), Vec::new());
            self.take_reports(now, &mut actions);
            self.hear(now, heard, &mut actions);
            // Regardless of the number of messages, the members are not checked more often than that.
            if now >= next_look {
                next_look = now + INTERVAL;
                let seen = self.observe(now);
                self.core.observe(now, seen, &mut actions);
                self.status.set_pending(self.core.oldest().and(self.newest));
            }
            self.act(actions);
        }
        let mut actions = Vec::new();
        self.take_reports(Instant::now(), &mut actions);
        self.core.announce_exit(&mut actions);
        self.act(actions);
        self.mesh.broadcast(&ControlMessage::Goodbye);
        self.mesh.close(CLOSING);
        self.observer.close(CLOSING);
    }

    fn take_reports(&mut self, now: Instant, actions: &mut Vec<Action>) {
        // The number is limited, however fast calls come.
        for _ in 0..1 << 16 {
            let Ok(report) = self.reports.try_recv() else { return };
            match report {
                Report::Caller(event) => {
                    if matches!(event, CallerEvent::Idle) {
                        self.marks.iter_mut().for_each(VecDeque::clear);
                    }
                    let enqueued = match &event {
                        CallerEvent::Called(called) if !called.is_captured => {
                            Some((Some(called.call), called.at))
                        }
                        CallerEvent::GroupEnded { is_captured: false, .. } | CallerEvent::Launched => {
                            Some((None, now))
                        }
                        _ => None,
                    };
                    self.core.caller(now, event, actions);
                    if let Some((call, enqueued)) = enqueued {
                        self.newest = Some(Pending { number: self.core.collectives(), call, enqueued });
                    }
                }
                Report::Mark { stream, event, reuse } => {
                    let mark = Mark { event, reuse };
                    if self.core.marked(stream) {
                        self.watch(stream, mark);
                    } else {
                        self.observer.order(Order::Discard(mark));
                    }
                }
            }
        }
    }

    fn watch(&mut self, stream: usize, mark: Mark) {
        self.newest_mark += 1;
        self.marks[stream].push_back(self.newest_mark);
        self.observer.order(Order::Watch(stream, self.newest_mark, mark));
    }

    fn hear(&mut self, now: Instant, heard: Vec<(usize, PeerEvent)>, actions: &mut Vec<Action>) {
        for (position, event) in &heard {
            if let PeerEvent::Message(_) = event {
                self.status.heard_from(*position);
            }
        }
        // The thread that ends the watchdog needs no further messages.
        if !self.status.stop.load(Ordering::Acquire) || self.core.is_asking() {
            self.core.peers(now, heard, actions);
        }
    }

    /// Returns the observer's results on the GPU and the library.
    fn observe(&mut self, now: Instant) -> Observation {
        let exits = self.status.exits();
        // A library that fails inside a call reports it to the caller, who waits for the core to find the reason.
        let asks_library = !self.core.is_inside(exits) && !self.status.has_failed();
        let seen = self.observer.look(asks_library);
        let (has_answered, seen) = (seen.is_some(), seen.unwrap_or_default());
        let mut reached = [0; 2];
        for (stream, reached) in reached.iter_mut().enumerate() {
            while self.marks[stream].front().is_some_and(|first| seen.reached[stream] >= Some(*first)) {
                self.marks[stream].pop_front();
                *reached += 1;
            }
        }
        match seen.placed {
            None => {}
            // Not while the stream is captured: the core requests it again.
            Some((_, None)) => self.core.mark_failed(),
            Some((calls, Some(event))) => {
                let mark = Mark { event: Arc::new(event), reuse: false };
                if self.core.marked_late(calls, now) {
                    self.watch(0, mark);
                } else {
                    self.observer.order(Order::Discard(mark));
                }
            }
        }
        Observation { has_answered, exits, reached, error: seen.error }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(position, message) => self.mesh.send(position, &message),
                Action::Broadcast(message) => self.mesh.broadcast(&message),
                Action::Fail(error) => self.fail(error),
                Action::PlaceMark(calls) => self.observer.order(Order::Place(calls)),
                Action::Verified(outcome) => self.status.verified(outcome),
                Action::Unresponsive(position, is_silent) => self.tell(position, is_silent),
            }
        }
    }

    /// Reports that a member has stopped responding, or that it responds again.
    fn tell(&self, position: usize, is_silent: bool) {
        let GroupMembers { group, all, .. } = &*self.status.members;
        let Member { rank, host, pid, .. } = &all[position];
        if is_silent {
            tracing::warn!(
                %rank, host, pid, group,
                "rank {rank} (host {host}, pid {pid}) is unresponsive: its process is stopped, or its host or network is down. \
                 The call under way waits for it until the deadline"
            );
        } else {
            tracing::warn!(%rank, host, pid, group, "rank {rank} responds again");
        }
    }

    fn fail(&self, error: Error) {
        tracing::debug!(group = self.status.members.group, %error, "a group is given up");
        if self.status.fail(error) {
            std::thread::sleep(HEARD);
            abort_in_time(&self.status, &self.monitored);
        }
    }
}
