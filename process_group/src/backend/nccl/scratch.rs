//! Memory that calls need beside their buffers.

use crate::device::{Address, Device, DeviceBuffer, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Every part begins at a multiple of this.
const ALIGN: usize = 256;

/// Scratch memory of one stream: a call may overwrite what the call before it used, as it comes after it.
#[derive(Default)]
pub(super) struct Scratch {
    block: Option<DeviceBuffer>,
    /// Bytes of the block that calls of the group at hand have taken, and bytes that they have taken in all.
    used: usize,
    taken: usize,
    /// A graph has addresses in the block, so that it must stay.
    recorded: bool,
    /// What calls may use still. Freeing waits for the GPU, and so is done when it is idle.
    outgrown: Vec<DeviceBuffer>,
    /// What graphs use, for as long as the group lives.
    kept: Vec<DeviceBuffer>,
}

impl Scratch {
    /// Memory for one call, or for one of a group of calls.
    pub(super) fn take(&mut self, device: &Device, stream: &Stream, bytes: usize) -> Result<Address> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let capturing = stream.is_capturing()?;
        if !capturing && !self.outgrown.is_empty() && stream.is_idle()? {
            self.outgrown.clear();
        }
        if self.used + bytes > self.size() {
            if capturing {
                return Err(Error::invalid(format!(
                    "this call needs {bytes} bytes of scratch memory, which cannot be allocated while a graph is \
                     captured; make the same call once before capturing"
                )));
            }
            self.grow(device, self.taken + bytes)?;
        }
        let at = self.used;
        self.used += bytes;
        self.taken += bytes;
        self.recorded |= capturing;
        Ok(self.block.as_ref().map_or(0, DeviceBuffer::address) + at as u64)
    }

    /// The calls that took it are enqueued; the next ones come after them.
    pub(super) fn reuse(&mut self, device: &Device, stream: &Stream) -> Result<()> {
        let taken = std::mem::take(&mut self.taken);
        self.used = 0;
        // What did not fit in one block does so the next time, which may be in a capture.
        if taken > self.size() && !stream.is_capturing()? {
            self.grow(device, taken)?;
        }
        Ok(())
    }

    fn size(&self) -> usize {
        self.block.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    fn grow(&mut self, device: &Device, bytes: usize) -> Result<()> {
        let block = DeviceBuffer::new(device, DType::U8, bytes.next_power_of_two())?;
        let before = self.block.replace(block);
        let place = if self.recorded { &mut self.kept } else { &mut self.outgrown };
        place.extend(before);
        (self.used, self.recorded) = (0, false);
        Ok(())
    }
}
