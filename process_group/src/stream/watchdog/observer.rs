//! The thread that queries the GPU and the library. The driver does not: when the GPU's queue is full, a thread that enqueues
//! blocks while it holds CUDA's locks, and queries block behind it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::monitored::Monitored;
use crate::device::{DeviceError, Event, Stream};
use crate::error::Error;

/// How long a look takes at most, unless CUDA holds it up.
const ANSWER: Duration = Duration::from_millis(2);

/// An event behind calls.
pub(super) struct Mark {
    pub(super) event: Arc<Event>,
    /// Whether its maker wants it back once it has been reached.
    pub(super) reuse: bool,
}

enum Order {
    /// Ask for this mark of a stream until it has been reached. Numbers of a stream's marks go up.
    Watch(usize, u64, Mark),
    /// Nobody asks for this mark.
    Discard(Mark),
    /// Place a mark on the first stream, behind this many calls.
    Place(u64),
    /// Say what there is to see; of the library's errors only if so.
    Look { asks_library: bool },
}

/// What the observer has seen.
#[derive(Default)]
pub(super) struct Seen {
    /// By stream: number of the newest mark that has been reached.
    pub(super) reached: [Option<u64>; 2],
    /// An error that the library or the GPU reports.
    pub(super) error: Option<Error>,
    /// A mark placed behind so many calls; none while the stream is captured, or when placing it failed.
    pub(super) placed: Option<(u64, Option<Event>)>,
}

/// The driver's end.
pub(super) struct Observer {
    orders: Option<Sender<Order>>,
    seen: Receiver<Seen>,
    /// A look has been ordered and not been answered.
    is_looking: bool,
}

impl Observer {
    /// Starts the thread. `stream` is the group's first stream; marks to use again go to `reuse`.
    pub(super) fn spawn(
        group: &str,
        monitored: Arc<dyn Monitored>,
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

    pub(super) fn watch(&self, stream: usize, number: u64, mark: Mark) {
        self.order(Order::Watch(stream, number, mark));
    }

    pub(super) fn discard(&self, mark: Mark) {
        self.order(Order::Discard(mark));
    }

    pub(super) fn place(&self, calls: u64) {
        self.order(Order::Place(calls));
    }

    /// What there is to see. `None` while CUDA holds the observer up: what it sees then comes with a later look.
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

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread is there for as long as the channel is.
            let _ = orders.send(order);
        }
    }

    /// Ends the thread, and waits for it for so long.
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
    monitored: Arc<dyn Monitored>,
    stream: Stream,
    reuse: Sender<Arc<Event>>,
    /// By stream, oldest first.
    marks: [VecDeque<(u64, Mark)>; 2],
    /// What the next answer says.
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
                    // Nobody listens once the driver has ended.
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
            // An engine captures its stream by itself: the mark would end up in its graph.
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
            // Whoever made it may be gone.
            let _ = self.reuse.send(mark.event);
        }
    }
}
