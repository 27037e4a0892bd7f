//! What is measured, and the peers measured beside it.

pub mod host_clock;
pub mod measure;
pub mod raw_nccl;
