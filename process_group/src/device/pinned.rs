//! Host memory that a GPU can access.

use std::sync::Arc;

use cudarc::driver::{PinnedHostSlice, sys};

use super::context::{Context, driver_call};
use super::error::DeviceError;
use super::gpu::Device;
use super::symbols::Address;
use super::symbols::foreign;

/// Host memory that the GPU accesses directly, at the speed of the bus. It is page-locked: make few such buffers.
pub struct PinnedBuffer {
    context: Arc<Context>,
    /// The owner of `memory`, which is stored separately because cudarc waits for an event at each access.
    _owner: PinnedHostSlice<u8>,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner; the driver's functions may be called from any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes (at least one), zeroed.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        // Accessible from every context, and mapped into the GPU's address space.
        const FLAGS: u32 = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let context = Arc::clone(&device.context);
        let bytes = bytes.max(1);
        if bytes >= isize::MAX as usize {
            return Err(DeviceError::invalid(format!("{bytes} bytes are more than there are addresses")));
        }
        // SAFETY: what is not set is filled below, before anybody reads it.
        let slice = unsafe { context.cuda().alloc_pinned_with_flags::<u8>(bytes, FLAGS) };
        let mut owner = context.took("cuMemHostAlloc", slice)?;
        let memory = context.took("cuEventSynchronize", owner.as_mut_ptr())?;
        // SAFETY: just allocated with this length.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(Self { context, _owner: owner, memory, bytes })
    }

    /// Returns the memory. Copies by the GPU to or from it must have finished.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length and zeroed; freed on drop only.
        unsafe { std::slice::from_raw_parts(self.memory, self.bytes) }
    }

    /// Returns the memory, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }

    /// Returns the address on the host, for words that the host and the GPU share. A caller must not hold a slice of the memory
    /// too.
    pub(crate) const fn pointer(&self) -> *mut u8 {
        self.memory
    }

    /// Returns the address on the GPU.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn device_address(&self) -> Result<Address, DeviceError> {
        let (mut address, memory) = (0, self.memory.cast());
        // SAFETY: allocated as mapped; the pointer is to a live integer; flags must be zero.
        unsafe { driver_call!(self.context, cuMemHostGetDevicePointer_v2(&raw mut address, memory, 0)) }?;
        Ok(address)
    }
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}
