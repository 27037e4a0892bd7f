//! Collectives between GPUs: NCCL, and the kernels of this crate in front of it.

pub(crate) mod nccl;
mod peer_memory;
