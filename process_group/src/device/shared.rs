//! GPU memory that several ranks can access: ranks of this process, or of others by CUDA's handles.

use std::sync::Arc;

use cudarc::driver::sys;
use serde::{Deserialize, Serialize};

use super::context::{Context, driver_call};
use super::error::DeviceError;
use super::gpu::Device;
use super::memory::DeviceBuffer;
use super::symbols::{Address, foreign};

/// CUDA's code for access that is already enabled.
const ALREADY: i32 = 704;

/// The handle with which another process opens a [`DeviceBuffer`]: CUDA's handle, which it writes and reads as bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct MemoryHandle(Vec<u8>);

impl DeviceBuffer {
    /// Returns a handle with which other processes open this memory. The memory must stay allocated while they use it.
    ///
    /// # Errors
    /// Those of the driver: memory of an engine's pool has no handle, nor has any in some virtual machines.
    pub(crate) fn handle(&self, device: &Device) -> Result<MemoryHandle, DeviceError> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is to a live handle; the address is the start of an allocation of `cuMemAlloc`.
        unsafe { driver_call!(device.context, cuIpcGetMemHandle(&raw mut handle, self.address())) }?;
        Ok(MemoryHandle(handle.reserved.iter().map(|byte| *byte as u8).collect()))
    }
}

/// Memory of another process on the same host, mapped until dropped.
pub(crate) struct MappedMemory {
    context: Arc<Context>,
    address: Address,
}

impl MappedMemory {
    /// Maps the memory of the handle, so that this GPU's kernels can access it.
    ///
    /// # Errors
    /// Those of the driver: the two GPUs have no peer access, or the processes are in containers that share no IPC namespace.
    pub(crate) fn open(device: &Device, handle: &MemoryHandle) -> Result<Self, DeviceError> {
        let bytes: [u8; 64] = handle
            .0
            .as_slice()
            .try_into()
            .map_err(|_| DeviceError::invalid("a handle of shared memory has 64 bytes"))?;
        let context = &device.context;
        let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the pointer is to a live integer; CUDA refuses bytes that are no handle.
        unsafe { driver_call!(context, cuIpcOpenMemHandle_v2(&raw mut address, handle, flags)) }?;
        Ok(Self { context: Arc::clone(context), address })
    }

    /// Returns its address for this GPU's kernels.
    pub(crate) const fn address(&self) -> Address {
        self.address
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and closed once.
        if let Err(error) = unsafe { driver_call!(self.context, cuIpcCloseMemHandle(self.address)) } {
            tracing::debug!(%error, "memory of another process stays mapped");
        }
    }
}

/// Lets kernels and copies of `device` access `peer`, memory of another GPU of this process.
///
/// # Errors
/// Those of the driver: the two have no peer access.
pub(crate) fn enable_peer_access(device: &Device, peer: &DeviceBuffer) -> Result<(), DeviceError> {
    let (context, other) = (&device.context, peer.context());
    if context.handle() == other.handle() {
        return Ok(());
    }
    context.bind()?;
    // SAFETY: both contexts are retained, by the device and by the buffer; flags must be zero.
    let code = unsafe { foreign!(driver, context.driver.cuCtxEnablePeerAccess(other.handle(), 0)) };
    if code == ALREADY { Ok(()) } else { context.check("cuCtxEnablePeerAccess", code) }
}
