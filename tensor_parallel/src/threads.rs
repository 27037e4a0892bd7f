//! The threads of one rank beside its own.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Fewer multiplications than this, in a product or in attention, are not worth a second thread.
pub(crate) const WORTH_THREADS: usize = 1 << 17;

/// Threads that wait for work. Ranks that share a machine must not take each other's processors, so none uses a pool that
/// belongs to the whole process.
#[derive(Debug)]
pub(crate) struct Threads(Option<ThreadPool>);

impl Threads {
    /// So many; with one, the caller's own does the work. `what` they are for is in their names.
    pub(crate) fn new(count: usize, what: &'static str) -> Self {
        if count < 2 {
            return Self(None);
        }
        let name = move |index| format!("ryz-{what}-{index}");
        match ThreadPoolBuilder::new().num_threads(count).thread_name(name).build() {
            Ok(pool) => Self(Some(pool)),
            Err(error) => {
                // The results are the same.
                tracing::warn!(%error, threads = count, what, "cannot start threads; one alone does the work");
                Self(None)
            }
        }
    }

    /// The threads, if there are any and the work is worth starting them; `None` means the caller's own.
    pub(crate) fn when(&self, is_worth_it: bool) -> Option<&ThreadPool> {
        self.0.as_ref().filter(|_| is_worth_it)
    }
}

/// How many of this machine's processors each of `ranks` ranks may use, as if all of them ran here.
pub(crate) fn of_each(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores / ranks.max(1)
}
