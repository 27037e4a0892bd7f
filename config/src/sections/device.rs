//! `[device]`

use super::section;
use crate::Fraction;
use std::path::PathBuf;

section! {
    /// The GPU of a rank, and the libraries for it.
    DeviceConfig = "device" {
        /// The fraction of the GPU's memory that this rank may allocate; an allocation beyond it fails.
        memory_fraction: Fraction = "0.9",
        /// The driver library `libcuda.so.1`, or its folder; unset, the dynamic loader finds it.
        cuda: Option<PathBuf> = "",
        /// NCCL, `libnccl.so.2` of 2.18 or newer, or its folder; unset, the dynamic loader, then Python environments and
        /// CUDA toolkits are searched.
        nccl: Option<PathBuf> = "",
        /// The run-time compiler `libnvrtc.so.13` or `.12`, or its folder; unset, as for NCCL.
        nvrtc: Option<PathBuf> = "",
        /// The matrix library `libcublasLt.so.13` or `.12`, or its folder; unset, as for NCCL.
        cublaslt: Option<PathBuf> = "",
        /// The folder for compiled kernels; unset, `ryzanstein/kernels` in the user's cache folder.
        kernel_cache: Option<PathBuf> = "",
    }
}
