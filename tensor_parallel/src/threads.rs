//! The worker threads of one rank.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// A product or an attention with fewer multiplications than this is not worth a second thread.
pub(crate) const PARALLEL_THRESHOLD: usize = 1 << 17;

/// A pool of threads that belongs to one rank. Ranks in one process must not take each other's processors, so none uses the
/// global pool.
#[derive(Debug)]
pub(crate) struct Threads(Option<ThreadPool>);

impl Threads {
    /// Starts `count` threads, with `what` in their names. With one, the caller's thread does the work.
    pub(crate) fn new(count: usize, what: &'static str) -> Self {
        if count < 2 {
            return Self(None);
        }
        let name = move |index| format!("ryz-{what}-{index}");
        match ThreadPoolBuilder::new().num_threads(count).thread_name(name).build() {
            Ok(pool) => Self(Some(pool)),
            Err(error) => {
                // The results are the same.
                tracing::warn!(%error, threads = count, what, "cannot start threads; the caller's thread does the work");
                Self(None)
            }
        }
    }

    /// The pool, if there is one and the work is worth it; `None` means the caller's thread.
    pub(crate) fn pool_if(&self, is_worth_it: bool) -> Option<&ThreadPool> {
        self.0.as_ref().filter(|_| is_worth_it)
    }
}

/// How many of this machine's processors each rank may use, if all `ranks` of them run here.
pub(crate) fn per_rank(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores / ranks.max(1)
}
