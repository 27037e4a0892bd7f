//! The memory that the ranks of a node share: each rank allocates its part, all ranks open it, and verify it before use.

use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::device::nvml::{Nvml, PairPath};
use crate::device::shared::{MappedMemory, MemoryHandle, enable_peer_access};
use crate::device::{Address, Device, DeviceBuffer, DeviceError};
use crate::error::{Error, Result};
use crate::membership::roster::Member;
use crate::membership::store::{Store, group_key};
use crate::paths::gpu::PEER_RANKS;
use crate::types::dtype::DType;
use crate::types::sync::lock;

/// The value of every byte of a slot before a rank pushes into it: the words that kernels call armed.
const ARMED: u8 = 0xff;
/// Bytes of the proof that a rank of the group writes into the memory of each other rank.
const PROOF: usize = 16;

/// The ranks that share memory: those of one group, on one node.
pub(super) struct Sharers<'a> {
    pub(super) group: &'a str,
    pub(super) position: usize,
    pub(super) members: &'a [Member],
    pub(super) store: &'a dyn Store,
    pub(super) deadline: Instant,
}

/// One rank's memory and its views of the memory of the other ranks. Another process may still have this memory open when it is
/// freed here: the driver keeps the pages until that process closes them.
pub(super) struct SharedMemory {
    // This comes first: the peers' memory is closed before this rank's own memory is freed.
    peers: Vec<Peer>,
    own: Arc<DeviceBuffer>,
    /// Address of each rank's memory on this GPU.
    addresses: Vec<Address>,
    ranks_here: u32,
}

/// Access to the memory of a rank.
enum Peer {
    Own,
    /// A rank that is a thread of this process. Its memory stays while this rank uses it.
    SameProcess(Arc<DeviceBuffer>),
    OtherProcess(MappedMemory),
}

/// A rank's description of its memory for the other ranks.
#[derive(Serialize, Deserialize)]
struct Offer {
    /// Id of the allocation, with which ranks of the same process find it.
    id: [u8; 16],
    handle: MemoryHandle,
    gpu: String,
}

/// A fact or a reason against sharing, as one rank reports it to all ranks.
pub(super) type Report<T> = std::result::Result<T, String>;

/// The allocations of this process that groups share.
static OF_THIS_PROCESS: Mutex<Vec<([u8; 16], Weak<DeviceBuffer>)>> = Mutex::new(Vec::new());

impl SharedMemory {
    /// Allocates `bytes` bytes on this rank's GPU (none: its user does not want it), opens the memory of the other ranks, checks
    /// that all ranks can write to all memory, and builds a value with it. `Ok(Err)` is the reason why that is impossible on some
    /// rank: all ranks return the same one.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn connect<T>(
        device: &Device,
        sharers: &Sharers<'_>,
        bytes: Option<usize>,
        make: impl FnOnce(Self) -> std::result::Result<T, DeviceError>,
    ) -> Result<Report<T>> {
        let (own, offer) = match bytes.map(|bytes| offer(device, bytes)) {
            Some(Ok((own, offer))) => (Some(own), Ok(offer)),
            Some(Err(error)) => (None, Err(error.to_string())),
            None => (None, Err("process_group.peer_memory is false".into())),
        };
        let offers = match sharers.tell("offer", &offer)? {
            Ok(offers) => offers,
            Err(reason) => return Ok(Err(reason)),
        };
        let opened = match &own {
            Some(own) => open(device, sharers.position, &offers)
                .and_then(|peers| {
                    let ranks_here =
                        offers.iter().filter(|offer| offer.gpu == device.info().uuid).count() as u32;
                    let address = |peer: &Peer| match peer {
                        Peer::Own => own.address(),
                        Peer::SameProcess(buffer) => buffer.address(),
                        Peer::OtherProcess(memory) => memory.address(),
                    };
                    let addresses = peers.iter().map(address).collect();
                    let memory = Self { peers, own: Arc::clone(own), addresses, ranks_here };
                    memory.write_proofs(device, sharers.position)?;
                    Ok(memory)
                })
                .map_err(|error| error.to_string()),
            None => Err("it has no memory to share".into()),
        };
        let is_open = opened.as_ref().map(drop).map_err(Clone::clone);
        if let Err(reason) = sharers.tell("open", &is_open)? {
            return Ok(Err(reason));
        }
        let made = opened.and_then(|memory| {
            memory.check_proofs(device, sharers.position)?;
            make(memory).map_err(|error| error.to_string())
        });
        let is_made = made.as_ref().map(drop).map_err(Clone::clone);
        Ok(sharers.tell("ready", &is_made)?.and(made))
    }

    /// Returns the number of ranks of the group on this GPU: one, except in tests.
    pub(super) const fn ranks_here(&self) -> u32 {
        self.ranks_here
    }

    /// Returns the address of each rank's memory on this GPU.
    pub(super) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Writes this rank's proof into the memory of each other rank.
    fn write_proofs(&self, device: &Device, position: usize) -> std::result::Result<(), DeviceError> {
        let proof = proof(position);
        for address in self.addresses() {
            // SAFETY: within the allocation, which is longer than the proofs of all ranks; nobody else writes there, and
            // `drain` waits for the copy.
            unsafe { device.stream().copy_from_host(address + (position * PROOF) as u64, &proof) }?;
        }
        device.stream().drain()
    }

    /// Checks that every rank's proof has arrived in this rank's memory, and then arms the memory.
    fn check_proofs(&self, device: &Device, position: usize) -> Report<()> {
        let mut found = vec![0u8; self.peers.len() * PROOF];
        // SAFETY: within the allocation; `drain` waits for the copy.
        let read = unsafe { device.stream().copy_to_host(&mut found, self.own.address()) };
        read.and_then(|()| device.stream().drain()).map_err(|error| error.to_string())?;
        let wrong = found.chunks(PROOF).enumerate().find(|(rank, bytes)| *bytes != proof(*rank));
        if let Some((rank, _)) = wrong {
            return Err(format!(
                "what rank {rank} of the group wrote into the memory of rank {position} did not arrive"
            ));
        }
        arm(device, &self.own).map_err(|error| error.to_string())
    }
}

impl Sharers<'_> {
    /// Reports a fact of one kind to all members, and returns the facts of all members, or the first reason against it.
    pub(super) fn tell<T: Serialize + for<'d> Deserialize<'d>>(
        &self,
        what: &str,
        fact: &Report<T>,
    ) -> Result<Report<Vec<T>>> {
        let key = |rank: usize| group_key("peer-memory", self.group, format_args!("{what}/{rank}"));
        let bytes = rmp_serde::to_vec(fact).map_err(|e| Error::invalid(format!("shared memory: {e}")))?;
        self.store.set(&key(self.position), &bytes)?;
        let mut all = Vec::with_capacity(self.members.len());
        let mut reason = None;
        for (position, member) in self.members.iter().enumerate() {
            let bytes = self.store.get(&key(position), self.deadline)?;
            let report: Report<T> = rmp_serde::from_slice(&bytes).map_err(|e| {
                Error::Rendezvous(format!(
                    "what rank {} says of its shared memory cannot be read: {e}",
                    member.rank
                ))
            })?;
            match report {
                Ok(fact) => all.push(fact),
                Err(why) => drop(reason.get_or_insert(format!("rank {}: {why}", member.rank))),
            }
        }
        Ok(reason.map_or(Ok(all), Err))
    }
}

/// Returns a value that only this rank of a group writes; none of its bytes equals the byte of armed memory.
fn proof(position: usize) -> [u8; PROOF] {
    std::array::from_fn(|i| (position as u8 + 1).wrapping_mul(7).wrapping_add(i as u8) & 0x7f)
}

fn arm(device: &Device, memory: &DeviceBuffer) -> std::result::Result<(), DeviceError> {
    // SAFETY: the whole allocation, which nobody uses yet; `drain` waits.
    unsafe { device.stream().fill(memory.address(), ARMED, memory.bytes()) }?;
    device.stream().drain()
}

/// Allocates this rank's memory, armed.
fn offer(device: &Device, bytes: usize) -> std::result::Result<(Arc<DeviceBuffer>, Offer), DeviceError> {
    let own = Arc::new(DeviceBuffer::new(device, DType::U8, bytes)?);
    arm(device, &own)?;
    let mut id = [0; 16];
    getrandom::fill(&mut id)
        .map_err(|error| DeviceError::invalid(format!("the system gives no random bytes: {error}")))?;
    let mut of_this_process = lock(&OF_THIS_PROCESS);
    of_this_process.retain(|(_, buffer)| buffer.strong_count() > 0);
    of_this_process.push((id, Arc::downgrade(&own)));
    let offer = Offer { id, handle: own.handle(device)?, gpu: device.info().uuid.clone() };
    Ok((own, offer))
}

/// Opens the memory of all members.
fn open(device: &Device, position: usize, offers: &[Offer]) -> std::result::Result<Vec<Peer>, DeviceError> {
    check_links(offers)?;
    let one = |(rank, offer): (usize, &Offer)| {
        if rank == position {
            return Ok(Peer::Own);
        }
        let of_this_process = lock(&OF_THIS_PROCESS);
        let found =
            of_this_process.iter().find(|(id, _)| *id == offer.id).map(|(_, buffer)| buffer.upgrade());
        drop(of_this_process);
        match found {
            Some(Some(buffer)) => {
                enable_peer_access(device, &buffer)?;
                Ok(Peer::SameProcess(buffer))
            }
            Some(None) => Err(DeviceError::invalid(format!("rank {rank} of the group has freed its memory"))),
            // CUDA opens memory also of a GPU that CUDA_VISIBLE_DEVICES hides from this process.
            None => Ok(Peer::OtherProcess(MappedMemory::open(device, &offer.handle)?)),
        }
    };
    offers.iter().enumerate().map(one).collect()
}

/// Rejects GPUs without an NVLink connection: kernels that poll over PCIe are slower than NCCL.
fn check_links(offers: &[Offer]) -> std::result::Result<(), DeviceError> {
    let nvml = Nvml::open()
        .map_err(|error| DeviceError::invalid(format!("NVML cannot be asked for NVLinks: {error}")))?;
    let gpus = nvml.gpus().map_err(|error| DeviceError::invalid(error.to_string()))?;
    let pairs = nvml.pairs();
    let index = |uuid: &str| gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index);
    for (i, first) in offers.iter().enumerate() {
        for second in offers[i + 1..].iter().filter(|second| second.gpu != first.gpu) {
            let ends = index(&first.gpu).zip(index(&second.gpu)).map(|(a, b)| (a.min(b), a.max(b)));
            let path = pairs.iter().find(|pair| Some((pair.a, pair.b)) == ends).map(|pair| pair.path);
            if !matches!(path, Some(PairPath::Nvlink(_))) {
                return Err(DeviceError::invalid(format!(
                    "no NVLink connects {} and {} ({})",
                    first.gpu,
                    second.gpu,
                    path.map_or("unknown".into(), PairPath::short)
                )));
            }
        }
    }
    Ok(())
}

/// Returns the reason why these members cannot share memory, if it is known before any allocation. It is the same on all ranks.
pub(super) fn obstacle(members: &[Member]) -> Option<String> {
    let n = members.len();
    if !PEER_RANKS.contains(&n) {
        return Some(format!("{n} ranks, and it is made for {} to {}", PEER_RANKS.start(), PEER_RANKS.end()));
    }
    members
        .iter()
        .any(|member| member.host != members[0].host)
        .then(|| "the ranks are on several hosts".into())
}
