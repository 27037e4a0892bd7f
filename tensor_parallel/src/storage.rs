//! Elements in host memory, of any type.

use std::borrow::Cow;
use std::ops::Range;

use half::{bf16, f16};
use ryzanstein_process_group::DType;

use crate::float::{Float, UnsupportedDType, with_float};
use crate::memory::{self, Array};

/// Elements in host memory.
#[derive(Debug)]
pub(crate) enum Storage {
    F32(Array<f32>),
    F16(Array<f16>),
    BF16(Array<bf16>),
}

/// Runs `$body` with `$x` bound to the array of elements, whatever their type.
macro_rules! with_elements {
    ($storage:expr, $x:ident => $body:expr) => {
        match $storage {
            $crate::storage::Storage::F32($x) => $body,
            $crate::storage::Storage::F16($x) => $body,
            $crate::storage::Storage::BF16($x) => $body,
        }
    };
}
pub(crate) use with_elements;

impl Storage {
    pub(crate) fn zeros(count: usize, dtype: DType) -> Result<Self, UnsupportedDType> {
        with_float!(dtype, T => memory::zeros::<T>(count).into())
    }

    /// Rounds each value to `dtype`.
    pub(crate) fn rounded(values: Vec<f32>, dtype: DType) -> Result<Self, UnsupportedDType> {
        fn narrow<T: Float>(from: &[f32]) -> Array<T> {
            let mut to = memory::zeros(from.len());
            T::narrow_into(from, &mut to);
            to
        }
        match dtype {
            DType::F32 => Ok(Self::F32(values.into())),
            DType::F16 => Ok(Self::F16(narrow(&values))),
            DType::BF16 => Ok(Self::BF16(narrow(&values))),
            other => Err(UnsupportedDType(other)),
        }
    }

    /// Returns the exact values in `f32`; borrowed if they are `f32`.
    pub(crate) fn widened(&self) -> Cow<'_, [f32]> {
        fn widen<T: Float>(from: &[T]) -> Vec<f32> {
            let mut to = vec![0.0; from.len()];
            T::widen_into(from, &mut to);
            to
        }
        match self {
            Self::F32(x) => Cow::Borrowed(x),
            Self::F16(x) => Cow::Owned(widen(x)),
            Self::BF16(x) => Cow::Owned(widen(x)),
        }
    }

    /// Copies elements, `count` in total, to a new storage.
    pub(crate) fn copied(&self, ranges: impl Iterator<Item = Range<usize>>, count: usize) -> Self {
        with_elements!(self, x => {
            let mut to = memory::zeros(count);
            let mut left = &mut to[..];
            for range in ranges {
                let (these, others) = left.split_at_mut(range.len());
                these.copy_from_slice(&x[range]);
                left = others;
            }
            to.into()
        })
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }
}

macro_rules! from_array {
    ($($T:ty => $variant:ident),*) => {
        $(impl From<Array<$T>> for Storage {
            fn from(values: Array<$T>) -> Self {
                Self::$variant(values)
            }
        })*
    };
}
from_array!(f32 => F32, f16 => F16, bf16 => BF16);
