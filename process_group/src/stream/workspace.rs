//! GPU memory that calls need in addition to their buffers.

use crate::device::{Address, Device, DeviceBuffer, Stream};
use crate::error::{Error, Result};
use crate::types::dtype::DType;

/// Alignment of every part, in bytes.
const ALIGN: usize = 256;

/// The workspace of one stream: a call may overwrite the data of the previous call, as it is ordered after it in the stream.
///
/// A graph is launched on the compute stream, wherever its calls were captured: it is ordered after other graphs, and after the
/// work that was there at its capture, but not after later calls on another stream. Those use another block.
#[derive(Default)]
pub(super) struct Workspace {
    block: Option<DeviceBuffer>,
    /// The block that only graphs use.
    of_graphs: Option<DeviceBuffer>,
    /// Bytes of a block that the current group of calls uses, and the total that it has requested.
    used: usize,
    taken: usize,
    /// True if a graph contains addresses in `block`, so that it must stay.
    is_captured: bool,
    /// Blocks that calls may still use. Freeing waits for the GPU, and is therefore done when it is idle.
    outgrown: Vec<DeviceBuffer>,
    /// Blocks that graphs use, kept until the end of the group.
    kept: Vec<DeviceBuffer>,
}

impl Workspace {
    /// Reserves memory for one call, or for one of a group of calls; address 0 for no bytes.
    pub(super) fn reserve(&mut self, device: &Device, stream: &Stream, bytes: usize) -> Result<Address> {
        if bytes == 0 {
            return Ok(0);
        }
        let bytes = bytes.next_multiple_of(ALIGN);
        let (at, end) = (self.used, self.used + bytes);
        let block = if stream.is_capturing()? {
            if size(self.of_graphs.as_ref()) >= end {
                &self.of_graphs
            } else if size(self.block.as_ref()) >= end {
                self.is_captured = true;
                &self.block
            } else {
                return Err(Error::invalid(format!(
                    "this call needs {bytes} bytes of workspace, which cannot be allocated while a graph is captured; \
                     make the same call once before capturing"
                )));
            }
        } else {
            // Not within a group of calls: the library enqueues its work for the first of them with the last.
            if self.taken == 0 && !self.outgrown.is_empty() && stream.is_idle()? {
                self.outgrown.clear();
            }
            if self.is_captured || size(self.block.as_ref()) < end {
                self.grow(device, self.taken + bytes)?;
                return self.reserve(device, stream, bytes);
            }
            &self.block
        };
        let address = block.as_ref().map_or(0, DeviceBuffer::address) + at as u64;
        self.used = end;
        self.taken += bytes;
        Ok(address)
    }

    /// Called when the calls that reserved it are enqueued: the next calls are ordered after them.
    pub(super) fn reuse(&mut self, device: &Device, stream: &Stream) -> Result<()> {
        let taken = std::mem::take(&mut self.taken);
        self.used = 0;
        // Requests that did not fit one block fit the next time, which may be in a capture.
        if taken > size(self.block.as_ref()) && !stream.is_capturing()? {
            self.grow(device, taken)?;
        }
        Ok(())
    }

    /// Creates a block of at least this number of bytes that nothing uses.
    fn grow(&mut self, device: &Device, bytes: usize) -> Result<()> {
        let bytes = bytes.max(size(self.block.as_ref())).next_power_of_two();
        let before = self.block.replace(DeviceBuffer::new(device, DType::U8, bytes)?);
        if std::mem::take(&mut self.is_captured) {
            self.kept.extend(std::mem::replace(&mut self.of_graphs, before));
        } else {
            self.outgrown.extend(before);
        }
        self.used = 0;
        Ok(())
    }
}

fn size(block: Option<&DeviceBuffer>) -> usize {
    block.map_or(0, DeviceBuffer::bytes)
}
