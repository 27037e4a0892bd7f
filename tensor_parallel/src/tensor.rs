//! Dense, row-major arrays, in host memory or in that of a GPU.

use std::borrow::Cow;
use std::ops::Range;

use ryzanstein_process_group::{Buffer, BufferMut, DType, View, ViewMut};

use crate::error::{ConfigurationError, Error, Result};
use crate::float;
use crate::gpu::DeviceArray;
use crate::storage::{Storage, with_elements};

/// The size in bytes from which arrays are first reserved by a fallible allocation. A failure of an infallible one would abort
/// the program.
const LARGE: usize = 64 << 20;

/// A dense, row-major array that owns its elements.
///
/// The first dimension counts rows; the product of all others is the number of columns: a vector is one column. Collectives read
/// and write tensors in place, in either memory. The functions here create tensors in host memory; a [`Compute`](crate::Compute)
/// creates them in the memory in which it computes.
#[derive(Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Host(Storage),
    Device(DeviceArray),
}

impl Tensor {
    /// Creates an array of zeros in host memory.
    ///
    /// # Errors
    /// Returns an error if `dtype` is none of `f32`, `f16` and `bf16`, if the number of elements overflows, or if this host has no memory
    /// for them.
    pub fn zeros(shape: &[usize], dtype: DType) -> Result<Self> {
        Ok(Self::from_storage(shape, Storage::zeros(host_count(shape, dtype)?, dtype)?))
    }

    /// Creates an array in host memory from values in row-major order, rounded to `dtype`.
    ///
    /// # Errors
    /// Returns [`Error::Input`] if the number of values is not that of the shape, and [`Error::DType`] if `dtype` is none of
    /// `f32`, `f16` and `bf16`.
    pub fn new(shape: &[usize], values: Vec<f32>, dtype: DType) -> Result<Self> {
        if element_count(shape, dtype)? != values.len() {
            return Err(Error::input(format!("{} values do not fill the shape {shape:?}", values.len())));
        }
        Ok(Self::from_storage(shape, Storage::rounded(values, dtype)?))
    }

    /// Creates a tensor of elements in host memory. Their number is that of the shape.
    pub(crate) fn from_storage(shape: &[usize], storage: Storage) -> Self {
        Self { shape: shape.into(), memory: Memory::Host(storage) }
    }

    /// Creates a tensor of elements in the memory of a GPU. Their number is that of the shape.
    pub(crate) fn from_device(shape: &[usize], array: DeviceArray) -> Self {
        assert!(shape.iter().product::<usize>() == array.count(), "the array has the elements of the shape");
        Self { shape: shape.into(), memory: Memory::Device(array) }
    }

    /// Returns the elements, if they are in host memory.
    pub(crate) fn host(&self) -> Result<&Storage> {
        match &self.memory {
            Memory::Host(storage) => Ok(storage),
            Memory::Device(array) => Err(elsewhere(&self.shape, array)),
        }
    }

    /// Returns the elements for writing, if they are in host memory.
    pub(crate) fn host_mut(&mut self) -> Result<&mut Storage> {
        match &mut self.memory {
            Memory::Host(storage) => Ok(storage),
            Memory::Device(array) => Err(elsewhere(&self.shape, array)),
        }
    }

    /// Returns the elements for writing, if they are in the memory of a GPU.
    pub(crate) fn device_mut(&mut self) -> Option<&mut DeviceArray> {
        match &mut self.memory {
            Memory::Host(_) => None,
            Memory::Device(array) => Some(array),
        }
    }

    /// Returns the elements, if they are in the memory of a GPU.
    pub(crate) fn device(&self) -> Option<&DeviceArray> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(array) => Some(array),
        }
    }

    /// Returns the length of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        match &self.memory {
            Memory::Host(storage) => storage.dtype(),
            Memory::Device(array) => array.dtype(),
        }
    }

    /// Returns the number of elements.
    pub fn count(&self) -> usize {
        match &self.memory {
            Memory::Host(storage) => with_elements!(storage, x => x.len()),
            Memory::Device(array) => array.count(),
        }
    }

    /// Returns the bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype().size()
    }

    /// Returns the length of the first dimension.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Returns the product of all other dimensions.
    pub fn columns(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// Returns all values. Borrows `f32` values in host memory. For a tensor on a GPU, waits for the computation and copies the
    /// values.
    ///
    /// # Errors
    /// Returns an error if a GPU fails.
    pub fn values(&self) -> Result<Cow<'_, [f32]>> {
        match &self.memory {
            Memory::Host(storage) => Ok(storage.widened()),
            Memory::Device(array) => Ok(Cow::Owned(array.download()?)),
        }
    }

    /// Returns the [`values`](Self::values) of a tensor in host memory.
    pub(crate) fn host_values(&self) -> Result<Cow<'_, [f32]>> {
        self.host()?;
        self.values()
    }

    /// Returns the same elements with another shape.
    ///
    /// # Errors
    /// Returns [`Error::Input`] if the shape has another number of elements.
    pub fn reshape(mut self, shape: &[usize]) -> Result<Self> {
        if element_count(shape, self.dtype()).ok() != Some(self.count()) {
            return Err(Error::input(format!("a tensor of shape {:?} cannot become {shape:?}", self.shape)));
        }
        self.shape = shape.into();
        Ok(self)
    }

    /// Writes `rows` rows from row `at` on. `fill` sets several at a time, possibly on several threads: it receives their
    /// indices, relative to the first of these rows, and their bytes.
    ///
    /// # Panics
    /// Panics if the tensor does not have these rows.
    pub(crate) fn fill_rows(
        &mut self,
        at: usize,
        rows: usize,
        fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
    ) -> Result<()> {
        let columns = self.columns();
        assert!(rows <= self.rows() && at <= self.rows() - rows, "the rows are within the tensor");
        match &mut self.memory {
            Memory::Host(storage) => with_elements!(storage, x => {
                fill(0..rows, bytemuck::cast_slice_mut(&mut x[at * columns..(at + rows) * columns]));
            }),
            Memory::Device(array) => {
                let width = columns * array.dtype().size();
                array.upload(at * width, rows, width, fill)?;
            }
        }
        Ok(())
    }

    /// Copies elements to others of the same tensor, from `to` on. In the memory of a GPU, the two must not overlap.
    ///
    /// # Panics
    /// Panics if they are not within the tensor.
    pub(crate) fn copy_within(&mut self, from: Range<usize>, to: usize) -> Result<()> {
        match &mut self.memory {
            Memory::Host(storage) => with_elements!(storage, x => x.copy_within(from, to)),
            Memory::Device(array) => array.copy_within(from, to)?,
        }
        Ok(())
    }

    /// Copies rows, in this order.
    ///
    /// # Panics
    /// Panics if the tensor does not have them.
    pub(crate) fn select_rows(&self, rows: &[usize]) -> Result<Self> {
        let columns = self.columns();
        let shape = [rows.len(), columns];
        let ranges = rows.iter().map(|row| row * columns..(row + 1) * columns);
        let count = rows.len() * columns;
        match &self.memory {
            Memory::Host(storage) => Ok(Self::from_storage(&shape, storage.copied(ranges, count))),
            Memory::Device(array) => Ok(Self::from_device(&shape, array.copied(ranges, count)?)),
        }
    }

    /// Borrows rows as a buffer of a collective. The range must be within the tensor.
    pub(crate) fn rows_mut(&mut self, rows: Range<usize>) -> Rows<'_> {
        let columns = self.columns();
        Rows { range: rows.start * columns..rows.end * columns, tensor: self }
    }
}

/// Returns the number of elements of a shape.
///
/// Every tensor is created with a shape that passes this check. So products of some of its dimensions, and its bytes, never
/// overflow: GPU kernels receive those numbers.
///
/// # Errors
/// Returns an error if `dtype` is not a type of tensors, or if the bytes of the elements overflow.
pub(crate) fn element_count(shape: &[usize], dtype: DType) -> Result<usize> {
    float::check(dtype)?;
    // A dimension of zero must not hide an overflow of the others.
    let most = shape.iter().try_fold(dtype.size(), |bytes, n| bytes.checked_mul((*n).max(1)));
    if most.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Error::input(format!(
            "an array of shape {shape:?} in {dtype} has more bytes than can be addressed"
        )));
    }
    Ok(shape.iter().product())
}

/// Returns the number of elements of an array to allocate in host memory.
///
/// # Errors
/// Returns the errors of [`element_count`], and [`ConfigurationError::NoMemory`] if this host has no memory for so large an array.
pub(crate) fn host_count(shape: &[usize], dtype: DType) -> Result<usize> {
    let count = element_count(shape, dtype)?;
    let bytes = count * dtype.size();
    // Small arrays are not checked.
    if bytes >= LARGE && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        return Err(ConfigurationError::NoMemory { shape: shape.into(), dtype }.into());
    }
    Ok(count)
}

fn elsewhere(shape: &[usize], array: &DeviceArray) -> Error {
    Error::input(format!(
        "a tensor of shape {shape:?} is in the memory of GPU {} and this is computed in host memory; compute it where \
         the tensor is, or copy its values",
        array.ordinal()
    ))
}

impl Buffer for Tensor {
    fn view(&self) -> View<'_> {
        match &self.memory {
            Memory::Host(storage) => with_elements!(storage, x => View::of(x)),
            Memory::Device(array) => array.view(0..array.count()),
        }
    }
}

impl BufferMut for Tensor {
    fn view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.memory {
            Memory::Host(storage) => with_elements!(storage, x => ViewMut::of(x)),
            Memory::Device(array) => array.view_mut(0..array.count()),
        }
    }
}

/// Consecutive rows of a tensor, as a buffer.
pub(crate) struct Rows<'a> {
    tensor: &'a mut Tensor,
    range: Range<usize>,
}

impl Buffer for Rows<'_> {
    fn view(&self) -> View<'_> {
        match &self.tensor.memory {
            Memory::Host(storage) => with_elements!(storage, x => View::of(&x[self.range.clone()])),
            Memory::Device(array) => array.view(self.range.clone()),
        }
    }
}

impl BufferMut for Rows<'_> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.tensor.memory {
            Memory::Host(storage) => with_elements!(storage, x => ViewMut::of(&mut x[self.range.clone()])),
            Memory::Device(array) => array.view_mut(self.range.clone()),
        }
    }
}

impl Error {
    /// Creates the error for two tensors whose shapes do not fit an operation.
    pub(crate) fn shape_mismatch(operation: &str, a: &Tensor, b: &Tensor) -> Self {
        let describe = |t: &Tensor| format!("{:?} of {}", t.shape(), t.dtype());
        Self::Input(format!("{operation}: {} and {} do not fit", describe(a), describe(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Compute as _;

    #[test]
    fn shape_and_values_must_agree() {
        assert!(Tensor::new(&[2, 3], vec![0.0; 5], DType::F32).is_err());
        let tensor = Tensor::new(&[2, 3], (0..6u8).map(f32::from).collect(), DType::BF16).unwrap();
        assert_eq!((tensor.rows(), tensor.columns(), tensor.bytes()), (2, 3, 12));
        assert_eq!(tensor.values().unwrap()[5], 5.0);
        assert!(tensor.reshape(&[4]).is_err());
    }

    #[test]
    fn shapes_whose_products_overflow_are_refused_even_where_one_dimension_is_zero() {
        for shape in [&[1 << 63, 2][..], &[usize::MAX, usize::MAX], &[0, 1 << 40, 1 << 40], &[1 << 61, 0, 4]]
        {
            assert!(Tensor::zeros(shape, DType::F16).is_err(), "{shape:?}");
            let empty = Tensor::zeros(&[0], DType::F16).unwrap();
            assert!(empty.reshape(shape).is_err(), "{shape:?}");
        }
    }

    #[test]
    #[should_panic(expected = "the rows are within the tensor")]
    fn rows_beyond_a_tensor_are_not_written_even_where_their_end_overflows() {
        let mut tensor = Tensor::zeros(&[2, 3], DType::F32).unwrap();
        let _ = tensor.fill_rows(usize::MAX, 2, &|_, _| {});
    }

    #[test]
    fn other_element_types_are_refused() {
        let refused = Tensor::zeros(&[2], DType::I64).unwrap_err();
        assert!(matches!(refused, Error::DType(_)) && refused.is_permanent(), "{refused}");
        assert!(Tensor::new(&[1], vec![1.0], DType::F64).is_err());
    }

    #[test]
    fn an_array_larger_than_the_memory_is_refused() {
        let compute = crate::Host::new(1);
        let column = |rows| Tensor::zeros(&[rows, 1], DType::BF16).unwrap();
        let product = compute.linear(&column(1 << 20), &column(1 << 26), None, DType::F32);
        for refused in [Tensor::zeros(&[1 << 60], DType::F32), Tensor::zeros(&[1 << 46], DType::F32), product]
        {
            let refused = refused.unwrap_err();
            assert!(
                matches!(refused, Error::Configuration(ConfigurationError::NoMemory { .. })),
                "{refused}"
            );
        }
    }
}
