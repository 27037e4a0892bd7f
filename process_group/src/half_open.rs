//! Connections that have not proved themselves yet: how many there may be, and which goes when there are too many.

use std::collections::VecDeque;

use rustix::process::{Resource, getrlimit};
use tokio::task::AbortHandle;

/// The most connections, whatever the limit on open files.
const MOST: u64 = 4096;
/// The share of the limit on open files that they may take.
const SHARE: u64 = 4;

/// The tasks that let connections prove themselves, oldest first.
///
/// Whoever knows the job's secret needs milliseconds. So a new connection evicts the oldest, and strangers who connect and say
/// nothing keep nobody out. The application keeps three quarters of its descriptors.
#[derive(Debug)]
pub struct HalfOpen {
    most: usize,
    tasks: VecDeque<AbortHandle>,
}

impl Default for HalfOpen {
    fn default() -> Self {
        Self::at_most(MOST as usize)
    }
}

impl HalfOpen {
    /// For so many connections, or fewer where the limit on open files is low.
    pub fn at_most(most: usize) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self::new(most.min(usize::try_from(descriptors / SHARE).unwrap_or(usize::MAX)).max(1))
    }

    fn new(most: usize) -> Self {
        Self { most, tasks: VecDeque::new() }
    }

    /// A new connection's task. Ends the oldest if there are too many.
    pub fn push(&mut self, task: AbortHandle) {
        if self.tasks.len() >= self.most {
            self.tasks.retain(|task| !task.is_finished());
        }
        if self.tasks.len() >= self.most
            && let Some(oldest) = self.tasks.pop_front()
        {
            oldest.abort();
        }
        self.tasks.push_back(task);
    }

    /// The process is out of descriptors: ends the older half.
    pub fn shed(&mut self) {
        let half = self.tasks.len().div_ceil(2);
        self.tasks.drain(..half).for_each(|task| task.abort());
    }
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
            half_open.push(done.abort_handle());
            done.await.unwrap();
            let [first, second, third] = [waiting(), waiting(), waiting()];
            half_open.push(first.abort_handle());
            half_open.push(second.abort_handle());
            tokio::task::yield_now().await;
            assert!(!first.is_finished(), "the finished one made room");
            half_open.push(third.abort_handle());
            assert!(first.await.unwrap_err().is_cancelled());
            half_open.shed();
            assert!(second.await.unwrap_err().is_cancelled());
            tokio::task::yield_now().await;
            assert!(!third.is_finished());
        });
    }
}
