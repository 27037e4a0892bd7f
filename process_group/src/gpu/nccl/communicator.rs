//! NCCL's communicators of one group: their creation and their end. `launch.rs` enqueues calls on them.
//!
//! A group has up to three. The *bootstrap* communicator comes from a unique id; other groups are split off it, and nothing
//! else uses it. The *abort* communicator is split off a bootstrap communicator. Calls run on the third, the *launch*
//! communicator, which is split off the abort communicator and shares NCCL's abort flag with it.
//!
//! Bootstrap and abort communicator do not block: creation and split are started and then polled, so that a lost rank blocks no
//! other rank beyond the deadline. The launch communicator does block until NCCL has enqueued a call, because NCCL starts a thread
//! for each call on a non-blocking communicator, which takes longer than the call. If a call stays inside NCCL (a peer is
//! lost before it has connected, or the GPU accepts no more work), aborting the abort communicator, which no caller ever uses, ends
//! it; only then is the launch communicator freed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::device::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};
use crate::device::nccl::{id_bytes, id_from_bytes};
use crate::device::symbols::foreign;
use crate::device::symbols::text;
use crate::device::{Device, Handle, Nccl, NcclError};
use crate::error::{Error, Result};
use crate::membership::store::{self, Store, Watched, group_key};
use crate::stream::Status;
use crate::types::rank::Rank;
use crate::types::sync::lock;

const IN_PROGRESS: i32 = 7;
/// Time for which a closed group polls for the end of its calls. The watchdog gives the group up before.
const DRAIN: Duration = Duration::from_secs(20);
/// Timeout for NCCL to finish a communicator that is no longer in use.
const FINISH: Duration = Duration::from_secs(5);
/// Time for the other ranks to learn that a group has failed, before its calls are aborted.
const HEARD: Duration = Duration::from_millis(20);

/// The way in which a group's communicators are made.
pub(crate) enum CommInit<'a> {
    /// From a new unique id, which the group's rank 0 writes to the store.
    Id(&'a dyn Store),
    /// Split off another group's communicator. All members of that group do so at the same time, after [`NcclComm::gather`].
    /// Members with the same colour form a communicator, in the order of the key that follows it. The member of a group of one
    /// takes part, and gets none.
    Split(&'a NcclComm, u32, u32),
}

/// One of a group's communicators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Bootstrap,
    Abort,
    Launch,
}

/// The communicators that do not block.
#[derive(Default)]
struct ParentComms {
    bootstrap: Option<Handle>,
    abort: Option<Handle>,
}

/// NCCL's communicators of one group.
pub(crate) struct NcclComm {
    pub(super) nccl: Nccl,
    pub(super) device: Device,
    pub(super) status: Arc<Status>,
    /// Locked while other communicators are split off them.
    parents: Mutex<ParentComms>,
    /// None before it is made and after it has been given up. A caller inside NCCL uses its own copy: the communicator is freed
    /// only when no caller is inside.
    launch: Mutex<Option<Handle>>,
    is_drained: AtomicBool,
}

/// Returns the configuration of NCCL 2.18, the oldest supported version: newer ones use the given part and their defaults for the
/// rest. NCCL chooses all values that are not set.
const fn config(kind: Kind) -> ncclConfig_t {
    const UNSET: i32 = i32::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: matches!(kind, Kind::Launch) as i32,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        // Applies to a communicator and those split off it.
        splitShare: matches!(kind, Kind::Abort) as i32,
    }
}

/// The location where NCCL writes the handle of a communicator that it makes. NCCL does so from a thread of its own, which may be
/// late: the location is freed only once NCCL has reported that it is done.
struct HandleSlot(Box<AtomicUsize>);

impl HandleSlot {
    fn new() -> Self {
        Self(Box::new(AtomicUsize::new(0)))
    }

    fn now(&self) -> Handle {
        self.0.load(Ordering::Acquire)
    }

    /// Leaks it for NCCL, which may still write to it at any time.
    fn abandon(self) {
        Box::leak(self.0);
    }
}

/// Turns success into progress: creation, split and finalization of a communicator report success when they have only begun, and
/// must be polled.
const fn begun(code: i32) -> i32 {
    if code == 0 { IN_PROGRESS } else { code }
}

impl NcclComm {
    /// Creates a group whose communicators are not made yet.
    pub(super) fn new(nccl: Nccl, device: &Device, status: &Arc<Status>) -> Self {
        Self {
            nccl,
            device: device.clone(),
            status: Arc::clone(status),
            parents: Mutex::default(),
            launch: Mutex::default(),
            is_drained: AtomicBool::new(false),
        }
    }

    /// Makes the communicators, or gives up at the deadline, when a member is lost, or when NCCL fails. Returns the handle for the
    /// calls; none in a group of one.
    pub(super) fn init(&self, init: &CommInit<'_>, deadline: Instant) -> Result<Option<Handle>> {
        let (status, started) = (&*self.status, Instant::now());
        let members = &status.members;
        let key = members.position as u32;
        match init {
            CommInit::Split(parent, ..) if members.all.len() == 1 => {
                self.split(parent, Kind::Abort, None, deadline)?;
                return Ok(None);
            }
            CommInit::Id(_) if members.all.len() == 1 => return Ok(None),
            CommInit::Id(store) => {
                self.make_bootstrap(self.unique_id(*store, deadline)?, deadline)?;
                self.split(self, Kind::Abort, Some((0, key)), deadline)?;
            }
            CommInit::Split(parent, colour, key) => {
                self.split(parent, Kind::Abort, Some((*colour, *key)), deadline)?;
            }
        }
        let parents = started.elapsed();
        self.split(self, Kind::Launch, Some((0, key)), deadline)?;
        let all = started.elapsed();
        tracing::debug!(group = members.group, ?parents, ?all, "NCCL has made the communicators");
        Ok(*lock(&self.launch))
    }

    fn unique_id(&self, store: &dyn Store, deadline: Instant) -> Result<ncclUniqueId> {
        let (status, members) = (&*self.status, &self.status.members);
        let key = group_key("nccl", &members.group, "id");
        if members.position == 0 {
            let mut id = id_from_bytes([0; 128]);
            // SAFETY: the pointer is to a live id.
            let code = unsafe { foreign!(nccl, self.nccl.ncclGetUniqueId(&raw mut id)) };
            if code != 0 {
                return Err(self.error("ncclGetUniqueId", code, 0));
            }
            store.set(&key, &id_bytes(&id))?;
            return Ok(id);
        }
        let started = Instant::now();
        // The watchdog may learn in the meantime that a member is lost.
        let watched = Watched { store, check: || status.check() };
        let bytes = watched.get(&key, deadline).map_err(|error| match error {
            Error::Timeout { .. } => status.check().err().unwrap_or_else(|| Error::Timeout {
                what: format!("waiting for the NCCL id of group `{}`", members.group),
                waited: started.elapsed(),
                missing: vec![members.rank(0)],
            }),
            other => other,
        })?;
        let id = <[u8; 128]>::try_from(bytes.as_slice())
            .map_err(|_| Error::Rendezvous(format!("the NCCL id in the store has {} bytes", bytes.len())))?;
        Ok(id_from_bytes(id))
    }

    /// Makes the bootstrap communicator, together with all members.
    fn make_bootstrap(&self, id: ncclUniqueId, deadline: Instant) -> Result<()> {
        self.device.bind()?;
        let mut parents = lock(&self.parents);
        let (slot, mut config) = (HandleSlot::new(), config(Kind::Bootstrap));
        let members = &self.status.members;
        let (n, rank) = (members.all.len() as i32, members.position as i32);
        // SAFETY: the id is one NCCL made, the rank is below the number, the config has size, magic and version of the
        // layout it has and is read during the call, and the slot stays until NCCL is done with it.
        let code = unsafe {
            foreign!(
                nccl,
                self.nccl.ncclCommInitRankConfig(slot.0.as_ptr().cast(), n, id, rank, &raw mut config)
            )
        };
        // NCCL writes the handle at once, as it is needed for polling. It does so also when it fails: the handle is then ended with
        // the others, under the same lock.
        let handle = slot.now();
        parents.bootstrap = (handle != 0).then_some(handle);
        let outcome = self.poll("ncclCommInitRankConfig", begun(code), handle, deadline);
        if outcome.is_err() {
            slot.abandon();
        }
        outcome
    }

    /// Splits a communicator of this kind off one of `parent`'s: that for calls off the abort communicator, an abort communicator off the
    /// bootstrap communicator. All members of that one take part. Those with the same colour form a communicator, in the order of the key
    /// that follows it. A rank without a colour gets none.
    fn split(&self, parent: &Self, kind: Kind, part: Option<(u32, u32)>, deadline: Instant) -> Result<()> {
        parent.device.bind()?;
        let parents = lock(&parent.parents);
        let of = match kind {
            Kind::Launch => parents.abort,
            Kind::Abort | Kind::Bootstrap => parents.bootstrap,
        };
        let Some(of) = of else {
            parent.status.check()?;
            return Err(Error::Transport("a communicator was to be split off one that is gone".into()));
        };
        let (slot, mut config) = (HandleSlot::new(), config(kind));
        let (colour, key) = part.map_or((-1, 0), |(colour, key)| (colour as i32, key as i32));
        // SAFETY: the parent lives while it is locked; config and slot as for the bootstrap communicator.
        let code = unsafe {
            foreign!(
                nccl,
                self.nccl.ncclCommSplit(
                    of as ncclComm_t,
                    colour,
                    key,
                    slot.0.as_ptr().cast(),
                    &raw mut config
                )
            )
        };
        if let Err(error) = self.poll_on(&parent.status, "ncclCommSplit", begun(code), of, deadline) {
            // The unfinished child ends with the process: NCCL gives no handle to end it.
            slot.abandon();
            return Err(error);
        }
        drop(parents);
        let handle = slot.now();
        match kind {
            _ if part.is_none() => {}
            Kind::Launch => *lock(&self.launch) = Some(handle),
            Kind::Abort | Kind::Bootstrap => lock(&self.parents).abort = Some(handle),
        }
        Ok(())
    }

    /// Waits until NCCL has finished the work that `call` started on a non-blocking communicator.
    ///
    /// Never blocks inside NCCL: it polls, and returns at the deadline or once the group has failed.
    pub(super) fn poll(&self, call: &'static str, code: i32, comm: Handle, deadline: Instant) -> Result<()> {
        self.poll_on(&self.status, call, code, comm, deadline)
    }

    /// As [`poll`](Self::poll), for work of this group on a communicator of another group: the failure of either group ends it.
    fn poll_on(
        &self,
        owner: &Status,
        call: &'static str,
        code: i32,
        comm: Handle,
        deadline: Instant,
    ) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if code != IN_PROGRESS {
            return Err(self.error(call, code, comm));
        }
        let started = Instant::now();
        loop {
            owner.check()?;
            self.status.check()?;
            let mut state = 0;
            // SAFETY: the communicator is held by the caller; the pointer is to a live integer.
            let code = unsafe {
                foreign!(nccl, self.nccl.ncclCommGetAsyncError(comm as ncclComm_t, (&raw mut state).cast()))
            };
            match (code, state) {
                (0, 0) => return Ok(()),
                (0, IN_PROGRESS) => {}
                (0, state) => return Err(self.error(call, state, comm)),
                (code, _) => return Err(self.error("ncclCommGetAsyncError", code, comm)),
            }
            let waited = started.elapsed();
            if Instant::now() >= deadline {
                let what = format!("{call} of group `{}`", self.status.members.group);
                return Err(Error::Timeout { what, waited, missing: self.status.absent() });
            }
            if waited < Duration::from_millis(1) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Returns an error once the group has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.status.check()
    }

    /// Waits until all members have arrived to split groups of this kind off it; `group` is this rank's.
    ///
    /// NCCL splits together with all of them, and cannot report which one it waits for. This knowledge costs a few small messages
    /// to the store, while a split takes tenths of a second.
    pub(crate) fn gather(&self, store: &dyn Store, kind: &str, group: &str, deadline: Instant) -> Result<()> {
        let (status, members) = (&*self.status, &self.status.members);
        let ranks: Vec<Rank> = members.all.iter().map(|member| member.rank).collect();
        // The watchdog may learn in the meantime that a member is lost, or gives up.
        let watched = Watched { store, check: || status.check() };
        gather(&watched, (&members.group, &ranks, members.position), kind, group, deadline)
            .map_err(|error| status.check().err().unwrap_or(error))
    }

    /// Returns NCCL's error for this code, with NCCL's message.
    #[cold]
    pub(super) fn error(&self, call: &'static str, code: i32, comm: Handle) -> Error {
        // SAFETY: any code is accepted, and a null communicator too; what is returned is text of the library.
        let (words, last) = unsafe {
            (
                text(foreign!(nccl, self.nccl.ncclGetErrorString(code code))),
                text(foreign!(nccl, self.nccl.ncclGetLastError(comm as _))),
            )
        };
        Error::Nccl(NcclError { call, code, text: words, last })
    }

    fn drain(&self) {
        // The abort communicator stays in place until the calls have ended: it ends those that hang.
        let launch = lock(&self.launch).take();
        if let Some(launch) = launch
            // When NCCL exceeds its timeout, the group is given up, and that ends this.
            && !self.finalize_one(launch, DRAIN)
        {
            if self.status.has_failed() {
                std::thread::sleep(HEARD);
                self.abort_one(launch);
            } else {
                // The code that gives the group up aborts it, once the other ranks know.
                *lock(&self.launch) = Some(launch);
            }
            return;
        }
        // Freeing their resources may wait for other work on the GPU.
        self.is_drained.store(true, Ordering::Release);
        if let Some(launch) = launch {
            self.destroy_one(launch);
        }
        let ParentComms { bootstrap, abort } = std::mem::take(&mut *lock(&self.parents));
        for handle in [abort, bootstrap].into_iter().flatten() {
            if self.finalize_one(handle, FINISH) {
                self.destroy_one(handle);
            } else {
                self.abort_one(handle);
            }
        }
    }

    /// Lets NCCL finish all work of a communicator that no other thread uses. Returns true if it has finished.
    fn finalize_one(&self, handle: Handle, patience: Duration) -> bool {
        // SAFETY: nobody else has the handle any more.
        let code = unsafe { foreign!(nccl, self.nccl.ncclCommFinalize(handle as ncclComm_t)) };
        let until = Instant::now() + patience;
        self.poll("ncclCommFinalize", begun(code), handle, until).is_ok()
    }

    fn destroy_one(&self, handle: Handle) {
        // SAFETY: finalized, and used by nobody any more.
        let _ = unsafe { foreign!(nccl, self.nccl.ncclCommDestroy(handle as ncclComm_t)) };
    }

    fn abort_all(&self) {
        let ParentComms { bootstrap, abort } = std::mem::take(&mut *lock(&self.parents));
        // The abort communicator first: kernels and callers of communicators that share its abort flag end with it.
        for handle in [abort, bootstrap].into_iter().flatten() {
            self.abort_one(handle);
        }
        // No new caller enters, as the group has failed. Until the last caller has returned, its resources stay.
        while self.status.is_inside() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let launch = lock(&self.launch).take();
        if let Some(handle) = launch {
            self.abort_one(handle);
        }
    }

    fn abort_one(&self, handle: Handle) {
        // SAFETY: this thread has taken the handle from where others could find it; aborting is allowed in any state.
        let _ = unsafe { foreign!(nccl, self.nccl.ncclCommAbort(handle as ncclComm_t)) };
    }

    fn bound(&self, end: impl FnOnce()) {
        match self.device.bind() {
            Err(error) => tracing::debug!(%error, "a communicator is left unended"),
            Ok(()) => end(),
        }
    }

    /// Returns an error that NCCL reports.
    pub(crate) fn async_error(&self) -> Option<Error> {
        // The lock is held during the query: the communicator is freed only under this lock.
        let launch = lock(&self.launch);
        let handle = (*launch)?;
        let mut state = 0;
        // SAFETY: the communicator lives while it is locked; the pointer is to a live integer. NCCL lets any thread ask.
        let code = unsafe {
            foreign!(nccl, self.nccl.ncclCommGetAsyncError(handle as ncclComm_t, (&raw mut state).cast()))
        };
        let code = if code == 0 { state } else { code };
        (code != 0 && code != IN_PROGRESS).then(|| self.error("an operation under way", code, handle))
    }

    /// Ends them in good order, after all calls. May block for as long as NCCL does.
    pub(crate) fn finalize(&self) {
        self.bound(|| self.drain());
    }

    /// Returns true if all calls have ended, as [`finalize`](Self::finalize) has found.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_drained.load(Ordering::Acquire)
    }

    /// Ends them by force: kernels and callers that wait inside NCCL return. May block for as long as NCCL does.
    pub(crate) fn abort(&self) {
        self.bound(|| self.abort_all());
    }
}

/// Waits until all ranks of `parent` have arrived to split groups of this kind off it. This rank is at `position`.
fn gather(
    store: &dyn Store,
    (parent, ranks, position): (&str, &[Rank], usize),
    kind: &str,
    group: &str,
    deadline: Instant,
) -> Result<()> {
    let started = Instant::now();
    let key = group_key("nccl", parent, format_args!("split/{kind}"));
    let values = store::barrier_gather(store, &key, Rank(position as u32), ranks.len(), 0, deadline)?;
    let absent = ranks.iter().zip(values).filter(|(_, value)| value.is_none());
    let missing: Vec<Rank> = absent.map(|(rank, _)| *rank).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let what = format!("making group `{group}`, for which all ranks of group `{parent}` split it,");
    Err(Error::Timeout { what, waited: started.elapsed(), missing })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::store::MemoryStore;
    use crate::testing::LATE;

    /// Returns the result of each of these ranks of a world of four, in which the first two form one group and the others another.
    fn come(there: &[u32], patience: Duration) -> Vec<Result<()>> {
        let (store, world) = (MemoryStore::new(), Rank::all(4).collect::<Vec<_>>());
        let come = |rank: u32| {
            let group = if rank < 2 { "tensor_parallel[0..1]" } else { "tensor_parallel[2..3]" };
            let deadline = Instant::now() + patience;
            gather(&store, ("world", &world, rank as usize), "tensor_parallel", group, deadline)
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = there.iter().map(|rank| scope.spawn(|| come(*rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_rank_that_does_not_come_to_a_split_is_named_to_all_others_with_the_group_that_each_makes() {
        assert!(come(&[3, 1, 0, 2], LATE).iter().all(Result::is_ok));
        for there in [[0, 1, 3], [3, 1, 2]] {
            let missing = (0..4).find(|rank| !there.contains(rank)).unwrap();
            for (rank, outcome) in there.iter().zip(come(&there, Duration::from_secs(1))) {
                let error = outcome.unwrap_err().to_string();
                let made = if *rank < 2 { "`tensor_parallel[0..1]`" } else { "`tensor_parallel[2..3]`" };
                assert!(error.contains(made) && error.contains("`world`"), "{error}");
                assert!(error.ends_with(&format!("rank {missing} is not there")), "{error}");
            }
        }
    }
}
