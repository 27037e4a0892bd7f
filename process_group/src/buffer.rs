//! What collectives read and write: typed, contiguous memory.
//!
//! A [`Buffer`] lends a [`View`]: element type and place. The place is host memory or that of a GPU. Slices and vectors of every [`Element`] are buffers;
//! other containers implement the two traits by lending the view of their storage.

use std::fmt;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// This process's own.
    Host,
    /// That of the GPU with this CUDA number.
    Device(u32),
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Device(ordinal) => write!(f, "the memory of GPU {ordinal}"),
        }
    }
}

/// A run of bytes in the memory of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceMemory {
    /// CUDA's number of the GPU.
    pub ordinal: u32,
    /// The address there.
    pub address: u64,
    /// The length.
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    Host(&'a [u8]),
    Device(DeviceMemory),
}

#[derive(Debug)]
enum PlaceMut<'a> {
    Host(&'a mut [u8]),
    Device(DeviceMemory),
}

/// A read-only, correctly aligned run of elements, in host memory or in that of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    dtype: DType,
    place: Place<'a>,
}

/// A writable, correctly aligned run of elements, in host memory or in that of a GPU.
#[derive(Debug)]
pub struct ViewMut<'a> {
    dtype: DType,
    place: PlaceMut<'a>,
}

fn check(dtype: DType, address: usize, bytes: usize) -> Result<()> {
    if !bytes.is_multiple_of(dtype.size()) {
        return Err(Error::invalid(format!(
            "a buffer of {bytes} bytes is no whole number of {dtype} elements of {} bytes; pass a multiple",
            dtype.size()
        )));
    }
    if !address.is_multiple_of(dtype.align()) {
        return Err(Error::invalid(format!(
            "a buffer of {dtype} must be aligned to {} bytes and is not; allocate it as elements, not as bytes",
            dtype.align()
        )));
    }
    Ok(())
}

fn not_host(memory: &DeviceMemory) -> Error {
    Error::invalid(format!(
        "this buffer is in {} and is wanted in host memory; copy it there first",
        Memory::Device(memory.ordinal)
    ))
}

impl<'a> View<'a> {
    /// Takes raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, place: Place::Host(bytes) })
    }

    /// The elements of a slice.
    pub fn of<T: Element>(slice: &'a [T]) -> Self {
        Self { dtype: T::DTYPE, place: Place::Host(bytemuck::cast_slice(slice)) }
    }

    /// Elements in the memory of a GPU.
    ///
    /// # Safety
    /// All of `memory` must be allocated there for `'a`, whole elements of `dtype` aligned to their size, and written by
    /// nothing that is not ordered by the GPU's streams.
    #[allow(unsafe_code, reason = "the promise is the caller's; nothing unsafe is done here")]
    pub const unsafe fn on_device(dtype: DType, memory: DeviceMemory) -> Self {
        Self { dtype, place: Place::Device(memory) }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.byte_len() / self.dtype.size()
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        match self.place {
            Place::Host(bytes) => bytes.len(),
            Place::Device(memory) => memory.bytes,
        }
    }

    /// Where the elements are.
    pub fn memory(&self) -> Memory {
        match self.place {
            Place::Host(_) => Memory::Host,
            Place::Device(memory) => Memory::Device(memory.ordinal),
        }
    }

    /// The memory, as bytes in the machine's own order.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not host memory.
    pub fn host(&self) -> Result<&'a [u8]> {
        match self.place {
            Place::Host(bytes) => Ok(bytes),
            Place::Device(memory) => Err(not_host(&memory)),
        }
    }

    /// The memory, where it is a GPU's.
    pub fn device(&self) -> Option<DeviceMemory> {
        match self.place {
            Place::Host(_) => None,
            Place::Device(memory) => Some(memory),
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Takes raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a mut [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, place: PlaceMut::Host(bytes) })
    }

    /// The elements of a slice.
    pub fn of<T: Element>(slice: &'a mut [T]) -> Self {
        Self { dtype: T::DTYPE, place: PlaceMut::Host(bytemuck::cast_slice_mut(slice)) }
    }

    /// Elements in the memory of a GPU.
    ///
    /// # Safety
    /// As [`View::on_device`], and nothing else reads them meanwhile.
    #[allow(unsafe_code, reason = "the promise is the caller's; nothing unsafe is done here")]
    pub const unsafe fn on_device(dtype: DType, memory: DeviceMemory) -> Self {
        Self { dtype, place: PlaceMut::Device(memory) }
    }

    /// The same elements, to read.
    pub fn as_view(&self) -> View<'_> {
        let place = match &self.place {
            PlaceMut::Host(bytes) => Place::Host(bytes),
            PlaceMut::Device(memory) => Place::Device(*memory),
        };
        View { dtype: self.dtype, place }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.as_view().count()
    }

    /// Number of bytes.
    pub fn byte_len(&self) -> usize {
        self.as_view().byte_len()
    }

    /// Where the elements are.
    pub fn memory(&self) -> Memory {
        self.as_view().memory()
    }

    /// The memory, as bytes in the machine's own order.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not host memory.
    pub fn host(&mut self) -> Result<&mut [u8]> {
        match &mut self.place {
            PlaceMut::Host(bytes) => Ok(bytes),
            PlaceMut::Device(memory) => Err(not_host(memory)),
        }
    }

    /// The memory, where it is a GPU's.
    pub fn device(&self) -> Option<DeviceMemory> {
        self.as_view().device()
    }
}

/// Something that a collective can read.
pub trait Buffer {
    /// Lends the elements.
    fn view(&self) -> View<'_>;
}

/// Something that a collective can write.
pub trait BufferMut: Buffer {
    /// Lends the elements for writing.
    fn view_mut(&mut self) -> ViewMut<'_>;
}

impl<T: Element> Buffer for [T] {
    fn view(&self) -> View<'_> {
        View::of(self)
    }
}

impl<T: Element> BufferMut for [T] {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::of(self)
    }
}

impl<T: Element> Buffer for Vec<T> {
    fn view(&self) -> View<'_> {
        View::of(self)
    }
}

impl<T: Element> BufferMut for Vec<T> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::of(self)
    }
}

impl<T: Element, const N: usize> Buffer for [T; N] {
    fn view(&self) -> View<'_> {
        View::of(self)
    }
}

impl<T: Element, const N: usize> BufferMut for [T; N] {
    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::of(self)
    }
}
