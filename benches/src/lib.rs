//! Shared code of the benchmarks and of the comparisons with peers.

pub mod checkpoint;
pub mod host_clock;
pub mod ranks;
pub mod raw_nccl;
