//! Connections that have not proved themselves yet: their maximum number, and the eviction beyond it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, getrlimit};
use tokio::task::AbortHandle;

/// A connection's place among those that have not proved themselves. Exactly one of its two ends takes it: the task, which
/// [releases](Self::release) it, or the queue, which evicts it.
#[derive(Clone, Default, Debug)]
pub struct AdmissionToken(Arc<AtomicBool>);

impl AdmissionToken {
    /// Marks that the connection has proved that it belongs to the job: it is no longer evicted.
    pub fn release(&self) {
        self.take();
    }

    /// Returns true if it was not taken before.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    fn is_taken(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The tasks of connections that have not proved themselves, oldest first.
///
/// A client that knows the job's secret needs milliseconds. So a new connection evicts the oldest, and clients that connect and
/// send nothing block no other. A connection whose [`AdmissionToken`] is released is not evicted, however long it still takes.
#[derive(Debug)]
pub struct HalfOpen {
    most: usize,
    tasks: VecDeque<(AbortHandle, AdmissionToken)>,
    /// The code of the last error that was logged as a warning: the same again is no news.
    warned: Option<i32>,
}

impl Default for HalfOpen {
    /// Allows 4096 connections, or a quarter of the limit on open files if that is less.
    fn default() -> Self {
        Self::at_most(4096)
    }
}

impl HalfOpen {
    /// Allows this number of connections, or a quarter of the limit on open files if that is less: the rest is the application's,
    /// or is for the pipes and connections of ranks.
    pub fn at_most(most: usize) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::new(most.min(usize::try_from(descriptors / 4).unwrap_or(usize::MAX)).max(1))
    }

    fn new(most: usize) -> Self {
        Self { most, tasks: VecDeque::new(), warned: None }
    }

    /// Adds a new connection's task. Ends the oldest if there are too many, and returns the number of ended ones.
    ///
    /// On a runtime of one thread, they have closed their connections then, and the others have had their turn: accepting more
    /// connections at once would leave neither descriptors nor time for those that prove themselves.
    pub async fn push(&mut self, task: AbortHandle, admission: AdmissionToken) -> usize {
        // A task keeps its memory as long as its handle is here. The oldest is here only until its time to prove itself is over.
        while self.tasks.front().is_some_and(needs_no_place) {
            self.tasks.pop_front();
        }
        if self.tasks.len() >= self.most {
            self.forget();
        }
        let evicted = self.evict((self.tasks.len() + 1).saturating_sub(self.most));
        self.tasks.push_back((task, admission));
        if evicted > 0 {
            tokio::task::yield_now().await;
        }
        evicted
    }

    /// Called when `who` cannot accept a connection, most likely because the process is out of descriptors: warns, ends the older
    /// half, and returns the number of ended ones.
    pub fn shed(&mut self, who: &str, error: &io::Error) -> usize {
        let code = error.raw_os_error();
        if code.is_some() && self.warned == code {
            tracing::debug!(%error, "{who} cannot accept a connection");
        } else {
            self.warned = code;
            tracing::warn!(
                "{who} cannot accept a connection: {error}; the other end waits. If this process has too many open files, close \
                 some, or raise the limit (`ulimit -n`)"
            );
        }
        self.forget();
        self.evict(self.tasks.len().div_ceil(2))
    }

    /// Drops those that need no place any more.
    fn forget(&mut self) {
        self.tasks.retain(|entry| !needs_no_place(entry));
    }

    fn evict(&mut self, oldest: usize) -> usize {
        let mut evicted = 0;
        for (task, admission) in self.tasks.drain(..oldest) {
            // It may just have left its admission.
            if admission.take() {
                task.abort();
                evicted += 1;
            }
        }
        evicted
    }
}

fn needs_no_place((task, admission): &(AbortHandle, AdmissionToken)) -> bool {
    task.is_finished() || admission.is_taken()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_connection_evicts_the_oldest_and_finished_ones_count_no_more() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut half_open = HalfOpen::new(2);
            let waiting = || tokio::spawn(std::future::pending::<()>());
            let done = tokio::spawn(async {});
            assert_eq!(half_open.push(done.abort_handle(), AdmissionToken::default()).await, 0);
            done.await.unwrap();
            let [first, second, third] = [waiting(), waiting(), waiting()];
            assert_eq!(half_open.push(first.abort_handle(), AdmissionToken::default()).await, 0);
            assert_eq!(half_open.push(second.abort_handle(), AdmissionToken::default()).await, 0);
            tokio::task::yield_now().await;
            assert!(!first.is_finished(), "the finished one made room");
            assert_eq!(half_open.push(third.abort_handle(), AdmissionToken::default()).await, 1);
            assert!(first.is_finished(), "its descriptor is free at once");
            assert!(first.await.unwrap_err().is_cancelled());
            let full = io::Error::from_raw_os_error(24);
            assert_eq!(half_open.shed("this test", &full), 1);
            assert_eq!(half_open.warned, Some(24));
            assert!(second.await.unwrap_err().is_cancelled());
            tokio::task::yield_now().await;
            assert!(!third.is_finished());
        });
    }

    #[test]
    fn finished_connections_leave_the_queue_before_it_is_full() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut half_open = HalfOpen::new(100);
            for _ in 0..5 {
                let done = tokio::spawn(async {});
                half_open.push(done.abort_handle(), AdmissionToken::default()).await;
                done.await.unwrap();
            }
            assert_eq!(half_open.tasks.len(), 1);
        });
    }

    #[test]
    fn a_connection_whose_token_is_released_is_not_evicted() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut half_open = HalfOpen::new(1);
            let waiting = || tokio::spawn(std::future::pending::<()>());
            let [proved, outsider] = [waiting(), waiting()];
            let admission = AdmissionToken::default();
            half_open.push(proved.abort_handle(), admission.clone()).await;
            admission.release();
            assert_eq!(half_open.push(outsider.abort_handle(), AdmissionToken::default()).await, 0);
            let full = io::Error::from_raw_os_error(24);
            assert_eq!(half_open.shed("this test", &full), 1);
            assert!(outsider.await.unwrap_err().is_cancelled());
            tokio::task::yield_now().await;
            assert!(!proved.is_finished());
        });
    }
}
