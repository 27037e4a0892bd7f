//! The behaviour of a group when its user's buffers or its backend misbehave.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::backend::Backend;
use crate::backend::Completion;
use crate::backend::call::Call;
use crate::backend::timings::{CallTime, TimedCall, Timings};
use crate::cpu::{self, CpuGroup};
use crate::device::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::factory::AnyBackend;
use crate::paths::{Path, PathTable};
use crate::testing::{LATE, in_time};
use crate::types::dtype::DType;
use crate::types::operation::{CallFingerprint, ReduceOp};

fn info(name: &str, rank: u32, world_size: usize) -> GroupInfo {
    GroupInfo {
        name: name.into(),
        rank: Rank(rank),
        members: Rank::all(world_size).collect(),
        sharing_cpus: world_size,
        timeout: LATE,
        bucket_bytes: 1 << 20,
        numerics: Numerics::Fast,
        recording: Recording {
            record: false,
            newest_calls: 0,
            slow_call: Duration::MAX,
            slow_gbs: 1.0,
            every: Duration::MAX,
        },
        times_graphs: false,
    }
}

/// A buffer that behaves differently when it lends its elements for writing again, on the worker.
struct Fickle(Vec<f32>, usize, fn(&mut Vec<f32>));

impl Fickle {
    fn new(length: usize, then: fn(&mut Vec<f32>)) -> Self {
        Self(vec![1.0; length], 0, then)
    }
}

impl Buffer for Fickle {
    fn view(&self) -> View<'_> {
        self.0.view()
    }
}

impl BufferMut for Fickle {
    fn view_mut(&mut self) -> ViewMut<'_> {
        if self.1 > 0 {
            (self.2)(&mut self.0);
        }
        self.1 += 1;
        self.0.view_mut()
    }
}

#[test]
fn a_buffer_that_panics_on_the_worker_fails_the_group_and_hangs_nobody() {
    let mut ranks = ProcessGroup::loopback(2);
    let mut other = ranks.pop().unwrap();
    let mut group = ranks.pop().unwrap();
    let outcome = in_time(move || {
        let torn =
            group.all_reduce_async(Fickle::new(4, |_| panic!("this buffer is torn")), ReduceOp::Sum).unwrap();
        let behind = group.all_reduce_async(vec![1.0f32; 4], ReduceOp::Sum).unwrap();
        let last = group.barrier().unwrap_err();
        (torn.wait().map(drop).unwrap_err(), behind.wait().unwrap_err(), last)
    });
    assert!(outcome.0.to_string().contains("this buffer is torn"), "{}", outcome.0);
    assert!(matches!(outcome.1, Error::Poisoned(_)), "{}", outcome.1);
    assert!(matches!(outcome.2, Error::Poisoned(_)), "{}", outcome.2);
    let told = in_time(move || other.barrier().unwrap_err());
    assert!(told.to_string().contains("this buffer is torn"), "{told}");
}

#[test]
fn a_timeout_may_be_as_long_as_durations_are() {
    std::thread::scope(|scope| {
        for mut group in ProcessGroup::loopback(2) {
            scope.spawn(move || {
                group.set_timeout(Duration::MAX);
                group.barrier().unwrap();
                group.monitored_barrier(Duration::MAX).unwrap();
            });
        }
    });
}

#[test]
fn a_buffer_that_lends_other_elements_on_the_worker_is_refused_and_the_others_hear_of_it() {
    for then in [(|v| v.truncate(2)) as fn(&mut Vec<f32>), |v| v.resize(9, 1.0)] {
        let outcomes: Vec<Error> = std::thread::scope(|scope| {
            let ranks = ProcessGroup::loopback(2).into_iter();
            let calls = ranks.map(|mut group| {
                scope.spawn(move || {
                    if group.rank().0 == 0 {
                        let work = group.all_gather_async(Fickle::new(4, then)).unwrap();
                        return work.wait().map(drop).unwrap_err();
                    }
                    group.all_gather(&mut vec![1.0f32; 4]).unwrap_err()
                })
            });
            let calls: Vec<_> = calls.collect();
            calls.into_iter().map(|c| c.join().unwrap()).collect()
        });
        assert!(matches!(outcomes[0], Error::Invalid(_)), "{}", outcomes[0]);
        let told = matches!(&outcomes[1], Error::PeerAborted { rank: Rank(0), .. });
        assert!(told && outcomes[1].to_string().contains("held 4 f32"), "{}", outcomes[1]);
    }
}

/// The calls of a [`Failing`] backend and its store, in order.
type Log = Arc<Mutex<Vec<&'static str>>>;

/// A backend whose every call fails with this error.
struct Failing(Error, Log);

impl Backend for Failing {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn submit(&mut self, _: Call<'_>) -> Result<Completion> {
        Err(self.0.clone())
    }

    fn paths(&self) -> PathTable {
        PathTable::single(Path::Nccl, 2, "it is the only one")
    }

    fn force(&mut self, _: Option<Path>) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _: &Error) {
        lock(&self.1).push("abort");
    }
}

/// A store that never finds a key, regardless of the time it has, and logs its calls.
struct Deaf(Log);

impl Store for Deaf {
    fn set(&self, _: &str, _: &[u8]) -> Result<()> {
        lock(&self.0).push("abort reason");
        Ok(())
    }

    fn get(&self, _: &str, _: Instant) -> Result<Vec<u8>> {
        std::thread::sleep(10 * inner::REASON_WAIT);
        lock(&self.0).push("nothing found");
        Err(Error::Rendezvous("lost".into()))
    }

    fn add(&self, _: &str, _: i64) -> Result<i64> {
        Err(Error::Rendezvous("lost".into()))
    }
}

fn lost() -> Error {
    Error::PeerLost {
        rank: Rank(1),
        host: "there".into(),
        pid: 1,
        during: "a barrier".into(),
        detail: "closed".into(),
    }
}

#[test]
fn the_others_are_told_over_the_links_before_the_store_is_waited_for() {
    for error in [Error::Transport("broken".into()), lost()] {
        let log = Log::default();
        let backend = Box::new(Failing(error, Arc::clone(&log)));
        let store: Arc<dyn Store> = Arc::new(Deaf(Arc::clone(&log)));
        let mut group = ProcessGroup::on(info("failing", 0, 2), AnyBackend::Cpu(backend), Some(store), None);
        group.barrier().unwrap_err();
        assert_eq!(*lock(&log), ["abort", "abort reason"]);
    }
}

#[test]
fn the_last_call_is_known_while_it_waits() {
    let mut ranks = ProcessGroup::loopback(2);
    let (mut other, mut group) = (ranks.pop().unwrap(), ranks.pop().unwrap());
    let work = group.all_reduce_async(vec![1.0f32; 3], ReduceOp::Sum).unwrap();
    let until = Instant::now() + LATE;
    while group.last_call().is_none() {
        assert!(Instant::now() < until, "the worker makes the call");
        std::thread::yield_now();
    }
    // A reader that waited for the call would see it end with a timeout.
    other.all_reduce(&mut [1.0f32; 3], ReduceOp::Sum).unwrap();
    work.wait().unwrap();
    assert!(group.last_call().is_some_and(|call| call.path.is_some()));
}

#[test]
fn a_group_given_up_beside_its_calls_tells_the_others() {
    let ranks = ProcessGroup::loopback(2);
    ranks[0].abort(&Error::SelfCheck { path: "loopback".into(), reason: "one is two".into() });
    let mut other = ranks.into_iter().nth(1).unwrap();
    let told = other.barrier().unwrap_err();
    assert!(matches!(&told, Error::PeerAborted { rank: Rank(0), .. }), "{told}");
    assert!(told.to_string().contains("one is two"), "{told}");
}

#[test]
fn a_group_whose_name_is_longer_than_a_key_has_its_last_words_and_its_monitored_barrier() {
    let name = "group[0,1]".repeat(100);
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let errors = [Error::Transport("the cable was pulled".into()), lost()];
    let told: Vec<Error> = errors
        .into_iter()
        .zip([1, 0])
        .map(|(error, rank)| {
            let backend = Box::new(Failing(error, Log::default()));
            let mut group = ProcessGroup::on(
                info(&name, rank, 2),
                AnyBackend::Cpu(backend),
                Some(Arc::clone(&store)),
                None,
            );
            group.barrier().unwrap_err()
        })
        .collect();
    assert!(told[1].to_string().contains("the cable was pulled"), "{}", told[1]);

    let backend = Box::new(Failing(Error::Transport("not used".into()), Log::default()));
    let mut alone = ProcessGroup::on(info(&name, 0, 1), AnyBackend::Cpu(backend), Some(store), None);
    assert_eq!(alone.monitored_barrier(LATE).unwrap().len(), 1);
}

/// A backend that enqueues, and reports times of calls.
struct Timed(Arc<Times>);

/// Reports a millisecond for each requested call.
#[derive(Default)]
struct Times {
    calls: Mutex<Vec<CallFingerprint>>,
    ended: AtomicBool,
}

impl Timings for Times {
    fn take(&self) -> Vec<TimedCall> {
        // The last calls of a group have ended when its backend has.
        if !self.ended.load(Ordering::Acquire) {
            return Vec::new();
        }
        let calls = std::mem::take(&mut *lock(&self.calls));
        let time = CallTime::Took(Duration::from_millis(1));
        calls.into_iter().map(|call| TimedCall { call, path: Path::Nccl, time }).collect()
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
    }
}

impl Backend for Timed {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn submit(&mut self, call: Call<'_>) -> Result<Completion> {
        lock(&self.0.calls).push(call.fingerprint);
        Ok(Completion { path: Path::Nccl, enqueued: true, captured: false, waited: Duration::ZERO })
    }

    fn paths(&self) -> PathTable {
        PathTable::single(Path::Nccl, 2, "it is the only one")
    }

    fn force(&mut self, _: Option<Path>) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _: &Error) {}
}

#[test]
fn a_profile_keeps_the_times_of_a_group_that_has_ended_and_nothing_of_its_backend() {
    let times = Arc::new(Times::default());
    let left = Arc::downgrade(&times);
    let mut info = info("timed", 0, 2);
    info.recording.record = true;
    let timings = Arc::clone(&times) as Arc<dyn Timings>;
    let backend = AnyBackend::Cpu(Box::new(Timed(times)));
    let mut group = ProcessGroup::with(info, backend, Some((timings, None)), None, None);
    let profile = group.profile();
    group.all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).unwrap();
    assert!(left.upgrade().is_some());
    drop(group);
    assert!(left.upgrade().is_none(), "the backend's state is still there");
    let rows = profile.rows();
    assert_eq!((rows.len(), rows[0].calls, rows[0].timed), (1, 1, 1));
    assert!((900.0..1100.0).contains(&rows[0].median_us), "{}", rows[0].median_us);
}

#[test]
fn what_panics_without_profiling_leaves_the_group_as_it_was() {
    let mut group = ProcessGroup::loopback(1).remove(0);
    let calls = |group: &mut ProcessGroup| {
        group.profile().clear();
        group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap();
        group.profile().calls("all_reduce")
    };
    assert_eq!(calls(&mut group), 1);
    let panics = std::panic::AssertUnwindSafe(|| group.without_profiling(|_| panic!("on purpose")));
    assert!(std::panic::catch_unwind(panics).is_err());
    assert_eq!(calls(&mut group), 1);
    group.profile().clear();
    group.without_profiling(|group| group.all_reduce(&mut [1.0f32], ReduceOp::Sum)).unwrap();
    assert_eq!(group.profile().calls("all_reduce"), 0);
}

/// Selects the calls that fail.
type Fault = fn(&CallFingerprint) -> bool;

/// A backend that loses the operands of some calls.
struct Lossy(CpuGroup, Fault);

impl Backend for Lossy {
    fn kind(&self) -> BackendKind {
        BackendKind::Tcp
    }

    fn submit(&mut self, mut call: Call<'_>) -> Result<Completion> {
        if self.1(&call.fingerprint)
            && let Some(output) = &mut call.output
        {
            output.host()?.fill(0);
        }
        self.0.submit(call)
    }

    fn paths(&self) -> PathTable {
        self.0.paths()
    }

    fn force(&mut self, path: Option<Path>) -> Result<()> {
        self.0.force(path)
    }

    fn abort(&mut self, why: &Error) {
        self.0.abort(why);
    }
}

#[test]
fn the_self_check_finds_an_operation_or_a_type_that_is_wrong() {
    use crate::types::operation::Operation as Op;
    let faults: [(&str, Fault); 12] = [
        ("all_reduce(sum) of f32 is", |call| {
            call.operation == Op::AllReduce(ReduceOp::Sum) && call.count == 4099
        }),
        ("broadcast", |call| matches!(call.operation, Op::Broadcast { .. })),
        ("reduce(sum, root 2)", |call| matches!(call.operation, Op::Reduce { .. })),
        ("all_gather", |call| call.operation == Op::AllGather),
        ("reduce_scatter", |call| matches!(call.operation, Op::ReduceScatter(_))),
        ("gather", |call| matches!(call.operation, Op::Gather { .. })),
        ("scatter", |call| matches!(call.operation, Op::Scatter { .. })),
        ("all_to_all", |call| call.operation == Op::AllToAll),
        ("of bf16", |call| call.dtype == DType::BF16),
        ("of f16", |call| call.dtype == DType::F16),
        ("of i8", |call| call.dtype == DType::I8),
        ("of u64", |call| call.dtype == DType::U64),
    ];
    for (named, fault) in faults {
        let ranks: Vec<_> = Rank::all(3)
            .zip(cpu::threads("lossy", 3).unwrap())
            .map(|(rank, backend)| {
                let backend = Lossy(backend, fault);
                let mut group = ProcessGroup::on(
                    info("lossy", rank.0, 3),
                    AnyBackend::Cpu(Box::new(backend)),
                    None,
                    None,
                );
                std::thread::spawn(move || crate::manager::self_check::run(&mut group))
            })
            .collect();
        let mut found: Vec<Error> =
            in_time(|| ranks.into_iter().filter_map(|rank| rank.join().unwrap().err()).collect());
        found.retain(|error| matches!(error, Error::SelfCheck { .. }));
        assert!(!found.is_empty(), "{named}");
        for error in found {
            assert!(error.to_string().contains(named), "{named}: {error}");
        }
    }
}
