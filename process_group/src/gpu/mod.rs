//! Collectives between GPUs: NCCL, and the kernels of this crate in front of it.

pub(crate) mod nccl;
mod peer_memory;

pub(crate) use nccl::NcclComm;
pub(crate) use peer_memory::{AbortWord, PeerMemory};
