//! Who may enqueue on a stream: any number of threads, or the one that captures it into a graph.
//!
//! A capture takes whatever any thread enqueues on its stream. So the others wait until it has ended: what they enqueue would
//! neither run nor stay allocated for the graph.

use std::cell::RefCell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

thread_local! {
    /// The addresses of those whose turn this thread has.
    static MINE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The turns of one stream.
#[derive(Debug, Default)]
pub(super) struct Turns(RwLock<()>);

/// A thread's turn on a stream, until it is dropped.
#[must_use = "the turn ends when it is dropped"]
#[derive(Debug)]
pub struct Turn<'a> {
    turns: &'a Turns,
    held: Held<'a>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "guards are held, not read")]
enum Held<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Alone(RwLockWriteGuard<'a, ()>),
    /// This thread had its turn already.
    Nested,
}

impl Turns {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn is_mine(&self) -> bool {
        MINE.with_borrow(|mine| mine.contains(&self.address()))
    }

    fn begin<'a>(&'a self, held: Held<'a>) -> Turn<'a> {
        MINE.with_borrow_mut(|mine| mine.push(self.address()));
        Turn { turns: self, held }
    }

    /// A turn to enqueue something: waits while another thread captures. A thread that has its turn already keeps it.
    pub(super) fn enqueue(&self) -> Turn<'_> {
        if self.is_mine() {
            return Turn { turns: self, held: Held::Nested };
        }
        self.begin(Held::Shared(self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }

    /// As [`enqueue`](Self::enqueue), without waiting: `None` while another thread captures, or is about to.
    pub(super) fn try_enqueue(&self) -> Option<Turn<'_>> {
        if self.is_mine() {
            return Some(Turn { turns: self, held: Held::Nested });
        }
        match self.0.try_read() {
            Ok(guard) => Some(self.begin(Held::Shared(guard))),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.begin(Held::Shared(poisoned.into_inner()))),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// A turn to capture, alone: waits until no other thread has one. `None` if this thread has one already.
    pub(super) fn capture(&self) -> Option<Turn<'_>> {
        if self.is_mine() {
            return None;
        }
        Some(self.begin(Held::Alone(self.0.write().unwrap_or_else(PoisonError::into_inner))))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !matches!(self.held, Held::Nested) {
            let address = self.turns.address();
            MINE.with_borrow_mut(|mine| mine.retain(|held| *held != address));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_a_thread_enqueues_waits_until_another_has_captured() {
        let turns = Turns::default();
        let (events, seen) = mpsc::channel();
        std::thread::scope(|scope| {
            let capture = turns.capture().unwrap();
            let (started, has_started) = mpsc::channel();
            let enqueued = events.clone();
            let turns = &turns;
            scope.spawn(move || {
                assert!(turns.try_enqueue().is_none(), "another thread captures");
                started.send(()).unwrap();
                let _turn = turns.enqueue();
                enqueued.send("enqueued").unwrap();
            });
            has_started.recv_timeout(Duration::from_secs(20)).unwrap();
            // The thread that captures goes on.
            drop(turns.enqueue());
            drop(turns.try_enqueue().unwrap());
            events.send("captured").unwrap();
            drop(capture);
        });
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), ["captured", "enqueued"]);
    }

    #[test]
    fn threads_enqueue_at_the_same_time() {
        let turns = Turns::default();
        let _mine = turns.enqueue();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(turns.try_enqueue().is_some()));
        });
    }

    #[test]
    fn a_thread_that_has_its_turn_enqueues_more_and_captures_nothing() {
        let turns = Turns::default();
        let outer = turns.enqueue();
        drop(turns.enqueue());
        assert!(turns.capture().is_none(), "the inner one has not ended the turn");
        drop(outer);
        let capture = turns.capture().unwrap();
        assert!(turns.capture().is_none());
        drop(capture);
        assert!(turns.capture().is_some());
    }

    #[test]
    fn turns_on_two_streams_are_two() {
        let (one, other) = (Turns::default(), Turns::default());
        let _capture = one.capture().unwrap();
        assert!(other.capture().is_some());
    }
}
