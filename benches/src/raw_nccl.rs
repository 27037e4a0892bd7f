//! Direct calls of NCCL without checks, watcher or profile. Our calls are compared with them.

#![allow(unsafe_code, reason = "NCCL's functions are foreign; each block says why it holds")]

use crate::measure::{CallBuffers, Collective};
use anyhow::{Result, bail, ensure};
use ryzanstein_process_group::device::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};
use ryzanstein_process_group::device::nccl::{id_bytes, id_from_bytes};
use ryzanstein_process_group::device::{Address, Device, DeviceBuffer, Nccl, Version};
use ryzanstein_process_group::{BufferMut, Error, ProcessGroup, foreign};

const F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;

/// A communicator with NCCL's defaults, which blocks until a call is enqueued. Sums are of f32, roots are rank 0.
pub struct RawNccl {
    nccl: Nccl,
    version: Version,
    device: Device,
    communicator: ncclComm_t,
    rank: usize,
    world_size: usize,
}

impl RawNccl {
    /// Creates a communicator with the ranks of a group on GPUs, all of which call this.
    ///
    /// # Errors
    /// Fails when the group is not on GPUs, and with NCCL's errors.
    pub fn new(group: &mut ProcessGroup) -> Result<Self> {
        let Some(device) = group.device().cloned() else {
            bail!("the group works on host memory: use --backend nccl")
        };
        let found = device.libraries().nccl.clone()?;
        let nccl = found.functions;
        let mut id = id_from_bytes([0; 128]);
        // SAFETY: the pointer is to a live id.
        check("ncclGetUniqueId", unsafe { foreign!(nccl, nccl.ncclGetUniqueId(&raw mut id)) })?;
        let ids: Vec<Vec<u8>> = group.all_gather_object(&id_bytes(&id).to_vec())?;
        let id = id_from_bytes(ids[0].as_slice().try_into()?);
        let (rank, world_size) = (group.rank().index(), group.world_size());
        device.bind()?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: rank 0's id on all ranks, the rank is below the number, no configuration, and the pointer is live.
        let code = unsafe {
            foreign!(
                nccl,
                nccl.ncclCommInitRankConfig(
                    &raw mut communicator,
                    world_size as i32,
                    id,
                    rank as i32,
                    std::ptr::null_mut(),
                )
            )
        };
        check("ncclCommInitRankConfig", code)?;
        Ok(Self { nccl, version: found.version, device, communicator, rank, world_size })
    }

    /// Returns NCCL's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Sums f32 in place.
    ///
    /// # Errors
    /// Returns NCCL's error.
    pub fn all_reduce(&self, x: &mut dyn BufferMut) -> Result<(), Error> {
        let (count, at) = (x.view().count(), address(&x.view()));
        let (comm, stream) = (self.communicator, self.device.stream().handle().cast());
        // SAFETY: `count` f32 in a buffer that the caller keeps until the stream is past them.
        done("ncclAllReduce", unsafe {
            foreign!(nccl, self.nccl.ncclAllReduce(at as _, at as _, count, F32, SUM, comm, stream))
        })
    }

    /// Makes the call that [`Collective::call`] makes.
    ///
    /// # Errors
    /// Returns NCCL's error.
    pub fn call(&self, what: Collective, slot: &mut CallBuffers<DeviceBuffer>) -> Result<(), Error> {
        let (t, comm, stream) = (&self.nccl, self.communicator, self.device.stream().handle().cast());
        let (all, at) = (slot.buffer.count(), slot.buffer.address());
        let from = slot.input.as_ref().map_or(at, DeviceBuffer::address);
        let (count, me) = (all / self.world_size, self.rank);
        let chunk = |base: Address, rank: usize| base + (rank * count * 4) as u64;
        // SAFETY, of all calls: addresses and counts are those of the slot's buffers, which live until the stream is past them.
        match what {
            Collective::AllReduce => self.all_reduce(&mut slot.buffer),
            Collective::Broadcast => {
                // SAFETY: see above.
                done("ncclBroadcast", unsafe {
                    foreign!(nccl, t.ncclBroadcast(at as _, at as _, all, F32, 0, comm, stream))
                })
            }
            Collective::Reduce => {
                // SAFETY: see above.
                done("ncclReduce", unsafe {
                    foreign!(nccl, t.ncclReduce(at as _, at as _, all, F32, SUM, 0, comm, stream))
                })
            }
            Collective::AllGather => {
                // SAFETY: see above.
                done("ncclAllGather", unsafe {
                    foreign!(nccl, t.ncclAllGather(chunk(at, me) as _, at as _, count, F32, comm, stream))
                })
            }
            Collective::ReduceScatter => {
                // SAFETY: see above.
                done("ncclReduceScatter", unsafe {
                    foreign!(
                        nccl,
                        t.ncclReduceScatter(at as _, chunk(at, me) as _, count, F32, SUM, comm, stream)
                    )
                })
            }
            Collective::AllToAll => {
                self.messages(count, |peer| (Some(chunk(from, peer)), Some(chunk(at, peer))))
            }
            Collective::Gather => self.messages(count, |peer| {
                let receives = (me == 0 && peer != 0).then(|| chunk(at, peer));
                ((peer == 0 && me != 0).then(|| chunk(at, me)), receives)
            }),
            Collective::Scatter => self.messages(count, |peer| {
                let sends = (me == 0 && peer != 0).then(|| chunk(at, peer));
                (sends, (peer == 0 && me != 0).then(|| chunk(at, me)))
            }),
            Collective::SendRecv => self.messages(all, |peer| {
                let partner = peer == me ^ 1;
                ((partner && me % 2 == 0).then_some(at), (partner && me % 2 == 1).then_some(at))
            }),
            Collective::Barrier => Err(Error::Configuration("NCCL has no barrier".into())),
        }
    }

    /// Sends to and receives from each peer. `of` returns the address to send from and the address to receive at.
    fn messages(
        &self,
        count: usize,
        of: impl Fn(usize) -> (Option<Address>, Option<Address>),
    ) -> Result<(), Error> {
        let (t, comm, stream) = (&self.nccl, self.communicator, self.device.stream().handle().cast());
        // SAFETY: closed below on this thread.
        done("ncclGroupStart", unsafe { foreign!(nccl, t.ncclGroupStart()) })?;
        for peer in 0..self.world_size {
            let (send, receive) = of(peer);
            if let Some(from) = send {
                // SAFETY: as for the calls.
                done("ncclSend", unsafe {
                    foreign!(nccl, t.ncclSend(from as _, count, F32, peer as i32, comm, stream))
                })?;
            }
            if let Some(to) = receive {
                // SAFETY: as for the calls.
                done("ncclRecv", unsafe {
                    foreign!(nccl, t.ncclRecv(to as _, count, F32, peer as i32, comm, stream))
                })?;
            }
        }
        // SAFETY: opened above.
        done("ncclGroupEnd", unsafe { foreign!(nccl, t.ncclGroupEnd()) })
    }
}

impl Drop for RawNccl {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and no longer used.
        let _ = unsafe { foreign!(nccl, self.nccl.ncclCommDestroy(self.communicator)) };
    }
}

fn address(view: &ryzanstein_process_group::View<'_>) -> Address {
    view.device().map_or(0, |memory| memory.address)
}

fn check(call: &str, code: i32) -> Result<()> {
    ensure!(code == 0, "{call} returned {code}; run with NCCL_DEBUG=WARN to see why");
    Ok(())
}

fn done(call: &str, code: i32) -> Result<(), Error> {
    check(call, code).map_err(|error| Error::Transport(error.to_string()))
}
