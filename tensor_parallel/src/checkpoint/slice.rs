//! Copies a block of stored elements into a tensor, with type conversion.

use std::ops::Range;

use ryzanstein_process_group::DType;

use crate::error::Result;
use crate::float::{Float, with_float};
use crate::tensor::Tensor;

/// A matrix of stored elements: of a file, or of a tensor on the host.
#[derive(Clone, Copy)]
pub(crate) struct StoredMatrix<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) dtype: DType,
    pub(crate) columns: usize,
}

/// Copies `rows` × `columns` of `stored` to `target`, from its row `at` on. The ranges must be within both.
pub(crate) fn copy(
    stored: StoredMatrix<'_>,
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
    let copy =
        with_float!(stored.dtype, S => with_float!(target.dtype(), T => copy_rows::<S, T> as CopyRows))??;
    target.fill_rows(at, rows.len(), &|part, to| {
        copy(stored, rows.start + part.start..rows.start + part.end, columns, to);
    })
}

type CopyRows = fn(StoredMatrix<'_>, Range<usize>, &Range<usize>, &mut [u8]);

fn copy_rows<S: Float, T: Float>(
    stored: StoredMatrix<'_>,
    rows: Range<usize>,
    columns: &Range<usize>,
    to: &mut [u8],
) {
    let (width, size, to) = (columns.len(), size_of::<S>(), bytemuck::cast_slice_mut::<u8, T>(to));
    if width == stored.columns {
        // Whole rows are contiguous.
        convert::<S, T>(&stored.bytes[rows.start * width * size..rows.end * width * size], to);
        return;
    }
    for (row, to) in rows.zip(to.chunks_exact_mut(width)) {
        let from = (row * stored.columns + columns.start) * size;
        convert::<S, T>(&stored.bytes[from..from + width * size], to);
    }
}

fn convert<S: Float, T: Float>(from: &[u8], to: &mut [T]) {
    // The elements are little-endian, as this processor is, and those of a file may be at any address.
    if S::DTYPE == T::DTYPE {
        bytemuck::cast_slice_mut::<T, u8>(to).copy_from_slice(from);
        return;
    }
    for (to, from) in to.iter_mut().zip(from.chunks_exact(size_of::<S>())) {
        *to = T::narrow(bytemuck::pod_read_unaligned::<S>(from).widen());
    }
}
