//! Copies a block of stored elements into a tensor, converting on the way.

use std::ops::Range;

use half::{bf16, f16};

use crate::dtype::{Dtype, Float};
use crate::error::Result;
use crate::tensor::Tensor;

/// A matrix as it lies in a file.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) dtype: Dtype,
    pub(crate) columns: usize,
}

/// Copies `rows` × `columns` of `stored` to `target`, from its row `at` on. Ranges must be within both.
pub(crate) fn copy(
    stored: Stored<'_>,
    rows: Range<usize>,
    columns: &Range<usize>,
    target: &mut Tensor,
    at: usize,
) -> Result<()> {
    let width = columns.len();
    debug_assert_eq!(width, target.columns());
    if width == 0 {
        return Ok(());
    }
    let dtype = target.dtype();
    target.fill_rows(at, rows.len(), &|part, to| {
        let rows = rows.start + part.start..rows.start + part.end;
        match dtype {
            Dtype::F32 => copy_rows::<f32>(stored, rows, columns, bytemuck::cast_slice_mut(to)),
            Dtype::F16 => copy_rows::<f16>(stored, rows, columns, bytemuck::cast_slice_mut(to)),
            Dtype::Bf16 => copy_rows::<bf16>(stored, rows, columns, bytemuck::cast_slice_mut(to)),
        }
    })
}

fn copy_rows<T: Float>(stored: Stored<'_>, rows: Range<usize>, columns: &Range<usize>, to: &mut [T]) {
    let (width, size) = (columns.len(), stored.dtype.size());
    if width == stored.columns {
        // Whole rows are one run.
        let from = &stored.bytes[rows.start * width * size..rows.end * width * size];
        convert(from, stored.dtype, to);
        return;
    }
    for (row, to) in rows.zip(to.chunks_exact_mut(width)) {
        let from = (row * stored.columns + columns.start) * size;
        convert(&stored.bytes[from..from + width * size], stored.dtype, to);
    }
}

fn convert<T: Float>(from: &[u8], dtype: Dtype, to: &mut [T]) {
    match dtype {
        Dtype::F32 => convert_from::<f32, T>(from, to),
        Dtype::F16 => convert_from::<f16, T>(from, to),
        Dtype::Bf16 => convert_from::<bf16, T>(from, to),
    }
}

fn convert_from<S: Float, T: Float>(from: &[u8], to: &mut [T]) {
    if cfg!(target_endian = "little") && S::DTYPE == T::DTYPE {
        bytemuck::cast_slice_mut::<T, u8>(to).copy_from_slice(from);
        return;
    }
    for (to, from) in to.iter_mut().zip(from.chunks_exact(size_of::<S>())) {
        *to = T::narrow(S::read(from).widen());
    }
}
