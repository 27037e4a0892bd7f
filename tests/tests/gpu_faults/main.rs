//! NCCL when ranks are killed, stop, leave, or call different things: one process a rank and one GPU a process. All ignored:
//! `cargo test -p ryzanstein-tests --test gpu_faults -- --ignored --test-threads=1` on a machine with GPUs, NCCL and NVRTC.

#[path = "../common/mod.rs"]
mod common;
mod leaving;
mod lost;
mod mismatches;
