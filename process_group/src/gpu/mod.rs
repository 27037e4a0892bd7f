//! Collectives between GPUs: NCCL, and our own kernels in front of it.

pub(crate) mod nccl;
mod peer_memory;
