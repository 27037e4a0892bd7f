//! The threads and instructions with which a rank computes on its CPU, and arrays that they fill row by row.

use std::ops::Range;

use pulp::Arch;
use ryzanstein_config::InstructionSet;
use ryzanstein_process_group::{DType, Element as _};

use super::product::Products;
use super::rows;
use crate::error::Result;
use crate::float::{Float, with_float};
use crate::memory::{self, Array};
use crate::storage::{Storage, with_elements};
use crate::tensor::{Tensor, element_count};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// Number of parts per thread, for balance between the threads.
const PARTS: usize = 4;

/// The threads of a rank, and their instruction set.
#[derive(Debug)]
pub(super) struct Processor {
    threads: Threads,
    products: Products,
}

impl Processor {
    /// Creates at most `threads` threads: a pool of its own, or the caller's thread if there is only one.
    pub(super) fn new(threads: usize, set: InstructionSet) -> Self {
        Self { threads: Threads::new(threads, "compute"), products: Products::new(set) }
    }

    pub(super) fn threads(&self) -> &Threads {
        &self.threads
    }

    pub(super) fn arch(&self) -> Arch {
        self.products.arch()
    }

    pub(super) fn instruction_set(&self) -> InstructionSet {
        self.products.set()
    }

    /// Builds a tensor row by row: `fill` receives the index of a row and its `columns` elements, and sets all of them.
    pub(super) fn build(
        &self,
        [rows, columns]: [usize; 2],
        dtype: DType,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Tensor> {
        let shape = [rows, columns];
        element_count(&shape, dtype)?;
        let values = with_float!(dtype, T => Storage::from(self.built::<T>(shape, fill)))?;
        Ok(Tensor::from_storage(&shape, values))
    }

    /// Builds the elements of [`build`](Self::build).
    pub(super) fn built<T: Float>(
        &self,
        [rows, columns]: [usize; 2],
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Array<T> {
        memory::built(rows * columns, |all| {
            let together = self.rows_together(rows);
            let parts = all.chunks((together * columns).max(1)).enumerate();
            self.threads.for_each(rows * columns >= PARALLEL_THRESHOLD, parts, |(part, out)| {
                let is_wide = T::DTYPE == f32::DTYPE;
                let mut wide = vec![0.0; if is_wide { 0 } else { columns }];
                for (i, row) in out.chunks(columns).enumerate() {
                    let (at, row) = (part * together + i, row.zeros());
                    if is_wide {
                        fill(at, bytemuck::cast_slice_mut(row));
                    } else {
                        fill(at, &mut wide);
                        rows::narrow(self.arch(), &wide, row);
                    }
                }
            });
        })
    }

    /// Adds `y` to `x`, in rows of `columns`. If `y` has fewer rows, it is repeated.
    pub(super) fn add_rows<T: Float, U: Float>(&self, x: &mut [T], y: &[U], columns: usize) {
        let is_worth_it = x.len() >= PARALLEL_THRESHOLD;
        let together = self.rows_together(x.len() / columns) * columns;
        self.threads.for_each(is_worth_it, x.chunks_mut(together).enumerate(), |(part, x)| {
            for (i, row) in x.chunks_exact_mut(columns).enumerate() {
                let at = (part * together + i * columns) % y.len();
                rows::add(self.arch(), row, &y[at..at + columns]);
            }
        });
    }

    /// Returns the number of rows in a part.
    fn rows_together(&self, rows: usize) -> usize {
        rows.div_ceil(PARTS * self.threads.count()).max(1)
    }

    /// Computes the product of two matrices, see [`Products::multiply`].
    pub(super) fn multiply<T: Float>(
        &self,
        operands: (&[&Storage], &Storage),
        bias: Option<&[f32]>,
        sizes: [usize; 3],
    ) -> Array<T> {
        self.products.multiply(&self.threads, operands, bias, sizes)
    }

    /// Converts elements to their exact values in `f32`.
    pub(super) fn widen(&self, stored: &Storage, range: Range<usize>, to: &mut [f32]) {
        with_elements!(stored, stored => rows::widen(self.arch(), &stored[range], to));
    }
}
