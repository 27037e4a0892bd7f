//! Memory that calls need beside their buffers.

use crate::device::{Address, Device, DeviceBuffer, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Every part begins at a multiple of this.
const ALIGN: usize = 256;

/// Scratch memory of one stream: a call may overwrite what the call before it used, as it comes after it.
#[derive(Default)]
pub(super) struct Scratch {
    memory: Option<DeviceBuffer>,
    used: usize,
    /// What earlier calls of one group of calls use still.
    outgrown: Vec<DeviceBuffer>,
}

impl Scratch {
    /// Memory for one call, or for one of a group of calls.
    pub(super) fn take(&mut self, device: &Device, stream: &Stream, bytes: usize) -> Result<Address> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let there = self.memory.as_ref().map_or(0, DeviceBuffer::bytes);
        if self.used + bytes > there {
            if stream.is_capturing()? {
                return Err(Error::invalid(format!(
                    "this call needs {bytes} bytes of scratch memory, which cannot be allocated while a graph is \
                     captured; make the same call once before capturing"
                )));
            }
            if self.used == 0 {
                // Freeing waits for the calls before, which may still use it.
                self.outgrown.clear();
                self.memory = None;
            }
            let wanted = bytes.max(there).next_power_of_two();
            self.outgrown.extend(self.memory.replace(DeviceBuffer::new(device, DType::U8, wanted)?));
            self.used = 0;
        }
        let at = self.used;
        self.used += bytes;
        Ok(self.memory.as_ref().map_or(0, DeviceBuffer::address) + at as u64)
    }

    /// The calls that took it are enqueued; the next ones come after them.
    pub(super) fn reuse(&mut self) {
        self.used = 0;
    }
}
