//! The word with which the host ends kernels.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::device::{Address, Device, DeviceError, PinnedBuffer};

/// Bytes of page-locked memory: the minimum.
const BYTES: usize = size_of::<u32>();

/// The word with which the host ends waiting kernels.
pub(crate) struct AbortWord {
    memory: PinnedBuffer,
    address: Address,
    is_enabled: AtomicBool,
}

impl AbortWord {
    pub(in crate::gpu) fn new(device: &Device) -> Result<Self, DeviceError> {
        let memory = PinnedBuffer::new(device, BYTES)?;
        let address = memory.device_address()?;
        Ok(Self { memory, address, is_enabled: AtomicBool::new(false) })
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: page-locked memory begins at a page; four bytes that live as long as `self`, and that the GPU and the host use
        // as one atomic word only.
        unsafe { AtomicU32::from_ptr(self.memory.pointer().cast()) }
    }

    /// Ends waiting kernels soon, with wrong results.
    pub(crate) fn set(&self) {
        self.word().store(1, Ordering::Release);
    }

    /// From now on, a kernel that gives up fails the group.
    pub(super) fn enable(&self) {
        self.is_enabled.store(true, Ordering::Release);
    }

    /// Returns true if the word is enabled and set.
    pub(crate) fn is_set(&self) -> bool {
        self.is_enabled.load(Ordering::Acquire) && self.is_written()
    }

    /// Returns true if the word is set, enabled or not.
    pub(super) fn is_written(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }

    /// Returns the address on the GPU.
    pub(super) const fn address(&self) -> Address {
        self.address
    }
}
