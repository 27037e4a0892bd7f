//! What is measured, and the peers measured beside it.

pub mod checkpoint;
pub mod host_clock;
pub mod measure;
pub mod ranks;
pub mod raw_nccl;
