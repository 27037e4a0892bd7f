//! The memory that collectives read and write: typed and contiguous.
//!
//! A [`Buffer`] lends a [`View`]: element type and location. The location is host memory or the memory of a GPU. Slices and vectors
//! of every [`Element`] are buffers; other containers implement the two traits by lending the view of their storage.

use std::fmt;

use cudarc::driver::{CudaStream, SyncOnDrop};

use crate::device::tracked::{Tracked, TrackedMut};
use crate::error::{Error, Result};
use crate::types::dtype::{DType, Element};

/// The location of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// Host memory of this process.
    Host,
    /// Memory of the GPU with this CUDA number.
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
    /// Its address on the GPU.
    pub address: u64,
    /// Its length.
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug)]
enum Location<'a> {
    Host(&'a [u8]),
    Device(DeviceMemory),
    /// Memory whose address is unknown until it is ordered on a stream.
    Tracked(&'a dyn Tracked),
}

#[derive(Debug)]
enum LocationMut<'a> {
    Host(&'a mut [u8]),
    Device(DeviceMemory),
    Tracked(&'a mut dyn TrackedMut),
}

/// A read-only, correctly aligned run of elements, in host memory or in the memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    dtype: DType,
    location: Location<'a>,
}

/// A writable, correctly aligned run of elements, in host memory or in the memory of a GPU.
#[derive(Debug)]
pub struct ViewMut<'a> {
    dtype: DType,
    location: LocationMut<'a>,
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

fn check_type<T: Element>(dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "this buffer has elements of {dtype} and is read as {}; ask `dtype` first",
        T::DTYPE
    )))
}

fn not_host(memory: Memory) -> Error {
    Error::invalid(format!("this buffer is in {memory} and is wanted in host memory; copy it there first"))
}

fn ordinal(slice: &dyn Tracked) -> u32 {
    slice.home().context().ordinal() as u32
}

impl<'a> View<'a> {
    /// Interprets raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, location: Location::Host(bytes) })
    }

    /// Views the elements of a slice.
    pub fn of<T: Element>(slice: &'a [T]) -> Self {
        Self { dtype: T::DTYPE, location: Location::Host(bytemuck::cast_slice(slice)) }
    }

    /// Views elements in the memory of a GPU.
    ///
    /// # Safety
    /// `memory` must be whole elements of `dtype`, aligned to their size, in a context that the group's device can use. It
    /// must stay allocated, and nothing may write it, until every stream on which a call with this view has been enqueued
    /// is past that call: `Ok` means enqueued, so that is longer than `'a`. Memory whose freeing waits for the GPU, or is
    /// itself enqueued behind the call, as that of [`DeviceBuffer`](crate::device::DeviceBuffer), needs no further care.
    #[allow(unsafe_code, reason = "the promise is the caller's; nothing unsafe is done here")]
    pub const unsafe fn on_device(dtype: DType, memory: DeviceMemory) -> Self {
        Self { dtype, location: Location::Device(memory) }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.byte_len() / self.dtype.size()
    }

    /// Returns the number of bytes.
    pub fn byte_len(&self) -> usize {
        match self.location {
            Location::Host(bytes) => bytes.len(),
            Location::Device(memory) => memory.bytes,
            Location::Tracked(slice) => slice.bytes(),
        }
    }

    /// Returns the location of the elements.
    pub fn memory(&self) -> Memory {
        match self.location {
            Location::Host(_) => Memory::Host,
            Location::Device(memory) => Memory::Device(memory.ordinal),
            Location::Tracked(slice) => Memory::Device(ordinal(slice)),
        }
    }

    /// Returns the memory, as bytes in the machine's own order.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not host memory.
    pub fn host(&self) -> Result<&'a [u8]> {
        match self.location {
            Location::Host(bytes) => Ok(bytes),
            Location::Device(_) | Location::Tracked(_) => Err(not_host(self.memory())),
        }
    }

    /// Returns the elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] when they are not of type `T`, or not in host memory.
    pub fn elements<T: Element>(&self) -> Result<&'a [T]> {
        check_type::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(self.host()?))
    }

    /// Returns the memory, if it is a GPU's. For a slice of cudarc it is known only within a call, which orders the slice.
    pub fn device(&self) -> Option<DeviceMemory> {
        match self.location {
            Location::Host(_) | Location::Tracked(_) => None,
            Location::Device(memory) => Some(memory),
        }
    }

    /// Views the elements of a slice of cudarc.
    pub(crate) fn tracked(dtype: DType, slice: &'a dyn Tracked) -> Self {
        Self { dtype, location: Location::Tracked(slice) }
    }

    /// Returns the slice of cudarc, while it has not been ordered on a stream.
    pub(crate) fn slice(&self) -> Option<&'a dyn Tracked> {
        match self.location {
            Location::Tracked(slice) => Some(slice),
            _ => None,
        }
    }

    /// Makes a stream wait for the work that writes the slice, which then lends its address. Work enqueued there until the result
    /// is dropped reads it.
    pub(crate) fn order<'s>(&mut self, stream: &'s CudaStream) -> Option<SyncOnDrop<'s>>
    where
        'a: 's,
    {
        let slice = self.slice()?;
        let (address, enqueued) = slice.read_on(stream);
        self.location =
            Location::Device(DeviceMemory { ordinal: ordinal(slice), address, bytes: slice.bytes() });
        Some(enqueued)
    }
}

impl<'a> ViewMut<'a> {
    /// Interprets raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a mut [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, location: LocationMut::Host(bytes) })
    }

    /// Views the elements of a slice.
    pub fn of<T: Element>(slice: &'a mut [T]) -> Self {
        Self { dtype: T::DTYPE, location: LocationMut::Host(bytemuck::cast_slice_mut(slice)) }
    }

    /// Views elements in the memory of a GPU.
    ///
    /// # Safety
    /// As [`View::on_device`], and nothing reads it either until then.
    #[allow(unsafe_code, reason = "the promise is the caller's; nothing unsafe is done here")]
    pub const unsafe fn on_device(dtype: DType, memory: DeviceMemory) -> Self {
        Self { dtype, location: LocationMut::Device(memory) }
    }

    /// Returns the same elements, to read.
    pub fn as_view(&self) -> View<'_> {
        let location = match &self.location {
            LocationMut::Host(bytes) => Location::Host(bytes),
            LocationMut::Device(memory) => Location::Device(*memory),
            LocationMut::Tracked(slice) => Location::Tracked(&**slice),
        };
        View { dtype: self.dtype, location }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        self.as_view().count()
    }

    /// Returns the number of bytes.
    pub fn byte_len(&self) -> usize {
        self.as_view().byte_len()
    }

    /// Returns the location of the elements.
    pub fn memory(&self) -> Memory {
        self.as_view().memory()
    }

    /// Returns the memory, as bytes in the machine's own order.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not host memory.
    pub fn host(&mut self) -> Result<&mut [u8]> {
        let memory = self.memory();
        match &mut self.location {
            LocationMut::Host(bytes) => Ok(bytes),
            LocationMut::Device(_) | LocationMut::Tracked(_) => Err(not_host(memory)),
        }
    }

    /// Returns the elements for writing.
    ///
    /// # Errors
    /// [`Error::Invalid`] when they are not of type `T`, or not in host memory.
    pub fn elements_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        check_type::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice_mut(self.host()?))
    }

    /// Returns the memory, if it is a GPU's; see [`View::device`].
    pub fn device(&self) -> Option<DeviceMemory> {
        self.as_view().device()
    }

    /// Views the elements of a slice of cudarc.
    pub(crate) fn tracked(dtype: DType, slice: &'a mut dyn TrackedMut) -> Self {
        Self { dtype, location: LocationMut::Tracked(slice) }
    }

    /// As [`View::order`], for the work that reads or writes the slice. Work enqueued until the result is dropped writes it.
    pub(crate) fn order<'s>(&mut self, stream: &'s CudaStream) -> Option<SyncOnDrop<'s>>
    where
        'a: 's,
    {
        let slice = self.as_view().slice()?;
        let memory = DeviceMemory { ordinal: ordinal(slice), address: 0, bytes: slice.bytes() };
        let LocationMut::Tracked(slice) = std::mem::replace(&mut self.location, LocationMut::Device(memory))
        else {
            return None;
        };
        let (address, enqueued) = slice.write_on(stream);
        self.location = LocationMut::Device(DeviceMemory { address, ..memory });
        Some(enqueued)
    }
}

/// Memory that a collective can read.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer of a collective",
    label = "this lends no elements",
    note = "slices, vectors and arrays of `f32 f64 f16 bf16 i8 u8 i32 u32 i64 u64` are buffers, and so are slices of cudarc",
    note = "for a type of your own, implement `Buffer` and `BufferMut`, as examples/own_tensor.rs of the repository does; a tensor of \
            candle lends its slice in an `InplaceOp1`, as docs/src/embedding.md shows"
)]
pub trait Buffer {
    /// Lends the elements.
    fn view(&self) -> View<'_>;
}

/// Memory that a collective can write.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer that a collective can write",
    label = "this lends no elements for writing",
    note = "slices, vectors and arrays of `f32 f64 f16 bf16 i8 u8 i32 u32 i64 u64` are buffers, and so are slices of cudarc",
    note = "for a type of your own, implement `Buffer` and `BufferMut`, as examples/own_tensor.rs of the repository does; a tensor of \
            candle lends its slice in an `InplaceOp1`, as docs/src/embedding.md shows"
)]
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
