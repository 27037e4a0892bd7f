//! The memory of one bucket.

use std::ops::Range;

use crate::device::buffer::{Buffer, BufferMut, View, ViewMut};
use crate::device::{Device, DeviceBuffer, DeviceSliceMut, Stream};
use crate::error::{Error, Result};
use crate::types::dtype::{DType, with_element};

/// Elements of a type known at run time, in the memory on which a group works.
#[derive(Debug)]
pub(super) struct BucketMemory {
    dtype: DType,
    count: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Aligned for every element type.
    Host(Vec<u64>),
    Device(DeviceBuffer, Stream),
}

impl BucketMemory {
    /// Allocates zeros.
    pub(super) fn new(device: Option<&Device>, dtype: DType, count: usize) -> Result<Self> {
        let place = if let Some(device) = device {
            let mut buffer = DeviceBuffer::new(device, dtype, count)?;
            buffer.zero(device.stream(), 0..count)?;
            Place::Device(buffer, device.stream().clone())
        } else {
            Place::Host(vec![0; (count * dtype.size()).div_ceil(size_of::<u64>())])
        };
        Ok(Self { dtype, count, place })
    }

    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns the bytes of a range of elements.
    pub(super) fn host(&mut self, elements: &Range<usize>) -> Result<&mut [u8]> {
        let size = self.dtype.size();
        match &mut self.place {
            Place::Host(words) => {
                Ok(&mut bytemuck::cast_slice_mut(words)[elements.start * size..elements.end * size])
            }
            Place::Device(..) => Err(Error::invalid(
                "this gradient is in the memory of a GPU; take it with BucketedReducer::device_gradient",
            )),
        }
    }

    /// Returns a range of elements on a GPU.
    pub(super) fn device(&mut self, elements: Range<usize>) -> Result<DeviceSliceMut<'_>> {
        match &mut self.place {
            Place::Device(buffer, _) => Ok(buffer.slice_mut(elements)?),
            Place::Host(_) => {
                Err(Error::invalid("this gradient is in host memory; take it with BucketedReducer::gradient"))
            }
        }
    }

    /// Zeroes a range of elements. On a GPU this is enqueued on the compute stream.
    pub(super) fn zero(&mut self, elements: Range<usize>) -> Result<()> {
        if let Place::Device(buffer, stream) = &mut self.place {
            return Ok(buffer.zero(stream, elements)?);
        }
        self.host(&elements)?.fill(0);
        Ok(())
    }
}

impl Buffer for BucketMemory {
    fn view(&self) -> View<'_> {
        let bytes = self.bytes();
        match &self.place {
            Place::Host(words) => {
                let bytes: &[u8] = &bytemuck::cast_slice(words)[..bytes];
                with_element!(self.dtype, T => View::of::<T>(bytemuck::cast_slice(bytes)))
            }
            Place::Device(buffer, _) => buffer.view(),
        }
    }
}

impl BufferMut for BucketMemory {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = self.bytes();
        match &mut self.place {
            Place::Host(words) => {
                let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(words)[..bytes];
                with_element!(self.dtype, T => ViewMut::of::<T>(bytemuck::cast_slice_mut(bytes)))
            }
            Place::Device(buffer, _) => buffer.view_mut(),
        }
    }
}
