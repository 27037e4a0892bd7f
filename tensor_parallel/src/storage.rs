//! Elements in host memory, of any type.

use half::{bf16, f16};

use crate::dtype::{Dtype, Float};
use crate::memory;

/// Elements in host memory.
#[derive(Debug)]
pub(crate) enum Storage {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Runs `$body` with `$x` bound to the vector of elements, whatever their type.
macro_rules! with_elements {
    ($storage:expr, $x:ident => $body:expr) => {
        match $storage {
            $crate::storage::Storage::F32($x) => $body,
            $crate::storage::Storage::F16($x) => $body,
            $crate::storage::Storage::Bf16($x) => $body,
        }
    };
}
pub(crate) use with_elements;

impl Storage {
    pub(crate) fn zeros(count: usize, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(memory::zeros(count)),
            Dtype::F16 => Self::F16(memory::zeros(count)),
            Dtype::Bf16 => Self::Bf16(memory::zeros(count)),
        }
    }

    pub(crate) fn narrow(values: Vec<f32>, dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(values),
            Dtype::F16 => Self::F16(values.into_iter().map(Float::narrow).collect()),
            Dtype::Bf16 => Self::Bf16(values.into_iter().map(Float::narrow).collect()),
        }
    }
}
