//! Host memory that a GPU reaches.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::Context;
use super::error::DeviceError;
use super::gpu::Device;
use super::symbols::Address;

/// Host memory that the GPU copies from and to without a detour, and at the speed of the bus. Page-locked: make few.
pub struct PinnedBuffer {
    context: Arc<Context>,
    memory: *mut c_void,
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
        let context = Arc::clone(&device.context);
        context.bind()?;
        let bytes = bytes.max(1);
        let mut memory = std::ptr::null_mut();
        // Flags: reachable from every context, and mapped into the GPU's address space.
        // SAFETY: the pointer is to a live pointer, and a context is current.
        let code = unsafe { (context.driver.cuMemHostAlloc)(&raw mut memory, bytes, 1 | 2) };
        context.check("cuMemHostAlloc", code)?;
        // SAFETY: just allocated with this length.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context, memory, bytes })
    }

    /// The memory. What the GPU still copies to or from it must have been waited for.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length and zeroed; freed on drop only.
        unsafe { std::slice::from_raw_parts(self.memory.cast(), self.bytes) }
    }

    /// The memory, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), self.bytes) }
    }

    /// Where the GPU sees it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn device_address(&self) -> Result<Address, DeviceError> {
        self.context.bind()?;
        let mut address = 0;
        // SAFETY: allocated as mapped; the pointer is to a live integer; flags must be zero.
        let code =
            unsafe { (self.context.driver.cuMemHostGetDevicePointer_v2)(&raw mut address, self.memory, 0) };
        self.context.check("cuMemHostGetDevicePointer", code)?;
        Ok(address)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once. The driver waits for copies that still use it.
            let _ = unsafe { (self.context.driver.cuMemFreeHost)(self.memory) };
        }
    }
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}
