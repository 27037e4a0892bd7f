//! The worker threads of one rank: a fork and join with little overhead.
//!
//! A pass of a model forks a hundred times or more, each time for work of 10 µs to 1 ms, so the cost of waking a thread each time
//! would be significant. The caller's thread works too, and workers poll for the next job for some time before they sleep.
//!
//! Soundness: a job is borrowed from its caller's stack. A worker takes a part of it with one exchange of `State`, and reads the
//! job only after that. The caller returns after every part is done, so a job is alive as long as a part that was taken is not
//! done.
#![expect(
    unsafe_code,
    reason = "workers use what their caller has borrowed; the module says why it is still there"
)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The number of multiplications below which a product or an attention is not worth a second thread.
pub(crate) const PARALLEL_THRESHOLD: usize = 1 << 17;
/// Time for which a worker polls for the next job before it sleeps: longer than the single-threaded work of a layer.
const SPIN: Duration = Duration::from_micros(200);
/// Time for which it polls without yielding its CPU.
const BUSY: Duration = Duration::from_micros(20);

/// The threads of one rank. Ranks in one process must not take each other's CPUs, so there is no global pool.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

type Job = dyn Fn(usize) + Sync;
type Panic = Box<dyn Any + Send>;

#[derive(Debug)]
struct Shared {
    /// The number of the newest job in the upper half, and the number of its parts that are not taken in the lower.
    state: AtomicU64,
    /// Number of parts that are done.
    done: AtomicUsize,
    /// The caller writes it before it publishes the parts. A thread reads it after it has taken a part.
    job: UnsafeCell<Option<&'static Job>>,
    /// Lock of the workers: one caller at a time uses them.
    caller: Mutex<()>,
    /// Number of workers that sleep, or are about to.
    asleep: AtomicUsize,
    ends: AtomicBool,
    panic: Mutex<Option<Panic>>,
}

// SAFETY: all fields but `job` are `Sync` by themselves. The holder of `caller` writes `job` while no thread has a part. A thread
// reads `job` only after it takes a part. The exchange of `state` orders the read after the write. Jobs are `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: a reference to a `Sync` value may be sent.
unsafe impl Send for Shared {}

impl Threads {
    /// Creates `count` threads, including the caller's; the names of the others contain `what`.
    pub(crate) fn new(count: usize, what: &'static str) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            caller: Mutex::new(()),
            asleep: AtomicUsize::new(0),
            ends: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut workers = Vec::new();
        for index in 1..count {
            let (shared, name) = (Arc::clone(&shared), format!("ryz-{what}-{index}"));
            match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    // The results do not depend on the number of threads.
                    tracing::warn!(%error, threads = count, what, "cannot start threads; fewer do the work");
                    break;
                }
            }
        }
        Self { shared, workers }
    }

    /// Returns the number of threads that work.
    pub(crate) fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with each item, on all threads if that is worth it. Returns when all items are done.
    ///
    /// # Panics
    /// Panics if `work` does, after the workers have finished.
    pub(crate) fn for_each<I: Send>(
        &self,
        is_worth_it: bool,
        items: impl ExactSizeIterator<Item = I>,
        work: impl Fn(I) + Sync,
    ) {
        // If another call uses the workers, this thread processes all items itself.
        let caller = (is_worth_it && !self.workers.is_empty() && items.len() > 1)
            .then(|| self.shared.caller.try_lock().ok())
            .flatten();
        let Some(caller) = caller else { return items.for_each(work) };
        let items: Vec<Mutex<Option<I>>> = items.map(|item| Mutex::new(Some(item))).collect();
        let panic = self.run(items.len(), &|part| {
            let item = items[part].lock().unwrap_or_else(PoisonError::into_inner).take();
            work(item.expect("each part is taken once"));
        });
        drop(caller);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs all parts of a job, and returns the first panic. The caller holds `caller`.
    fn run(&self, parts: usize, job: &(dyn Fn(usize) + Sync)) -> Option<Panic> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. This function returns when every part is done, and no part can be taken afterwards.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Job>(job) };
        // SAFETY: the parts of the previous job are done, so no thread has one, and none can be taken until `state` is set below.
        unsafe { *shared.job.get() = Some(job) };
        shared.done.store(0, Relaxed);
        let number = (shared.state.load(Relaxed) >> 32).wrapping_add(1) as u32;
        shared.state.store(u64::from(number) << 32 | parts as u64, SeqCst);
        // A worker counts itself as asleep before its last check.
        if shared.asleep.load(SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
        while shared.take_part() {}
        let waiting = Instant::now();
        while shared.done.load(Acquire) < parts {
            pause(waiting);
        }
        shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.ends.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Its panics have been reported to its callers.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Takes a part and runs it. Returns `false` if there is none.
    fn take_part(&self) -> bool {
        let mut state = self.state.load(Acquire);
        loop {
            if state & u64::from(u32::MAX) == 0 {
                return false;
            }
            match self.state.compare_exchange_weak(state, state - 1, AcqRel, Acquire) {
                Ok(_) => break,
                Err(newer) => state = newer,
            }
        }
        let part = (state & u64::from(u32::MAX)) as usize - 1;
        // SAFETY: this thread has a part that is not done, so the job is set and is not written.
        let job = unsafe { *self.job.get() }.expect("a job was there before its parts");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(part))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        self.done.fetch_add(1, Release);
        true
    }

    fn has_parts(&self) -> bool {
        self.state.load(SeqCst) & u64::from(u32::MAX) != 0
    }

    /// Runs a worker until the end.
    fn work(&self) {
        let mut idle = Instant::now();
        while !self.ends.load(SeqCst) {
            if self.take_part() {
                while self.take_part() {}
                idle = Instant::now();
            } else if idle.elapsed() < SPIN {
                pause(idle);
            } else {
                self.asleep.fetch_add(1, SeqCst);
                if !self.has_parts() && !self.ends.load(SeqCst) {
                    std::thread::park();
                }
                self.asleep.fetch_sub(1, SeqCst);
                idle = Instant::now();
            }
        }
    }
}

/// Pauses between two checks of a thread that polls since `since`.
fn pause(since: Instant) {
    if since.elapsed() < BUSY {
        for _ in 0..16 {
            std::hint::spin_loop();
        }
    } else {
        std::thread::yield_now();
    }
}

/// Returns the number of the CPUs of this thread that each rank gets, if `ranks` share them.
pub(crate) fn per_rank(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    cores / ranks.max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_item_is_done_once_however_many_threads_and_callers() {
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(count, "test");
            std::thread::scope(|scope| {
                for caller in 0..3usize {
                    let threads = &threads;
                    scope.spawn(move || {
                        for round in 0..2000 {
                            let mut values = vec![0; (round + caller) % 40];
                            let items = values.iter_mut().enumerate();
                            threads.for_each(true, items, |(i, value)| *value += i + round);
                            assert!(values.iter().enumerate().all(|(i, value)| *value == i + round));
                            if round % 500 == 0 {
                                // Long enough for workers to fall asleep.
                                std::thread::sleep(2 * SPIN);
                            }
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn several_threads_work_at_the_same_time() {
        let threads = Threads::new(3, "test");
        let (barrier, seen) = (std::sync::Barrier::new(3), Mutex::new(HashSet::new()));
        threads.for_each(true, 0..3, |_| {
            barrier.wait();
            seen.lock().unwrap().insert(std::thread::current().id());
        });
        assert_eq!(seen.into_inner().unwrap().len(), 3);
    }

    #[test]
    fn a_part_that_calls_again_works_alone() {
        let threads = Threads::new(2, "test");
        let sum = AtomicUsize::new(0);
        threads.for_each(true, 0..4, |_| {
            threads.for_each(true, 0..5, |i| {
                sum.fetch_add(i, Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 40);
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_parts_and_the_threads_go_on() {
        let threads = Threads::new(2, "test");
        let done = AtomicUsize::new(0);
        let work = AssertUnwindSafe(|| {
            threads.for_each(true, 0..8, |i| {
                done.fetch_add(1, Relaxed);
                assert!(i != 5, "the fifth");
            });
        });
        let panic = catch_unwind(work).unwrap_err();
        assert!(panic.downcast_ref::<&str>().is_some_and(|text| *text == "the fifth"));
        assert_eq!(done.load(Relaxed), 8);
        threads.for_each(true, 0..8, |_| {
            done.fetch_add(1, Relaxed);
        });
        assert_eq!(done.into_inner(), 16);
    }
}
