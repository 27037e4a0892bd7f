//! The thread around a watchdog's core: listens to the other members and the caller, looks at the GPU, and does what the
//! core says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::core::{Action, CallerEvent, Core, Observation};
use super::monitored::{Monitored, retire};
use super::status::Status;
use crate::backend::stream::control_mesh::{ControlMesh, PeerEvent};
use crate::backend::stream::control_message::ControlMessage;
use crate::device::{DeviceError, Event, Stream};
use crate::error::Error;

/// How often the driver looks by itself; what comes over a link wakes it at once.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long the others have to hear that a group is given up. When its kernels are ended then, those of the others go on,
/// with whatever is there for data.
const HEARD: Duration = Duration::from_millis(20);
/// How long the end of a link waits for the other's.
const CLOSING: Duration = Duration::from_millis(100);

/// What the caller's thread reports.
pub(super) enum Report {
    Caller(CallerEvent),
    /// A mark stands behind all calls so far of a stream.
    Mark {
        stream: usize,
        event: Arc<Event>,
        reuse: bool,
    },
}

struct Mark {
    event: Arc<Event>,
    reuse: bool,
}

/// A mark placed from a thread of its own: behind how many calls.
type LateMark = (u64, Result<Event, DeviceError>);

pub(super) struct Driver {
    status: Arc<Status>,
    mesh: ControlMesh,
    monitored: Arc<dyn Monitored>,
    /// The group's first stream.
    stream: Stream,
    core: Core,
    reports: Receiver<Report>,
    reuse: Sender<Arc<Event>>,
    /// By stream, oldest first: each belongs to one entry of the core's pending calls.
    marks: [VecDeque<Mark>; 2],
    late_mark: Option<Receiver<LateMark>>,
}

impl Driver {
    pub(super) fn new(
        status: Arc<Status>,
        mesh: ControlMesh,
        monitored: Arc<dyn Monitored>,
        stream: Stream,
        (reports, reuse): (Receiver<Report>, Sender<Arc<Event>>),
    ) -> Self {
        let core = Core::new(Arc::clone(&status.members));
        Self {
            status,
            mesh,
            monitored,
            stream,
            core,
            reports,
            reuse,
            marks: Default::default(),
            late_mark: None,
        }
    }

    pub(super) fn run(mut self) {
        // A member that waits for others to make the communicator hears that this one is there.
        self.mesh.broadcast(&ControlMessage::Hello);
        let mut next_look = Instant::now();
        while !self.status.stop.load(Ordering::Acquire) || self.core.is_asking() {
            let heard = self.mesh.listen(next_look.saturating_duration_since(Instant::now()));
            let (now, mut actions) = (Instant::now(), Vec::new());
            self.take_reports(now, &mut actions);
            self.hear(now, heard, &mut actions);
            // However much is said, nobody is looked at more often than that.
            if now >= next_look {
                next_look = now + INTERVAL;
                let seen = self.observe(now);
                self.core.observe(now, seen, &mut actions);
            }
            self.act(actions);
        }
        let mut actions = Vec::new();
        self.take_reports(Instant::now(), &mut actions);
        self.core.announce_exit(&mut actions);
        self.act(actions);
        self.mesh.broadcast(&ControlMessage::Goodbye);
        self.mesh.close(CLOSING);
    }

    fn take_reports(&mut self, now: Instant, actions: &mut Vec<Action>) {
        // Not for ever, however fast calls come.
        for report in self.reports.try_iter().take(1 << 16) {
            match report {
                Report::Caller(event) => {
                    if matches!(event, CallerEvent::Idle) {
                        for mark in self.marks.iter_mut().flat_map(|marks| marks.drain(..)) {
                            recycle(&self.reuse, mark);
                        }
                    }
                    self.core.caller(now, event, actions);
                }
                Report::Mark { stream, event, reuse } => {
                    let mark = Mark { event, reuse };
                    if self.core.marked(stream) {
                        self.marks[stream].push_back(mark);
                    } else {
                        recycle(&self.reuse, mark);
                    }
                }
            }
        }
    }

    fn hear(&mut self, now: Instant, heard: Vec<(usize, PeerEvent)>, actions: &mut Vec<Action>) {
        for (position, event) in &heard {
            if let PeerEvent::Message(_) = event {
                self.status.heard_from(*position);
            }
        }
        // Whoever ends the watchdog has nothing more to hear.
        if !self.status.stop.load(Ordering::Acquire) || self.core.is_asking() {
            self.core.peers(now, heard, actions);
        }
    }

    /// Looks at the GPU and the library. Only asks: the GPU can hold up whoever enqueues.
    fn observe(&mut self, now: Instant) -> Observation {
        let exits = self.status.exits();
        // A library that fails under a caller says so to the caller, who waits for the core to find out why.
        let is_idle = !self.core.is_inside(exits) && !self.status.has_failed();
        let mut error = if is_idle { self.monitored.async_error() } else { None };
        let mut reached = [0; 2];
        for (stream, reached) in reached.iter_mut().enumerate() {
            while let Some(first) = self.marks[stream].front() {
                match first.event.is_done() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(failed) => {
                        error = error.or(Some(failed.into()));
                        break;
                    }
                }
                *reached += 1;
                if let Some(mark) = self.marks[stream].pop_front() {
                    recycle(&self.reuse, mark);
                }
            }
        }
        match self.late_mark.as_ref().map(Receiver::try_recv) {
            None | Some(Err(TryRecvError::Empty)) => {}
            Some(Err(TryRecvError::Disconnected)) => {
                self.late_mark = None;
                self.core.mark_failed();
            }
            Some(Ok((calls, placed))) => {
                self.late_mark = None;
                match placed {
                    Ok(event) if self.core.marked_late(calls, now) => {
                        self.marks[0].push_back(Mark { event: Arc::new(event), reuse: false });
                    }
                    Ok(_) => {}
                    Err(failed) => {
                        self.core.mark_failed();
                        error = error.or(Some(failed.into()));
                    }
                }
            }
        }
        Observation { exits, reached, error }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send(position, message) => self.mesh.send(position, &message),
                Action::Broadcast(message) => self.mesh.broadcast(&message),
                Action::Fail(error) => self.fail(error),
                Action::PlaceMark(calls) => {
                    self.late_mark = place_mark(&self.stream, calls);
                    if self.late_mark.is_none() {
                        self.core.mark_failed();
                    }
                }
                Action::Verified(outcome) => self.status.verified(outcome),
            }
        }
    }

    fn fail(&self, error: Error) {
        tracing::debug!(group = self.status.members.group, %error, "a group is given up");
        if self.status.fail(error) {
            std::thread::sleep(HEARD);
            retire(&self.status, &self.monitored);
        }
    }
}

fn recycle(reuse: &Sender<Arc<Event>>, mark: Mark) {
    if mark.reuse {
        // Whoever made it may be gone.
        let _ = reuse.send(mark.event);
    }
}

/// Places a mark behind this many calls, from a thread that the GPU may hold up.
fn place_mark(stream: &Stream, calls: u64) -> Option<Receiver<LateMark>> {
    let (sender, mark) = channel();
    let stream = stream.clone();
    let place = move || {
        let Ok(event) = Event::new(&stream, false) else { return };
        let mut outcome = None;
        let _ = stream.unless_capturing(|| {
            outcome = Some(event.record(&stream));
            Ok(())
        });
        // Not while the stream is captured: the core asks again.
        let Some(outcome) = outcome else { return };
        let _ = sender.send((calls, outcome.map(|()| event)));
    };
    std::thread::Builder::new().name("ryz-mark".into()).spawn(place).ok().map(|_| mark)
}
