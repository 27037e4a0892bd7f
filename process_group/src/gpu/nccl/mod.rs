//! NVIDIA's collectives.

#![allow(unsafe_code, reason = "NCCL's functions are foreign; each block says why it holds")]

mod communicator;
mod factory;
mod launch;
mod reductions;

use std::sync::Arc;
use std::time::Instant;

use super::peer_memory::{AbortWord, PeerMemory, Sharing};
use crate::device::{Device, Nccl};
use crate::error::Result;
use crate::link::security::Channel;
use crate::membership::store::Watched;
use crate::stream::{self, GroupMembers, Monitored, Status, StreamGroup};
use communicator::CommInit;
pub(crate) use communicator::NcclComm;
pub(crate) use factory::Factory;
pub(crate) use launch::NcclLauncher;

/// Makes the communicators of a group, with all its members, which `channels` connect (none for this rank itself).
///
/// # Errors
/// Names a member that is lost or does not arrive by the deadline; those of NCCL and of the GPU.
fn connect(
    nccl: Nccl,
    device: &Device,
    members: GroupMembers,
    channels: Vec<Option<Channel>>,
    (init, sharing, link_gbs): (&CommInit<'_>, Sharing<'_>, Option<f64>),
    deadline: Instant,
) -> Result<(StreamGroup, Arc<NcclComm>)> {
    let status = Arc::new(Status::new(members));
    let comm = Arc::new(NcclComm::new(nccl, device, &status));
    let abort = match AbortWord::new(device) {
        Ok(abort) => Arc::new(abort),
        Err(error) => {
            let error = error.into();
            stream::decline(channels, &error);
            return Err(error);
        }
    };
    let monitored = Monitored { nccl: Arc::clone(&comm), abort: Arc::clone(&abort) };
    // Watches from now on: the death of a member during the start is noticed too.
    let watchdog = stream::watch(&status, channels, monitored, device)?;
    let launcher =
        comm.init(init, deadline).and_then(|handle| NcclLauncher::new(&comm, handle)).and_then(|nccl| {
            // A member that gives up tells the watchdogs, not the store.
            let store = Watched { store: sharing.store, check: || status.check() };
            let sharing = Sharing { store: &store, ..sharing };
            PeerMemory::new(nccl, device, &status.members, &sharing, &abort, deadline)
        });
    // The other ranks learn the reason while the watchdog can still tell them.
    let launcher = launcher.inspect_err(|error| watchdog.abort(error))?;
    Ok((StreamGroup::new(launcher, watchdog, device, link_gbs)?, comm))
}
