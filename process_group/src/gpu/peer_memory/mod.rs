//! Collectives by kernels of this crate, in the memory of the GPUs of one node that NVLink connects.
//!
//! [`PeerMemory`] stands in front of NCCL: it executes the calls that the [path table](crate::paths::gpu) assigns to it, and passes on
//! all others. `shared` makes the memory that the ranks share, `kernels` launches the code of `collectives.cu` and `add_norm.cu` in
//! it, and `check` tests all of that before the first call.

#![allow(unsafe_code, reason = "kernels read and write memory of other ranks; each block says why it holds")]

mod abort_word;
mod check;
mod entry;
mod kernels;
mod shape;
mod shared;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use crate::backend::call::Call;
use crate::device::{Address, Device, Stream};
use crate::error::Result;
use crate::gpu::nccl::NcclLauncher;
use crate::membership::store::Store;
use crate::paths::gpu::{MOST_ROW, peer_table};
use crate::paths::tuned::TunedRange;
use crate::paths::{Path, PathTable};
use crate::stream::GroupMembers;
use crate::types::dtype::DType;
pub(crate) use abort_word::AbortWord;
use kernels::{Kernels, Slots};
use shape::{HOPPER, SHORT_ROW, VECTOR};
use shared::{Report, SharedMemory, Sharers, obstacle};

/// Maximum number of bytes of a row that one block handles.
const MOST_ROW_OF_A_BLOCK: usize = SHORT_ROW * VECTOR;

/// Enqueues calls on streams of a GPU: NCCL, and kernels of this crate in front of it if the ranks can share memory.
pub(crate) struct PeerMemory {
    pub(crate) nccl: NcclLauncher,
    kernels: Option<Kernels>,
    /// The paths of the group, and which of them a call takes and why.
    pub(crate) paths: PathTable,
    has_clusters: bool,
}

/// The parameters with which a group shares memory.
#[derive(Clone, Copy)]
pub(super) struct Sharing<'a> {
    /// The store through which its ranks communicate.
    pub(super) store: &'a dyn Store,
    /// True if this rank's user wants it.
    pub(super) is_wanted: bool,
    /// Measured ranges for the choice of paths.
    pub(super) tuned: &'a [TunedRange],
}

impl PeerMemory {
    /// Tries to share memory, with the information that the ranks exchange in the store, unless some rank's user does not want it.
    /// If that is impossible, NCCL executes all calls, and the path table states the reason.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn new(
        nccl: NcclLauncher,
        device: &Device,
        members: &GroupMembers,
        Sharing { store, is_wanted, tuned }: &Sharing<'_>,
        abort: &Arc<AbortWord>,
        deadline: Instant,
    ) -> Result<Self> {
        let (group, position, members) = (members.group.as_str(), members.position, members.all.as_slice());
        let made = if let Some(reason) = obstacle(members) {
            Err(reason)
        } else {
            let slots = Slots::new(members.len());
            let sharers = Sharers { group, position, members, store: *store, deadline };
            let bytes = is_wanted.then_some(slots.bytes());
            let made = SharedMemory::connect(device, &sharers, bytes, |memory| {
                Kernels::new(device, memory, position, slots, abort)
            })?;
            checked(made, device, &sharers, abort)?
        };
        let why = made.as_ref().err().cloned();
        if let Some(why) = &why {
            tracing::debug!(group, why, "the ranks do not share memory: NCCL carries every call");
        }
        let has_clusters = device.info().capability >= HOPPER;
        let paths = peer_table(members.len(), why, tuned);
        Ok(Self { nccl, kernels: made.ok(), paths, has_clusters })
    }

    fn path(&self, call: &Call<'_>) -> Path {
        let fingerprint = call.fingerprint;
        self.paths.path(fingerprint.operation, fingerprint.dtype, fingerprint.count)
    }

    /// As [`Backend::fuses_add_norm`](crate::backend::Backend::fuses_add_norm).
    pub(crate) fn fuses_add_norm(&self, dtype: DType, count: usize, columns: usize) -> bool {
        // One block handles a row if there are no clusters.
        let most = if self.has_clusters { MOST_ROW } else { MOST_ROW_OF_A_BLOCK };
        let is_short = columns.saturating_mul(dtype.size()) <= most;
        self.kernels.is_some() && is_short && self.paths.fuses_add_norm(dtype, count, columns)
    }

    /// Enqueues a call, and returns its path.
    ///
    /// # Safety
    /// The buffers of the call are as [`View::on_device`](crate::View::on_device) demands; `workspace` has
    /// [`workspace_bytes`](NcclLauncher::workspace_bytes) bytes that nothing else uses until the stream is past the call. The group
    /// has not failed, and the caller is [inside](crate::stream::Status::is_inside).
    ///
    /// # Errors
    /// Those of NCCL, or of the driver for kernels of this crate. The group must be given up then.
    pub(crate) unsafe fn launch(
        &mut self,
        call: &Call<'_>,
        stream: &Stream,
        workspace: Address,
    ) -> Result<Path> {
        match (self.path(call), &self.kernels) {
            // NCCL executes the calls of a group together.
            (Path::PeerMemory(algorithm), Some(kernels)) if !self.nccl.is_grouped => {
                // SAFETY: by the caller's promise; a group's calls run on one stream at a time.
                Ok(unsafe { kernels.launch(algorithm, call, stream) }?)
            }
            // SAFETY: by the caller's promise.
            _ => unsafe { self.nccl.launch(call, stream, workspace) },
        }
    }
}

/// Returns the kernels, if every rank found that they produce correct values.
fn checked(
    made: Report<Kernels>,
    device: &Device,
    sharers: &Sharers<'_>,
    abort: &AbortWord,
) -> Result<Report<Kernels>> {
    let Ok(kernels) = made else { return Ok(made) };
    let works = check::check(&kernels, device, (sharers.position, sharers.members.len()));
    let all = sharers.tell("works", &works)?;
    if all.is_ok() {
        abort.enable();
    }
    Ok(all.map(|_| kernels))
}
