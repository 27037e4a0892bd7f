//! What collectives read and write: typed, contiguous memory.
//!
//! A [`Buffer`] lends a [`View`]: element type and bytes. Slices and vectors of every [`Element`] are buffers;
//! other containers implement the two traits by lending the view of their storage.

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

/// A read-only, correctly aligned run of elements in host memory.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// A writable, correctly aligned run of elements in host memory.
#[derive(Debug)]
pub struct ViewMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
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

impl<'a> View<'a> {
    /// Takes raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// The elements of a slice.
    pub fn of<T: Element>(slice: &'a [T]) -> Self {
        Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice(slice) }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// The memory, as bytes in the machine's own order.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> ViewMut<'a> {
    /// Takes raw bytes as elements of `dtype`. Errors when length or alignment do not fit.
    pub fn from_bytes(dtype: DType, bytes: &'a mut [u8]) -> Result<Self> {
        check(dtype, bytes.as_ptr().addr(), bytes.len())?;
        Ok(Self { dtype, bytes })
    }

    /// The elements of a slice.
    pub fn of<T: Element>(slice: &'a mut [T]) -> Self {
        Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice_mut(slice) }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// The memory, as bytes in the machine's own order.
    pub fn bytes(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The memory, read only.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes
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
