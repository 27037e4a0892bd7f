//! A communicator from its birth to its end.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Instant;

use super::links::Links;
use super::shared::{IN_PROGRESS, Request, Shared, lock};
use super::watch;
use crate::device::nccl::UniqueId;
use crate::device::symbols::Handle;
use crate::error::{Error, Result};
use crate::store::Store;

/// `ncclConfig_t` of NCCL 2.18, the oldest accepted: newer ones take the part they are given and keep their defaults for
/// the rest.
#[repr(C)]
struct CommConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
    split_share: i32,
}

impl CommConfig {
    /// Does not block; all else is NCCL's choice.
    const fn new() -> Self {
        const UNSET: i32 = i32::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
        }
    }
}

/// What makes or splits a communicator says that it is done when it has only begun: it must be asked.
const fn begun(code: i32) -> i32 {
    if code == 0 { IN_PROGRESS } else { code }
}

/// How a communicator comes to be.
pub(crate) enum Birth<'a> {
    /// From a fresh unique id, which the group's rank 0 leaves in the store.
    Id(&'a dyn Store),
    /// Split off another, whose members all do so at the same time. Members of one colour are together, in the order of
    /// the key that follows it. The member of a group of one takes part, and gets none.
    Split(&'a Communicator, u32, u32),
}

/// A communicator with its watcher.
pub(crate) struct Communicator {
    pub(super) shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

impl Communicator {
    /// Makes it, or gives up at the deadline, when a member is lost, or when NCCL refuses.
    pub(super) fn open(shared: Shared, links: Links, birth: &Birth<'_>, deadline: Instant) -> Result<Self> {
        let shared = Arc::new(shared);
        // Watches from here on: a member that dies during the start is noticed too.
        let watcher = Some(watch::spawn(&shared, links)?);
        let communicator = Self { shared, watcher };
        if communicator.shared.members.len() > 1 {
            let handle = match communicator.init(birth, deadline) {
                Ok(handle) => handle,
                Err(error) => {
                    // Tell the others why, while the watcher is there to do it.
                    communicator.abort(&error);
                    return Err(error);
                }
            };
            *lock(&communicator.shared.communicator) = Some(handle);
        } else if let Birth::Split(parent, ..) = birth {
            parent.split_nothing(deadline)?;
        }
        Ok(communicator)
    }

    fn init(&self, birth: &Birth<'_>, deadline: Instant) -> Result<Handle> {
        let shared = &*self.shared;
        shared.device.bind()?;
        let config = CommConfig::new();
        let pointer = std::ptr::from_ref(&config).cast_mut().cast::<c_void>();
        let mut handle: Handle = 0;
        let outcome = match birth {
            Birth::Id(store) => {
                let id = self.unique_id(*store, deadline)?;
                let (n, rank) = (shared.members.len() as i32, shared.position as i32);
                // SAFETY: the id is one NCCL made, the rank is below the number, the config has size, magic and version
                // of the layout it has, and all pointers live through the call.
                let code =
                    unsafe { (shared.nccl.ncclCommInitRankConfig)(&raw mut handle, n, id, rank, pointer) };
                shared.settle("ncclCommInitRankConfig", begun(code), handle, deadline)
            }
            Birth::Split(parent, colour, key) => {
                let guard = lock(&parent.shared.communicator);
                let Some(of) = *guard else {
                    parent.shared.check()?;
                    return Err(Error::Transport(
                        "a communicator was to be split off one that is gone".into(),
                    ));
                };
                // SAFETY: the parent lives while it is locked; config as above; the new handle's place lives on this
                // frame until the parent is done with the split, which is waited for below.
                let code = unsafe {
                    (shared.nccl.ncclCommSplit)(of, *colour as i32, *key as i32, &raw mut handle, pointer)
                };
                let split = parent.shared.settle("ncclCommSplit", begun(code), of, deadline);
                drop(guard);
                split.and_then(|()| shared.settle("ncclCommSplit", IN_PROGRESS, handle, deadline))
            }
        };
        match outcome {
            Ok(()) => Ok(handle),
            Err(error) => {
                if handle != 0 {
                    self.shared.retire(handle, false);
                }
                Err(error)
            }
        }
    }

    fn unique_id(&self, store: &dyn Store, deadline: Instant) -> Result<UniqueId> {
        let shared = &*self.shared;
        let key = format!("nccl/{}/id", shared.group);
        if shared.position == 0 {
            let mut id = UniqueId([0; 128]);
            // SAFETY: the pointer is to a live id.
            let code = unsafe { (shared.nccl.ncclGetUniqueId)(&raw mut id) };
            if code != 0 {
                return Err(shared.error("ncclGetUniqueId", code, 0));
            }
            store.set(&key, &id.0)?;
            return Ok(id);
        }
        let started = Instant::now();
        let bytes = store.get(&key, deadline).map_err(|error| match error {
            Error::Timeout { .. } => Error::Timeout {
                what: format!("waiting for the NCCL id of group `{}`", shared.group),
                waited: started.elapsed(),
                missing: vec![shared.members[0].rank],
            },
            other => other,
        })?;
        let id = <[u8; 128]>::try_from(bytes.as_slice())
            .map_err(|_| Error::Rendezvous(format!("the NCCL id in the store has {} bytes", bytes.len())))?;
        Ok(UniqueId(id))
    }

    /// Takes part in a split of which this rank gets nothing, because its own group has one member only.
    fn split_nothing(&self, deadline: Instant) -> Result<()> {
        let shared = &*self.shared;
        shared.device.bind()?;
        let guard = lock(&shared.communicator);
        let Some(of) = *guard else { return shared.check() };
        let config = CommConfig::new();
        let mut handle: Handle = 0;
        let pointer = std::ptr::from_ref(&config).cast_mut().cast::<c_void>();
        // SAFETY: the communicator lives while it is locked; without a colour no new one is made.
        let code = unsafe { (shared.nccl.ncclCommSplit)(of, -1, 0, &raw mut handle, pointer) };
        shared.settle("ncclCommSplit", begun(code), of, deadline)
    }

    /// Tells the others why this rank gives up, and ends the communicator, from the watcher's thread. Never blocks.
    pub(super) fn abort(&self, why: &Error) {
        if !self.shared.has_failed() {
            lock(&self.shared.request).get_or_insert(Request::Abort(why.clone()));
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // A request to abort that the watcher has not seen yet must still be told to the others.
        let unseen = std::time::Duration::from_millis(500);
        let until = Instant::now() + unseen;
        while lock(&self.shared.request).is_some() && !self.shared.has_failed() && Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let handle = lock(&self.shared.communicator).take();
        if let Some(handle) = handle {
            self.shared.retire(handle, !self.shared.has_failed());
        }
        self.shared.stop.store(true, Ordering::Release);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}
