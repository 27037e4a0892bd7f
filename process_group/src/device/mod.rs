//! GPUs: libraries found at run time, contexts, memory, streams, graphs and kernels.
//!
//! One binary serves machines with and without GPUs. No library is linked: each one is searched for and opened, and its functions
//! are loaded into a table, completely or not at all. So a missing library is an error that lists the searched locations. Contexts,
//! streams, events, modules and pinned memory are [`cudarc`]'s, and so are the types of all functions. This module reads no
//! environment variable; the caller passes [`LibrarySearch`].

#![allow(unsafe_code, reason = "the functions of CUDA are foreign; each block says why it holds")]

mod budget;
pub(crate) mod buffer;
mod capture;
mod captured;
mod compile;
mod context;
#[doc(hidden)]
pub mod cublaslt;
mod discover;
#[doc(hidden)]
pub mod driver;
mod error;
mod event;
mod gpu;
mod graph;
mod kernel;
mod libraries;
mod memory;
#[doc(hidden)]
pub mod nccl;
#[doc(hidden)]
pub mod nvml;
#[doc(hidden)]
pub mod nvrtc;
mod peer;
mod pinned;
pub(crate) mod shared;
mod slices;
mod stream;
pub(crate) mod symbols;
mod tensor_map;
pub(crate) mod tracked;
pub(crate) mod wire;

pub use ::cudarc;
pub use budget::MemoryUse;
#[doc(hidden)]
pub use compile::{Kernels, compile_for};
pub use discover::{Found, LibrarySearch, Missing};
#[doc(hidden)]
pub use discover::{Looked, Origin};
pub use error::DeviceError;
pub use event::Event;
#[doc(hidden)]
pub use gpu::MemoryWatch;
pub use gpu::{Device, DeviceInfo};
pub use graph::Graph;
#[doc(hidden)]
pub use kernel::{Argument, Kernel, Launch, Module};
pub use libraries::Libraries;
pub use memory::{DeviceBuffer, DeviceSliceMut};
#[doc(hidden)]
pub use nccl::{Nccl, NcclError};
#[doc(hidden)]
pub use peer::peer_copy_gbs;
pub use pinned::PinnedBuffer;
pub use stream::Stream;
#[doc(hidden)]
pub use symbols::{Address, Binding, CodeBinding, Handle, Returned, Symbol, Unusable, Version};
#[doc(hidden)]
pub use tensor_map::TensorMap;
