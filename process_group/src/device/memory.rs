//! Memory of a GPU, within a budget.

use std::ops::Range;
use std::sync::Arc;

use super::context::{Context, driver_call};
use super::driver::OUT_OF_MEMORY;
use super::error::DeviceError;
use super::gpu::Device;
use super::stream::Stream;
use super::symbols::Address;
use super::symbols::foreign;
use crate::device::buffer::{Buffer, BufferMut, DeviceMemory, View, ViewMut};
use crate::types::dtype::{DType, Element};

/// Elements in the memory of a GPU. Dropping it frees the memory, which waits for the current work of the GPU.
///
/// It has an allocation of its own, not from a pool, so that other processes can open it by a handle.
pub struct DeviceBuffer {
    context: Arc<Context>,
    address: Address,
    dtype: DType,
    count: usize,
}

impl DeviceBuffer {
    /// Allocates `count` elements with unspecified content. Aligned to 256 bytes.
    ///
    /// # Errors
    /// [`DeviceError::Budget`] and [`DeviceError::OutOfMemory`] with the sums.
    pub fn new(device: &Device, dtype: DType, count: usize) -> Result<Self, DeviceError> {
        Self::within(&device.context, dtype, count)
    }

    pub(crate) fn within(context: &Arc<Context>, dtype: DType, count: usize) -> Result<Self, DeviceError> {
        let bytes = count.checked_mul(dtype.size()).ok_or_else(|| {
            DeviceError::invalid(format!(
                "{count} elements of {dtype} are more bytes than there are addresses"
            ))
        })?;
        let mut address = 0;
        if bytes > 0 {
            context.budget.take(bytes as u64)?;
            // SAFETY: the pointer is to a live integer, the size is not zero, and a context is current.
            let outcome = unsafe { driver_call!(context, cuMemAlloc_v2(&raw mut address, bytes)) };
            if let Err(error) = outcome {
                context.budget.give_back(bytes as u64);
                if error.code() == Some(OUT_OF_MEMORY) {
                    let (free, total) = context.free_and_total()?;
                    return Err(DeviceError::OutOfMemory {
                        device: context.ordinal,
                        wanted: bytes as u64,
                        free,
                        allocated: context.budget.allocated(),
                        total,
                    });
                }
                return Err(error);
            }
        }
        Ok(Self { context: Arc::clone(context), address, dtype, count })
    }

    /// Returns the context of its GPU.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Allocates and copies. Waits for the copy.
    ///
    /// # Errors
    /// As [`DeviceBuffer::new`], and those of the driver.
    pub fn from_slice<T: Element>(device: &Device, values: &[T]) -> Result<Self, DeviceError> {
        let mut buffer = Self::new(device, T::DTYPE, values.len())?;
        buffer.write(device.stream(), values)?;
        Ok(buffer)
    }

    /// Copies from ordinary host memory, after the work in the stream. Waits for the copy.
    ///
    /// # Errors
    /// When type or length differ, and those of the driver.
    pub fn write<T: Element>(&mut self, stream: &Stream, values: &[T]) -> Result<(), DeviceError> {
        self.fits(T::DTYPE, values.len())?;
        // SAFETY: type and length fit; `values` is borrowed until the wait below is over.
        unsafe { stream.copy_from_host(self.address, bytemuck::cast_slice(values)) }?;
        stream.drain()
    }

    /// Copies into ordinary host memory, after the work in the stream. Waits for the copy.
    ///
    /// # Errors
    /// When type or length differ, and those of the driver.
    pub fn read<T: Element>(&self, stream: &Stream, values: &mut [T]) -> Result<(), DeviceError> {
        self.fits(T::DTYPE, values.len())?;
        // SAFETY: type and length fit; `values` is borrowed until the wait below is over.
        unsafe { stream.copy_to_host(bytemuck::cast_slice_mut(values), self.address) }?;
        stream.drain()
    }

    /// Copies all elements, after the work in the stream.
    ///
    /// # Errors
    /// When the type differs, and those of the driver.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::zeroed(); self.count];
        self.read(stream, &mut values)?;
        Ok(values)
    }

    /// As [`write`](Self::write), for elements whose type is known at run time only: all bytes of the buffer.
    ///
    /// # Errors
    /// When the length differs, and those of the driver.
    pub fn write_bytes(&mut self, stream: &Stream, bytes: &[u8]) -> Result<(), DeviceError> {
        self.fits_bytes(bytes.len())?;
        // SAFETY: the length fits; `bytes` is borrowed until the wait below is over.
        unsafe { stream.copy_from_host(self.address, bytes) }?;
        stream.drain()
    }

    /// As [`read`](Self::read), for elements whose type is known at run time only: all bytes of the buffer.
    ///
    /// # Errors
    /// When the length differs, and those of the driver.
    pub fn read_bytes(&self, stream: &Stream, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.fits_bytes(bytes.len())?;
        // SAFETY: the length fits; `bytes` is borrowed until the wait below is over.
        unsafe { stream.copy_to_host(bytes, self.address) }?;
        stream.drain()
    }

    /// Enqueues zeros for a range of its elements, after the work in the stream.
    ///
    /// # Errors
    /// When the range goes past the end, and those of the driver.
    pub fn zero(&mut self, stream: &Stream, range: Range<usize>) -> Result<(), DeviceError> {
        let memory = self.memory(&range)?;
        // SAFETY: the range is within this buffer, borrowed alone. Freeing it waits for the GPU.
        unsafe { stream.fill(memory.address, 0, memory.bytes) }
    }

    fn fits_bytes(&self, bytes: usize) -> Result<(), DeviceError> {
        if bytes == self.bytes() {
            return Ok(());
        }
        Err(DeviceError::invalid(format!(
            "a copy of {bytes} bytes to or from a device buffer of {}; both must be the same",
            self.bytes()
        )))
    }

    fn fits(&self, dtype: DType, count: usize) -> Result<(), DeviceError> {
        if dtype == self.dtype && count == self.count {
            return Ok(());
        }
        Err(DeviceError::invalid(format!(
            "a copy of {count} {dtype} to or from a device buffer of {} {}; both must be the same",
            self.count, self.dtype
        )))
    }

    /// Returns its address; zero without elements.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns its size in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    fn memory(&self, range: &Range<usize>) -> Result<DeviceMemory, DeviceError> {
        if range.start > range.end || range.end > self.count {
            return Err(DeviceError::invalid(format!(
                "elements {} to {} of a device buffer of {}",
                range.start, range.end, self.count
            )));
        }
        let size = self.dtype.size();
        Ok(DeviceMemory {
            ordinal: self.context.ordinal,
            address: self.address + (range.start * size) as u64,
            bytes: range.len() * size,
        })
    }

    /// Returns a range of its elements, for writing.
    ///
    /// # Errors
    /// When the range goes past the end.
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_>, DeviceError> {
        Ok(DeviceSliceMut { memory: self.memory(&range)?, buffer: self })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address == 0 || self.context.bind().is_err() {
            return;
        }
        // SAFETY: allocated in `within` and freed once, here. The driver waits for kernels that may still use it.
        let code = unsafe { foreign!(driver, self.context.driver.cuMemFree_v2(self.address)) };
        if code == 0 {
            self.context.budget.give_back(self.bytes() as u64);
        } else {
            tracing::debug!(device = self.context.ordinal, code, "GPU memory could not be freed");
        }
    }
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({} {} on GPU {})", self.count, self.dtype, self.context.ordinal)
    }
}

impl Buffer for DeviceBuffer {
    fn view(&self) -> View<'_> {
        let (ordinal, address) = (self.context.ordinal, self.address);
        // SAFETY: the memory is this buffer's. Freeing it waits for the GPU, so it outlives what has been enqueued.
        unsafe { View::on_device(self.dtype, DeviceMemory { ordinal, address, bytes: self.bytes() }) }
    }
}

impl BufferMut for DeviceBuffer {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let (ordinal, address) = (self.context.ordinal, self.address);
        // SAFETY: as above, and the view borrows it alone.
        unsafe { ViewMut::on_device(self.dtype, DeviceMemory { ordinal, address, bytes: self.bytes() }) }
    }
}

/// A range of the elements of a [`DeviceBuffer`], for writing.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    buffer: &'a mut DeviceBuffer,
    memory: DeviceMemory,
}

impl Buffer for DeviceSliceMut<'_> {
    fn view(&self) -> View<'_> {
        // SAFETY: the memory is the buffer's, whose freeing waits for the GPU.
        unsafe { View::on_device(self.buffer.dtype, self.memory) }
    }
}

impl BufferMut for DeviceSliceMut<'_> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        // SAFETY: as above, and borrowed alone.
        unsafe { ViewMut::on_device(self.buffer.dtype, self.memory) }
    }
}
