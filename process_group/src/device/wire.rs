//! f32 values in the memory of a GPU, rounded to 16 bits for transfer to other ranks.

use super::error::DeviceError;
use super::gpu::Device;
use super::kernel::{Kernel, Launch};
use super::memory::{DeviceBuffer, DeviceSliceMut};
use crate::device::buffer::ViewMut;
use crate::types::dtype::DType;

/// CUDA C++ without headers.
const SOURCE: &str = include_str!("wire.cu");
const THREADS: u32 = 256;
/// More blocks than this do not fit a GPU at once; each block then processes several parts.
const BLOCKS: u32 = 1024;

/// Memory for values of 16 bits, kept from call to call.
#[derive(Debug)]
pub(crate) struct WireMemory {
    device: Device,
    buffers: Vec<WireBuffer>,
}

/// Memory for values of one type.
#[derive(Debug)]
pub(crate) struct WireBuffer {
    device: Device,
    values: DeviceBuffer,
    /// True if a graph contains its address: it stays as long as the group.
    is_captured: bool,
}

impl WireMemory {
    pub(crate) fn new(device: &Device) -> Self {
        Self { device: device.clone(), buffers: Vec::new() }
    }

    /// Returns room for `count` values of `dtype`, f16 or bf16. Frees shorter memory, unless a graph uses it.
    ///
    /// # Errors
    /// When there is no room and the stream is being captured, which must not allocate; those of [`DeviceBuffer::new`].
    pub(crate) fn room(&mut self, dtype: DType, count: usize) -> Result<&mut WireBuffer, DeviceError> {
        let is_capturing = self.device.stream().is_capturing()?;
        let suits =
            |buffer: &WireBuffer| buffer.values.dtype() == dtype && buffer.values.count() >= count.max(1);
        let found = if let Some(found) = self.buffers.iter().position(suits) {
            found
        } else if is_capturing {
            return Err(DeviceError::invalid(format!(
                "a compressed all-reduce of {count} values sent as {dtype} is captured, and has no memory yet; make one of that \
                 length and type before the capture"
            )));
        } else {
            self.buffers.retain(|buffer| buffer.is_captured || buffer.values.dtype() != dtype);
            let values = DeviceBuffer::new(&self.device, dtype, count.max(1))?;
            self.buffers.push(WireBuffer { device: self.device.clone(), values, is_captured: false });
            self.buffers.len() - 1
        };
        self.buffers[found].is_captured |= is_capturing;
        Ok(&mut self.buffers[found])
    }
}

impl WireBuffer {
    /// Returns the first `count` values.
    ///
    /// # Errors
    /// When it has fewer values.
    pub(crate) fn values(&mut self, count: usize) -> Result<DeviceSliceMut<'_>, DeviceError> {
        self.values.slice_mut(0..count)
    }

    /// Enqueues the rounding of `from` to the first values here.
    ///
    /// # Errors
    /// When `from` is not f32 in the memory of the GPU, or there is no room for it; those of the compiler and the driver.
    pub(crate) fn narrow(&mut self, from: &ViewMut<'_>) -> Result<(), DeviceError> {
        let (address, launch) = self.matching(from)?;
        let count = from.count() as u64;
        // SAFETY: two addresses and a 64-bit number; as many elements as both have, which stay by the promise of the view and as
        // memory of this buffer is freed only once the GPU has used it, and not while a graph may.
        unsafe {
            self.kernel("to_wire")?.launch(
                self.device.stream(),
                launch,
                &[&address, &self.values.address(), &count],
            )
        }
    }

    /// Enqueues the reverse conversion, divided by `divisor`.
    ///
    /// # Errors
    /// As [`narrow`](Self::narrow).
    pub(crate) fn widen(&self, to: &mut ViewMut<'_>, divisor: f32) -> Result<(), DeviceError> {
        let (address, launch) = self.matching(to)?;
        let count = to.count() as u64;
        // SAFETY: as above, and a 32-bit float; the view is borrowed for writing.
        unsafe {
            self.kernel("from_wire")?.launch(
                self.device.stream(),
                launch,
                &[&self.values.address(), &address, &count, &divisor],
            )
        }
    }

    fn matching(&self, view: &ViewMut<'_>) -> Result<(u64, Launch), DeviceError> {
        let memory = view.device().filter(|memory| memory.ordinal == self.device.ordinal());
        match memory {
            Some(memory) if view.dtype() == DType::F32 && view.count() <= self.values.count() => {
                let mut launch = Launch::over(view.count(), THREADS);
                launch.grid[0] = launch.grid[0].min(BLOCKS);
                Ok((memory.address, launch))
            }
            _ => Err(DeviceError::invalid(format!(
                "{} {} cannot be converted to {} {} on GPU {}",
                view.count(),
                view.dtype(),
                self.values.count(),
                self.values.dtype(),
                self.device.ordinal()
            ))),
        }
    }

    fn kernel(&self, name: &str) -> Result<Kernel, DeviceError> {
        let half = format!("-DHALF={}", u8::from(self.values.dtype() == DType::F16));
        self.device.kernels().module("wire.cu", SOURCE, &[&half])?.kernel(name)
    }
}
