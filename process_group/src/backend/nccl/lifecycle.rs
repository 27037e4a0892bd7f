//! How NCCL's communicators of one group are made, entered and ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::handles::{Inside, Kind, Trunk};
use super::messages::Peers;
use super::shared::{HEARD, Shared, lock};
use crate::device::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};
use crate::device::symbols::Handle;
use crate::error::{Error, Result};
use crate::foreign;
use crate::operation::Signature;

const IN_PROGRESS: i32 = 7;
/// How long the end of a communicator may take before it is left to itself.
const RETIREMENT: Duration = Duration::from_secs(5);

/// The configuration of NCCL 2.18, the oldest accepted: newer ones take the part they are given and keep their defaults for
/// the rest. What it does not say is NCCL's choice.
const fn config(kind: Kind) -> ncclConfig_t {
    const UNSET: i32 = i32::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: matches!(kind, Kind::Calls) as i32,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        // Of a communicator with what is split off it.
        splitShare: matches!(kind, Kind::Stem) as i32,
    }
}

/// Where NCCL puts the handle of a communicator that it makes. It does so from a thread of its own, which may be late: a
/// place is given up only once NCCL has said that it is done.
struct Place(Box<AtomicUsize>);

impl Place {
    fn new() -> Self {
        Self(Box::new(AtomicUsize::new(0)))
    }

    fn now(&self) -> Handle {
        self.0.load(Ordering::Acquire)
    }

    /// Leaves it to NCCL, which may still write to it, for ever.
    fn abandon(self) {
        Box::leak(self.0);
    }
}

/// What makes or splits a communicator says that it is done when it has only begun: it must be asked.
const fn begun(code: i32) -> i32 {
    if code == 0 { IN_PROGRESS } else { code }
}

impl Shared {
    /// Makes the root, together with all members.
    pub(super) fn make_root(&self, id: ncclUniqueId, deadline: Instant) -> Result<()> {
        self.device.bind()?;
        let mut trunk = lock(&self.trunk);
        let (place, mut config) = (Place::new(), config(Kind::Root));
        let (n, rank) = (self.members.len() as i32, self.position as i32);
        // SAFETY: the id is one NCCL made, the rank is below the number, the config has size, magic and version of the
        // layout it has and is read during the call, and the place stays until NCCL is done with it.
        let code = unsafe {
            foreign!(
                nccl,
                self.nccl.ncclCommInitRankConfig(place.0.as_ptr().cast(), n, id, rank, &raw mut config)
            )
        };
        // NCCL gives the handle at once, as it is needed to ask how far it is. Also when it fails: then it is ended with the
        // rest, which waits for the lock.
        let handle = place.now();
        trunk.root = (handle != 0).then_some(handle);
        let outcome = self.settle("ncclCommInitRankConfig", begun(code), handle, deadline);
        if outcome.is_err() {
            place.abandon();
        }
        outcome
    }

    /// Splits one off the root or the stem of `parent`, together with all its members. Members of one colour are together,
    /// in the order of the key that follows it. A rank without a colour takes part and gets none.
    pub(super) fn split(
        &self,
        parent: &Self,
        (from, to): (Kind, Kind),
        part: Option<(u32, u32)>,
        deadline: Instant,
    ) -> Result<()> {
        parent.device.bind()?;
        let trunk = lock(&parent.trunk);
        let of = match from {
            Kind::Root => trunk.root,
            Kind::Stem => trunk.stem,
            Kind::Calls => None,
        };
        let Some(of) = of else {
            parent.check()?;
            return Err(Error::Transport("a communicator was to be split off one that is gone".into()));
        };
        let (place, mut config) = (Place::new(), config(to));
        let (colour, key) = part.map_or((-1, 0), |(colour, key)| (colour as i32, key as i32));
        // SAFETY: the parent lives while it is locked; config and place as for the root.
        let code = unsafe {
            foreign!(
                nccl,
                self.nccl.ncclCommSplit(
                    of as ncclComm_t,
                    colour,
                    key,
                    place.0.as_ptr().cast(),
                    &raw mut config
                )
            )
        };
        if let Err(error) = self.settle_on(parent, "ncclCommSplit", begun(code), of, deadline) {
            // Whatever was made of the child ends with the process: NCCL gives no handle to end it by.
            place.abandon();
            return Err(error);
        }
        drop(trunk);
        let handle = place.now();
        match to {
            _ if part.is_none() => {}
            Kind::Root => lock(&self.trunk).root = Some(handle),
            Kind::Stem => lock(&self.trunk).stem = Some(handle),
            Kind::Calls => lock(&self.calls).handle = Some(handle),
        }
        Ok(())
    }

    /// Waits until NCCL is done with what `call` began on a communicator that does not block.
    ///
    /// Never sits inside NCCL: it asks again and again, and leaves at the deadline or once the group has failed.
    fn settle(&self, call: &'static str, code: i32, communicator: Handle, deadline: Instant) -> Result<()> {
        self.settle_on(self, call, code, communicator, deadline)
    }

    /// As [`settle`](Self::settle), for what was begun for this group on a communicator of `owner`: either's failure ends it.
    fn settle_on(
        &self,
        owner: &Self,
        call: &'static str,
        code: i32,
        communicator: Handle,
        deadline: Instant,
    ) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if code != IN_PROGRESS {
            return Err(self.error(call, code, communicator));
        }
        let started = Instant::now();
        loop {
            owner.check()?;
            self.check()?;
            let mut state = 0;
            // SAFETY: the communicator is held by the caller; the pointer is to a live integer.
            let code = unsafe {
                foreign!(
                    nccl,
                    self.nccl.ncclCommGetAsyncError(communicator as ncclComm_t, (&raw mut state).cast())
                )
            };
            match (code, state) {
                (0, 0) => return Ok(()),
                (0, IN_PROGRESS) => {}
                (0, state) => return Err(self.error(call, state, communicator)),
                (code, _) => return Err(self.error("ncclCommGetAsyncError", code, communicator)),
            }
            let waited = started.elapsed();
            if Instant::now() >= deadline {
                let what = format!("{call} of group `{}`", self.group);
                return Err(Error::Timeout { what, waited, missing: self.absent() });
            }
            if waited < Duration::from_millis(1) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// The handle for a caller, who is inside NCCL from now on. None in a group of one.
    pub(super) fn enter(
        &self,
        signature: Option<Signature>,
        peers: Peers,
        deadline: Instant,
    ) -> Result<Option<Handle>> {
        let mut calls = lock(&self.calls);
        self.check()?;
        let Some(handle) = calls.handle else { return Ok(None) };
        calls.inside = Some(Inside { signature, peers, since: Instant::now(), deadline });
        Ok(Some(handle))
    }

    /// When a group of calls that has entered must be done, and with whom it exchanges messages.
    pub(super) fn expect_by(&self, deadline: Instant, peers: Peers) {
        if let Some(inside) = &mut lock(&self.calls).inside {
            (inside.deadline, inside.peers) = (deadline, peers);
        }
    }

    /// What NCCL's code means. The caller is inside NCCL still, so that the communicator is there to be asked.
    pub(super) fn outcome(&self, call: &'static str, code: i32, communicator: Handle) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // Who has set NCCL_COMM_BLOCKING=0 has calls that do not block.
        let inside = lock(&self.calls).inside;
        let deadline = inside.map_or_else(Instant::now, |inside| inside.deadline);
        self.settle(call, code, communicator, deadline)
    }

    /// The caller is out again.
    pub(super) fn leave(&self) {
        lock(&self.calls).inside = None;
    }

    /// What NCCL says of calls that are under way, if no caller is inside.
    pub(super) fn asynchronous_error(&self) -> Option<Error> {
        let calls = lock(&self.calls);
        let handle = calls.idle()?;
        let mut state = 0;
        // SAFETY: the communicator lives while it is locked; the pointer is to a live integer.
        let code = unsafe {
            foreign!(nccl, self.nccl.ncclCommGetAsyncError(handle as ncclComm_t, (&raw mut state).cast()))
        };
        let code = if code == 0 { state } else { code };
        (code != 0 && code != IN_PROGRESS).then(|| self.error("an operation under way", code, handle))
    }

    /// Lets NCCL end all of them, behind all calls. Whether it has come back from it, in time.
    pub(super) fn end(self: &Arc<Self>) -> bool {
        self.is_over(Self::finalize)
    }

    /// Ends all of them, on a thread that is left to itself if NCCL does not come back from it.
    pub(super) fn retire(self: &Arc<Self>) {
        // Calls that are still under way, whose peers never came, keep NCCL from ending them: they are ended with the stem.
        if !self.is_over(Self::abandon) {
            tracing::warn!(
                group = self.group,
                "NCCL does not come back from ending a communicator; it is left"
            );
        }
    }

    /// Whether that has been done in time.
    fn is_over(self: &Arc<Self>, end: fn(&Self)) -> bool {
        let shared = Arc::clone(self);
        let (done, told) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("ryz-end-{}", self.group)).spawn(move || {
            match shared.device.bind() {
                Err(error) => tracing::debug!(%error, "a communicator is left unended"),
                Ok(()) => end(&shared),
            }
            let _ = done.send(());
        });
        thread.is_err() || told.recv_timeout(RETIREMENT).is_ok()
    }

    fn finalize(&self) {
        // The stem stays where it is found until the calls are over: it is what ends those that never are.
        let calls = lock(&self.calls).handle.take();
        if let Some(calls) = calls
            // When NCCL takes longer than it may, the group is given up, and that ends this.
            && !self.finalize_one(calls, 4 * RETIREMENT)
        {
            if self.has_failed() {
                std::thread::sleep(HEARD);
                self.abort_one(calls);
            } else {
                // Whoever gives it up aborts them, once the others know.
                lock(&self.calls).handle = Some(calls);
            }
            return;
        }
        // Freeing what they had may wait for other work on the GPU.
        self.calls_are_over.store(true, Ordering::Release);
        if let Some(calls) = calls {
            self.destroy_one(calls);
        }
        let Trunk { root, stem } = std::mem::take(&mut *lock(&self.trunk));
        for handle in [stem, root].into_iter().flatten() {
            if self.finalize_one(handle, RETIREMENT) {
                self.destroy_one(handle);
            } else {
                self.abort_one(handle);
            }
        }
    }

    /// Lets NCCL come to the end of all that one does, of which nobody else has the handle. Whether it has.
    fn finalize_one(&self, handle: Handle, patience: Duration) -> bool {
        // SAFETY: nobody else has the handle any more.
        let code = unsafe { foreign!(nccl, self.nccl.ncclCommFinalize(handle as ncclComm_t)) };
        let until = Instant::now() + patience;
        self.settle("ncclCommFinalize", begun(code), handle, until).is_ok()
    }

    fn destroy_one(&self, handle: Handle) {
        // SAFETY: finalised, and used by nobody any more.
        let _ = unsafe { foreign!(nccl, self.nccl.ncclCommDestroy(handle as ncclComm_t)) };
    }

    fn abandon(&self) {
        let Trunk { root, stem } = std::mem::take(&mut *lock(&self.trunk));
        // The stem first: kernels and callers of what shares its abort flag end with it.
        for handle in [stem, root].into_iter().flatten() {
            self.abort_one(handle);
        }
        // Nobody new enters, as the group has failed. Until the last has come out, what it uses stays.
        loop {
            let mut calls = lock(&self.calls);
            if calls.inside.is_none() {
                let handle = calls.handle.take();
                drop(calls);
                return handle.into_iter().for_each(|handle| self.abort_one(handle));
            }
            drop(calls);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn abort_one(&self, handle: Handle) {
        // SAFETY: this thread has taken the handle from where others could find it; aborting is allowed in any state.
        let _ = unsafe { foreign!(nccl, self.nccl.ncclCommAbort(handle as ncclComm_t)) };
    }
}
