//! `[device]`

use super::section;
use crate::Fraction;
use std::path::PathBuf;

section! {
    /// The GPU of a rank, and where the libraries that drive it are.
    DeviceConfig = "device" {
        /// How much of the GPU's memory this rank may allocate; an allocation beyond it is an error.
        memory_fraction: Fraction = "0.9",
        /// The driver's library `libcuda.so.1`, or its folder; unset, the loader is asked.
        cuda: Option<PathBuf> = "",
        /// NCCL, `libnccl.so.2` of 2.18 or newer, or its folder; unset, the loader is asked, then Python environments
        /// and CUDA toolkits are searched.
        nccl: Option<PathBuf> = "",
        /// The run-time compiler `libnvrtc.so.13` or `.12`, or its folder; unset, as for NCCL.
        nvrtc: Option<PathBuf> = "",
        /// The matrix library `libcublasLt.so.13` or `.12`, or its folder; unset, as for NCCL.
        cublaslt: Option<PathBuf> = "",
        /// The folder in which compiled kernels are kept; unset, `ryzanstein/kernels` in the user's cache folder.
        kernel_cache: Option<PathBuf> = "",
    }
}
