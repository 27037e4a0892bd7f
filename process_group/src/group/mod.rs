//! A process group, which checks, numbers, times and records all calls.

mod add_norm;
mod asynchronous;
pub(crate) mod buckets;
mod capture;
mod checks;
mod coalesce;
mod collectives;
mod compressed;
mod inner;
mod memory;
mod monitored;
mod objects;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod work;

pub use capture::CapturedCalls;
pub use compressed::WireType;
pub use monitored::Arrival;
pub use transfer::GroupBuffer;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ryzanstein_config::Numerics;

use crate::backend::call::Interrupt;
use crate::backend::timings::Timings;
use crate::cpu;
use crate::device::Device;
use crate::device::buffer::Memory;
use crate::device::wire::WireMemory;
use crate::error::{Error, Result};
use crate::factory::AnyBackend;
use crate::membership::store::{MemoryStore, Rounds, Store};
use crate::observe::flight_recorder::FlightRecorder;
use crate::observe::profile::{LastCall, Profile, Recording};
use crate::paths::{Path, PathChoice};
use crate::types::backend_kind::BackendKind;
use crate::types::dtype::DType;
use crate::types::operation::{Composed, Operation};
use crate::types::rank::Rank;
use crate::types::sync::lock;
use inner::{AbortReasons, Closing, Core, GroupInner, Worker};

/// The properties of a group, apart from its backend.
#[derive(Clone, Debug)]
pub struct GroupInfo {
    /// Its name; the same on all members, unique in the job.
    pub name: String,
    /// This rank's position in the group.
    pub rank: Rank,
    /// Global rank of each member, in group order.
    pub members: Vec<Rank>,
    /// Number of members that share this rank's CPUs, including this rank.
    pub sharing_cpus: usize,
    /// Deadline of every call.
    pub timeout: Duration,
    /// Bucket of coalesced calls, in bytes.
    pub bucket_bytes: usize,
    /// The order in which models on the group add numbers.
    pub numerics: Numerics,
    /// Settings for the recording of calls.
    pub recording: Recording,
    /// True if graphs time some of their calls.
    pub times_graphs: bool,
}

/// Ranks that call collectives together. Every member makes the same calls in the same order.
///
/// Ranks and roots here are positions in the group, from 0. Calls check their arguments before the rank sends anything. After a
/// transport failure, a timeout or a mismatch the group is poisoned: every later call returns [`Error::Poisoned`] with the cause.
///
/// ```
/// use ryzanstein_process_group::{ProcessGroup, ReduceOp};
///
/// let sums: Vec<f32> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = ProcessGroup::loopback(4)
///         .into_iter()
///         .map(|mut group| {
///             scope.spawn(move || {
///                 let mut x = [group.rank().0 as f32; 3];
///                 group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
///                 x[0]
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|r| r.join().unwrap()).collect()
/// });
/// assert_eq!(sums, [6.0; 4]);
/// ```
#[derive(Debug)]
pub struct ProcessGroup {
    info: GroupInfo,
    kind: BackendKind,
    memory: Memory,
    device: Option<Device>,
    inner: Arc<GroupInner>,
    worker: Option<Worker>,
    collectives: u64,
    /// The composed call whose parts are being made.
    composed: Composed,
    monitored: Rounds,
    sent: HashMap<Rank, u64>,
    received: HashMap<Rank, u64>,
    /// The memory for 16-bit values of compressed all-reduces, kept between them.
    wire: Option<WireMemory>,
}

impl ProcessGroup {
    /// Puts a group on a backend that a factory has connected. The records of `flight` contain its calls.
    pub(crate) fn on(
        info: GroupInfo,
        backend: AnyBackend,
        store: Option<Arc<dyn Store>>,
        flight: Option<FlightRecorder>,
    ) -> Self {
        let instruments = backend.stream().map(|stream| (stream.timings(), stream.link_gbs()));
        Self::with(info, backend, instruments, store, flight)
    }

    /// Creates a group. `instruments` are the source of times of enqueued calls, and the bandwidth of this rank's links.
    fn with(
        info: GroupInfo,
        backend: AnyBackend,
        instruments: Option<(Arc<dyn Timings>, Option<f64>)>,
        store: Option<Arc<dyn Store>>,
        flight: Option<FlightRecorder>,
    ) -> Self {
        let world_size = info.members.len();
        let global = info.members[info.rank.index()];
        let (kind, device) =
            (backend.backend().kind(), backend.stream().map(|stream| stream.device().clone()));
        let memory = device.as_ref().map_or(Memory::Host, |device| Memory::Device(device.ordinal()));
        let profile = Arc::new(Profile::new(&info.name, global, &info.members, info.recording, instruments));
        let (timeout, interrupt) = (info.timeout, Arc::new(Interrupt::default()));
        if let Some(flight) = &flight {
            let status = backend.stream().map(|stream| stream.watchdog().status());
            flight.add(&profile, status);
        }
        let core = Core {
            backend,
            memory,
            failed: None,
            profile: Arc::clone(&profile),
            timeout,
            world_size,
            interrupt: Arc::clone(&interrupt),
        };
        let abort_reasons = store.map(|store| AbortReasons {
            store,
            group: info.name.clone(),
            rank: info.members[info.rank.index()],
        });
        let closing = Closing(Arc::clone(&profile));
        let (queued, idle) = (Mutex::new(0), Condvar::new());
        let core = Mutex::new(core);
        let inner =
            GroupInner { core, queued, idle, interrupt, profile, flight, abort_reasons, _closing: closing };
        let inner = Arc::new(inner);
        Self {
            info,
            kind,
            memory,
            device,
            inner,
            worker: None,
            collectives: 0,
            composed: Composed::NONE,
            monitored: Rounds::default(),
            sent: HashMap::new(),
            received: HashMap::new(),
            wire: None,
        }
    }

    /// Creates the ranks of a group whose members are threads of this process, with a timeout of a minute and no warnings of slow
    /// calls: element `r` is rank `r`.
    ///
    /// # Panics
    /// When the operating system gives no socket for each two ranks.
    pub fn loopback(world_size: usize) -> Vec<Self> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let members: Vec<Rank> = Rank::all(world_size).collect();
        let backends = cpu::threads("loopback", world_size).expect("the system gives sockets");
        Rank::all(world_size)
            .zip(backends)
            .map(|(rank, backend)| {
                let info = GroupInfo {
                    name: "loopback".into(),
                    rank,
                    members: members.clone(),
                    sharing_cpus: world_size,
                    timeout: Duration::from_secs(60),
                    bucket_bytes: 25 << 20,
                    numerics: Numerics::Fast,
                    recording: Recording {
                        record: true,
                        newest_calls: 0,
                        slow_call: Duration::MAX,
                        slow_gbs: 1.0,
                        every: Duration::MAX,
                    },
                    times_graphs: false,
                };
                Self::on(info, AnyBackend::Cpu(Box::new(backend)), Some(Arc::clone(&store)), None)
            })
            .collect()
    }

    /// Returns this rank's position in the group.
    pub fn rank(&self) -> Rank {
        self.info.rank
    }

    /// Returns the number of members.
    pub fn world_size(&self) -> usize {
        self.info.members.len()
    }

    /// Returns the number of members that share this rank's CPUs, including this rank: those of its host, unless a launcher has
    /// bound ranks to CPUs of their own.
    pub fn sharing_cpus(&self) -> usize {
        self.info.sharing_cpus
    }

    /// Returns the order in which models on the group add numbers: that of `model.numerics`, and [`Numerics::Fast`] in a
    /// [`loopback`](Self::loopback) group.
    pub fn numerics(&self) -> Numerics {
        self.info.numerics
    }

    /// Changes the order in which models that are loaded from now on add numbers. All members must choose the same.
    pub fn set_numerics(&mut self, numerics: Numerics) {
        self.info.numerics = numerics;
    }

    /// Returns the global ranks of the members, in group order.
    pub fn members(&self) -> &[Rank] {
        &self.info.members
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// Returns the kind of the backend that executes the calls.
    pub fn backend(&self) -> BackendKind {
        self.kind
    }

    /// Returns the memory in which the buffers of its calls must be.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Returns the GPU of that memory, if it is GPU memory.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Returns the measurements so far.
    pub fn profile(&self) -> Arc<Profile> {
        Arc::clone(&self.inner.profile)
    }

    /// Makes calls that are not the caller's own, such as those of a warm-up: the profile does not contain them, and no warning
    /// reports them as slow. On a GPU, `work` must wait for them, and earlier calls in progress lose their times.
    pub fn without_profiling<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.wait_idle();
        self.inner.profile.pause(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)));
        self.wait_idle();
        self.inner.profile.pause(false);
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Changes the deadline of later calls.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.wait_idle();
        self.info.timeout = timeout;
        lock(&self.inner.core).timeout = timeout;
    }

    /// Returns the paths that calls of this group may take.
    pub fn paths(&self) -> Vec<Path> {
        lock(&self.inner.core).backend.backend().paths().all().to_vec()
    }

    /// Returns the sizes in bytes from which on an all-reduce may take another path.
    pub(crate) fn thresholds(&self) -> Vec<usize> {
        lock(&self.inner.core).backend.backend().paths().thresholds()
    }

    /// Describes in prose when this group takes each path, and why it does not have the other possible paths.
    pub fn describe_paths(&self) -> Vec<(Path, String)> {
        lock(&self.inner.core).backend.backend().paths().describe()
    }

    /// Returns the path that a call of this kind takes now, the reason, and the reasons against the other paths. `count` is the
    /// number of elements of the vector, or of one rank's chunk where [`Operation::is_chunked`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when the operation names a rank that is not in the group, or the buffers of all ranks together
    /// have more bytes than `usize` counts.
    pub fn explain(&self, operation: Operation, dtype: DType, count: usize) -> Result<PathChoice> {
        self.check_ranks(operation)?;
        let bytes =
            count.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_mul(2 * self.world_size()));
        if bytes.is_none_or(|bytes| bytes.checked_mul(self.world_size()).is_none()) {
            return Err(Error::invalid(format!(
                "{operation}: {count} elements of {dtype} are more than memory holds"
            )));
        }
        Ok(lock(&self.inner.core).backend.backend().paths().choose(operation, dtype, count))
    }

    /// Forces later calls to take one path (every rank must do the same), or lets the backend choose again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the backend has no such path.
    pub fn force_path(&mut self, path: Option<Path>) -> Result<()> {
        self.wait_idle();
        lock(&self.inner.core).backend.backend_mut().force(path)
    }

    /// Returns the newest call, for reports of a rank's activity at its failure. Does not wait for one that is in progress.
    pub fn last_call(&self) -> Option<LastCall> {
        self.inner.profile.last_call()
    }

    /// Forgets the last call: a report should name no call that the user did not make.
    pub(crate) fn forget_last_call(&mut self) {
        self.inner.profile.forget_last_call();
    }

    /// Ends the worker's current call, and every later one, with this error.
    pub(crate) fn interrupt(&self, error: &Error) {
        self.inner.interrupt(error);
    }

    /// Gives the group up for an error outside its calls, so that the other ranks learn of it.
    pub(crate) fn abort(&self, error: &Error) {
        self.inner.interrupt(error);
        self.wait_idle();
        self.inner.abort(error.clone());
    }

    /// Returns the reason why the group cannot be used any more, if there is one.
    pub fn failure(&self) -> Option<Arc<Error>> {
        lock(&self.inner.core).failed.clone()
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Otherwise the other ranks would conclude that this rank has left in good order. The manager may have told them
            // already. A call in progress ends first: it holds the state.
            let error = Error::Panicked("see what it wrote to its standard error".into());
            self.inner.interrupt(&error);
            if self.failure().is_none() {
                self.inner.abort(error);
                self.inner.write_record();
            }
        }
        if let Some(mut worker) = self.worker.take() {
            // Closing the queue ends the worker after the queued operations, each of which has a deadline.
            drop(worker.jobs.take());
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join();
            }
        }
    }
}
