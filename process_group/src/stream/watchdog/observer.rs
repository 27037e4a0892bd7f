//! The thread that queries the GPU and the library. The driver does not: when the GPU's queue is full, a thread that enqueues
//! blocks while it holds CUDA's locks, and queries block until it releases them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::monitored::Monitored;
use crate::device::{DeviceError, Event, Stream};
use crate::error::Error;

/// Maximum duration of a look, unless CUDA blocks it.
const ANSWER: Duration = Duration::from_millis(2);

/// An event after calls.
pub(super) struct Mark {
    pub(super) event: Arc<Event>,
    /// True if its maker reuses it once it has been reached.
    pub(super) reuse: bool,
}

pub(super) enum Order {
    /// Queries this mark of a stream until it has been reached. The numbers of a stream's marks increase.
    Watch(usize, u64, Mark),
    /// Ends the queries of this mark.
    Discard(Mark),
    /// Places a mark on the first stream, after this many calls.
    Place(u64),
    /// Reports the observations; the library's errors only on request.
    Look { asks_library: bool },
}

/// The observations of the observer.
#[derive(Default)]
pub(super) struct Seen {
    /// Number of the newest reached mark of each stream.
    pub(super) reached: [Option<u64>; 2],
    /// An error that the library or the GPU reports.
    pub(super) error: Option<Error>,
    /// A mark placed after this number of calls; none while the stream is captured, or when placing it failed.
    pub(super) placed: Option<(u64, Option<Event>)>,
}

/// The driver's end.
pub(super) struct Observer {
    orders: Option<Sender<Order>>,
    seen: Receiver<Seen>,
    /// True if a look has been ordered and not been answered.
    is_looking: bool,
}

impl Observer {
    /// Starts the thread. `stream` is the group's first stream; marks for reuse go to `reuse`.
    pub(super) fn spawn(
        group: &str,
        monitored: Monitored,
        stream: Stream,
        reuse: Sender<Arc<Event>>,
    ) -> std::io::Result<Self> {
        let (orders, inbox) = channel();
        let (answers, seen) = channel();
        let thread =
            ObserverThread { monitored, stream, reuse, marks: Default::default(), seen: Seen::default() };
        std::thread::Builder::new()
            .name(format!("ryz-gpu-{group}"))
            .spawn(move || thread.run(&inbox, &answers))?;
        Ok(Self { orders: Some(orders), seen, is_looking: false })
    }

    /// Returns the observations. Returns `None` while CUDA blocks the observer: a later look then returns them.
    pub(super) fn look(&mut self, asks_library: bool) -> Option<Seen> {
        if !self.is_looking {
            self.order(Order::Look { asks_library });
            self.is_looking = true;
        }
        match self.seen.recv_timeout(ANSWER) {
            Ok(seen) => {
                self.is_looking = false;
                Some(seen)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                let error = Error::Transport("the thread that asks the GPU has ended".into());
                Some(Seen { error: Some(error), ..Seen::default() })
            }
        }
    }

    pub(super) fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread runs as long as the channel exists.
            let _ = orders.send(order);
        }
    }

    /// Ends the thread, and waits for it for at most this time.
    pub(super) fn close(mut self, patience: Duration) {
        self.orders = None;
        let until = Instant::now() + patience;
        loop {
            match self.seen.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

struct ObserverThread {
    monitored: Monitored,
    stream: Stream,
    reuse: Sender<Arc<Event>>,
    /// The marks of each stream, oldest first.
    marks: [VecDeque<(u64, Mark)>; 2],
    /// The content of the next answer.
    seen: Seen,
}

impl ObserverThread {
    fn run(mut self, orders: &Receiver<Order>, answers: &Sender<Seen>) {
        if let Err(failed) = self.stream.context().ask_during_captures() {
            self.fail(failed);
        }
        for order in orders {
            match order {
                Order::Watch(stream, number, mark) => self.marks[stream].push_back((number, mark)),
                Order::Discard(mark) => self.recycle(mark),
                Order::Place(calls) => self.place(calls),
                Order::Look { asks_library } => {
                    if asks_library {
                        self.seen.error = self.seen.error.take().or_else(|| self.monitored.async_error());
                    }
                    self.ask_for_marks();
                    // No receiver is left once the driver has ended.
                    let _ = answers.send(std::mem::take(&mut self.seen));
                }
            }
        }
    }

    fn ask_for_marks(&mut self) {
        for stream in 0..self.marks.len() {
            while let Some((_, mark)) = self.marks[stream].front() {
                match mark.event.is_done() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(failed) => {
                        self.fail(failed);
                        break;
                    }
                }
                if let Some((number, mark)) = self.marks[stream].pop_front() {
                    self.seen.reached[stream] = Some(number);
                    self.recycle(mark);
                }
            }
        }
    }

    fn place(&mut self, calls: u64) {
        let stream = &self.stream;
        let mut placed = None;
        let mut mark = || {
            // The engine is capturing its stream, so the mark would become part of its graph.
            if !stream.is_capturing()? {
                let event = Event::new(stream, false)?;
                event.record(stream)?;
                placed = Some(event);
            }
            Ok(())
        };
        if let Err(failed) = mark() {
            self.fail(failed);
        }
        self.seen.placed = Some((calls, placed));
    }

    fn fail(&mut self, failed: DeviceError) {
        self.seen.error.get_or_insert_with(|| failed.into());
    }

    fn recycle(&self, mark: Mark) {
        if mark.reuse {
            // Its maker may have ended.
            let _ = self.reuse.send(mark.event);
        }
    }
}
