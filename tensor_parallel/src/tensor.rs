//! A dense, row-major array in host memory.

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};
use ryzanstein_process_group::{Buffer, BufferMut, View, ViewMut};

use crate::dtype::{Dtype, Float};
use crate::error::{Error, Result};

/// A dense, row-major array that owns its elements.
///
/// The first dimension counts rows, all others together are the columns: a vector is one column.
/// Collectives read and write tensors directly.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    pub(crate) storage: Storage,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Storage {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Runs `$body` with `$x` bound to the vector of elements, whatever their type.
macro_rules! with_elements {
    ($storage:expr, $x:ident => $body:expr) => {
        match $storage {
            $crate::tensor::Storage::F32($x) => $body,
            $crate::tensor::Storage::F16($x) => $body,
            $crate::tensor::Storage::Bf16($x) => $body,
        }
    };
}
pub(crate) use with_elements;

impl Storage {
    fn zeros(count: usize, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(vec![0.0; count]),
            Dtype::F16 => Self::F16(vec![f16::ZERO; count]),
            Dtype::Bf16 => Self::Bf16(vec![bf16::ZERO; count]),
        }
    }

    fn narrow(values: Vec<f32>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(values),
            Dtype::F16 => Self::F16(values.into_iter().map(Float::narrow).collect()),
            Dtype::Bf16 => Self::Bf16(values.into_iter().map(Float::narrow).collect()),
        }
    }
}

impl Tensor {
    /// An array of zeros.
    pub fn zeros(shape: &[usize], dtype: Dtype) -> Self {
        Self { shape: shape.into(), storage: Storage::zeros(shape.iter().product(), dtype) }
    }

    /// Values in row-major order, rounded to `dtype`.
    ///
    /// # Errors
    /// [`Error::Input`] when the number of values is not that of the shape.
    pub fn new(shape: &[usize], values: Vec<f32>, dtype: Dtype) -> Result<Self> {
        let count = shape.iter().try_fold(1usize, |a, b| a.checked_mul(*b));
        if count != Some(values.len()) {
            return Err(Error::input(format!("{} values do not fill the shape {shape:?}", values.len())));
        }
        Ok(Self { shape: shape.into(), storage: Storage::narrow(values, dtype) })
    }

    /// Length of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        match &self.storage {
            Storage::F32(_) => Dtype::F32,
            Storage::F16(_) => Dtype::F16,
            Storage::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        with_elements!(&self.storage, x => x.len())
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype().size()
    }

    /// Length of the first dimension.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Product of all other dimensions.
    pub fn columns(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// All values, copied only if they are not `f32`.
    pub fn values(&self) -> Cow<'_, [f32]> {
        fn widen<T: Float>(from: &[T]) -> Vec<f32> {
            let mut to = vec![0.0; from.len()];
            T::widen_into(from, &mut to);
            to
        }
        match &self.storage {
            Storage::F32(x) => Cow::Borrowed(x),
            Storage::F16(x) => Cow::Owned(widen(x)),
            Storage::Bf16(x) => Cow::Owned(widen(x)),
        }
    }

    /// The same values rounded to another type. Nothing is copied if it is the same.
    #[must_use]
    pub fn cast(self, dtype: Dtype) -> Self {
        if self.dtype() == dtype {
            return self;
        }
        let values = match self.storage {
            Storage::F32(x) => x,
            ref half => with_elements!(half, x => x.iter().map(|v| v.widen()).collect()),
        };
        Self { shape: self.shape, storage: Storage::narrow(values, dtype) }
    }

    /// The same elements under another shape of as many.
    ///
    /// # Errors
    /// [`Error::Input`] when it has another number of elements.
    pub fn reshape(mut self, shape: &[usize]) -> Result<Self> {
        if shape.iter().product::<usize>() != self.count() {
            return Err(Error::input(format!("a tensor of shape {:?} cannot become {shape:?}", self.shape)));
        }
        self.shape = shape.into();
        Ok(self)
    }

    /// Some rows, lent to a collective. The range must be within the tensor.
    pub(crate) fn rows_mut(&mut self, rows: Range<usize>) -> Rows<'_> {
        let columns = self.columns();
        Rows { range: rows.start * columns..rows.end * columns, tensor: self }
    }
}

impl Buffer for Tensor {
    fn view(&self) -> View<'_> {
        with_elements!(&self.storage, x => View::of(x))
    }
}

impl BufferMut for Tensor {
    fn view_mut(&mut self) -> ViewMut<'_> {
        with_elements!(&mut self.storage, x => ViewMut::of(x))
    }
}

/// A run of a tensor's elements as a buffer of its own.
pub(crate) struct Rows<'a> {
    tensor: &'a mut Tensor,
    range: Range<usize>,
}

impl Buffer for Rows<'_> {
    fn view(&self) -> View<'_> {
        with_elements!(&self.tensor.storage, x => View::of(&x[self.range.clone()]))
    }
}

impl BufferMut for Rows<'_> {
    fn view_mut(&mut self) -> ViewMut<'_> {
        with_elements!(&mut self.tensor.storage, x => ViewMut::of(&mut x[self.range.clone()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_and_values_must_agree() {
        assert!(Tensor::new(&[2, 3], vec![0.0; 5], Dtype::F32).is_err());
        let tensor = Tensor::new(&[2, 3], (0..6u8).map(f32::from).collect(), Dtype::Bf16).unwrap();
        assert_eq!((tensor.rows(), tensor.columns(), tensor.bytes()), (2, 3, 12));
        assert_eq!(tensor.values()[5], 5.0);
        assert_eq!(tensor.clone().cast(Dtype::F32).values(), tensor.values());
        assert!(tensor.reshape(&[4]).is_err());
    }
}
