//! Memory on which the calls of a group work.

use std::ops::Range;

use bytemuck::allocation::try_zeroed_vec;

use crate::device::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::device::{Device, DeviceBuffer, DeviceSliceMut, Stream};
use crate::error::{Error, Result};
use crate::types::dtype::{DType, Element, with_element};

/// Elements of a type known at run time, on the host or on a GPU.
#[derive(Debug)]
pub(super) struct GroupMemory {
    dtype: DType,
    count: usize,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    /// Aligned for every element type.
    Host(Vec<u64>),
    Device(DeviceBuffer, Stream),
}

impl GroupMemory {
    /// Copies elements.
    pub(super) fn from_slice<T: Element>(device: Option<&Device>, values: &[T]) -> Result<Self> {
        let Some(device) = device else {
            let mut own = Self::new(None, T::DTYPE, values.len())?;
            own.write(values)?;
            return Ok(own);
        };
        let storage = Storage::Device(DeviceBuffer::from_slice(device, values)?, device.stream().clone());
        Ok(Self { dtype: T::DTYPE, count: values.len(), storage })
    }

    /// Allocates zeros.
    pub(super) fn new(device: Option<&Device>, dtype: DType, count: usize) -> Result<Self> {
        let storage = if let Some(device) = device {
            let mut buffer = DeviceBuffer::new(device, dtype, count)?;
            buffer.zero(device.stream(), 0..count)?;
            Storage::Device(buffer, device.stream().clone())
        } else {
            let bytes = count.checked_mul(dtype.size());
            let words = bytes.and_then(|bytes| try_zeroed_vec(bytes.div_ceil(size_of::<u64>())).ok());
            Storage::Host(words.ok_or_else(|| {
                Error::invalid(format!(
                    "{count} elements of {dtype} are more than memory holds; ask for fewer"
                ))
            })?)
        };
        Ok(Self { dtype, count, storage })
    }

    /// Writes all elements. On a GPU this waits for the copy.
    pub(super) fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        debug_assert_eq!(T::DTYPE, self.dtype);
        if values.len() != self.count {
            let count = self.count;
            return Err(Error::invalid(format!(
                "{} values are written to a buffer of {count}",
                values.len()
            )));
        }
        match &mut self.storage {
            Storage::Device(buffer, stream) => buffer.write(stream, values)?,
            Storage::Host(words) => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
                bytes[..size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
            }
        }
        Ok(())
    }

    /// Reads all elements. On a GPU this waits for the copy.
    pub(super) fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        debug_assert_eq!(T::DTYPE, self.dtype);
        match &self.storage {
            Storage::Host(words) => {
                Ok(bytemuck::cast_slice(&bytemuck::cast_slice::<_, u8>(words)[..self.bytes()]).to_vec())
            }
            Storage::Device(buffer, stream) => Ok(buffer.to_vec(stream)?),
        }
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns the bytes of a range of elements on the host; `None` on a GPU.
    pub(super) fn host(&mut self, elements: Range<usize>) -> Option<&mut [u8]> {
        let size = self.dtype.size();
        match &mut self.storage {
            Storage::Host(words) => {
                Some(&mut bytemuck::cast_slice_mut(words)[elements.start * size..elements.end * size])
            }
            Storage::Device(..) => None,
        }
    }

    /// Returns a range of elements on a GPU; `None` on the host.
    pub(super) fn device(&mut self, elements: Range<usize>) -> Result<Option<DeviceSliceMut<'_>>> {
        match &mut self.storage {
            Storage::Device(buffer, _) => Ok(Some(buffer.slice_mut(elements)?)),
            Storage::Host(_) => Ok(None),
        }
    }

    /// Zeroes a range of elements. On a GPU this is enqueued on the compute stream.
    pub(super) fn zero(&mut self, elements: Range<usize>) -> Result<()> {
        if let Storage::Device(buffer, stream) = &mut self.storage {
            buffer.zero(stream, elements)?;
        } else if let Some(bytes) = self.host(elements) {
            bytes.fill(0);
        }
        Ok(())
    }
}

impl Buffer for GroupMemory {
    fn view(&self) -> View<'_> {
        let bytes = self.bytes();
        match &self.storage {
            Storage::Host(words) => {
                let bytes: &[u8] = &bytemuck::cast_slice(words)[..bytes];
                with_element!(self.dtype, T => View::of::<T>(bytemuck::cast_slice(bytes)))
            }
            Storage::Device(buffer, _) => buffer.view(),
        }
    }
}

impl BufferMut for GroupMemory {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = self.bytes();
        match &mut self.storage {
            Storage::Host(words) => {
                let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(words)[..bytes];
                with_element!(self.dtype, T => ViewMut::of::<T>(bytemuck::cast_slice_mut(bytes)))
            }
            Storage::Device(buffer, _) => buffer.view_mut(),
        }
    }
}
