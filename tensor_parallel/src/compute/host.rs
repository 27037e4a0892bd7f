//! Arithmetic on the CPU.

use std::ops::Range;

use ryzanstein_config::{InstructionSet, Numerics};
use ryzanstein_process_group::{DType, Element as _};

use super::batch::{Batch, SlotMapping};
use super::operations::{AttentionCall, Compute, LayerCache};
use super::product::{Products, instruction_set};
use super::{attend, rows, shapes, tree};
use crate::error::{ConfigurationError, Result};
use crate::float::{self, Float, with_float};
use crate::memory::{self, Array};
use crate::rotary::Rotary;
use crate::storage::{Storage, with_elements};
use crate::tensor::{Tensor, element_count, host_count};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// Number of parts per thread, for balance between the threads.
const PARTS: usize = 4;

/// Arithmetic on the CPU.
#[derive(Debug)]
pub struct Host {
    pub(super) threads: Threads,
    pub(super) products: Products,
    numerics: Numerics,
}

impl Host {
    /// Creates the arithmetic on at most `threads` threads: a pool of its own, or the caller's thread if there is only one.
    pub fn new(threads: usize) -> Self {
        Self::with_numerics(threads, instruction_set::current(), Numerics::Fast)
    }

    /// Creates the arithmetic as [`new`](Self::new) does, with an instruction set that this processor must have.
    ///
    /// # Panics
    /// Panics if this processor lacks the instruction set: [`instruction_set::supported`] lists those that it has.
    pub fn with_numerics(threads: usize, set: InstructionSet, numerics: Numerics) -> Self {
        assert!(instruction_set::is_supported(set), "this processor lacks {set}");
        Self { threads: Threads::new(threads, "compute"), products: Products::new(set), numerics }
    }

    /// Builds a tensor row by row: `fill` receives the index of a row and its `columns` elements, and sets all of them.
    pub(super) fn build(
        &self,
        [rows, columns]: [usize; 2],
        dtype: DType,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Tensor> {
        let shape = [rows, columns];
        host_count(&shape, dtype)?;
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
                        rows::narrow(self.products.arch(), &wide, row);
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
                rows::add(self.products.arch(), row, &y[at..at + columns]);
            }
        });
    }

    /// Returns the number of rows in a part.
    fn rows_together(&self, rows: usize) -> usize {
        rows.div_ceil(PARTS * self.threads.count()).max(1)
    }

    /// Converts elements to their exact values in `f32`.
    pub(super) fn widen(&self, stored: &Storage, range: Range<usize>, to: &mut [f32]) {
        with_elements!(stored, stored => rows::widen(self.products.arch(), &stored[range], to));
    }
}

impl Compute for Host {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        float::check(dtype)?;
        if element_count(shape, dtype).is_err() {
            return Err(ConfigurationError::NoMemory { shape: shape.into(), dtype }.into());
        }
        Tensor::zeros(shape, dtype)
    }

    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        Batch::on_host(tokens, slots, rotary)
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        let [m, k, n] = shapes::linear(x, weight, bias)?;
        host_count(&[m, n], out)?;
        let bias = bias.map(Tensor::host_values).transpose()?;
        let (x, weight, bias) = ([x.host()?], weight.host()?, bias.as_deref());
        let values = with_float!(out, T => {
            Storage::from(self.products.multiply::<T>(&self.threads, (&x, weight), bias, [m, k, n]))
        })?;
        Ok(Tensor::from_storage(&[m, n], values))
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn linear_of_leaves(&self, x: &Tensor, weight: &Tensor, leaves: usize, out: DType) -> Result<Tensor> {
        if self.numerics != Numerics::Invariant {
            return Err(ConfigurationError::FastOnly.into());
        }
        let [m, k, n] = shapes::linear_of_leaves(x, weight, leaves)?;
        host_count(&[m, n], out)?;
        let parts = (0..leaves).map(|leaf| self.select_columns(x, leaf * k..(leaf + 1) * k));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let parts = parts.iter().map(Tensor::host).collect::<Result<Vec<_>>>()?;
        let weight = weight.host()?;
        let sums = with_float!(out, T => {
            Storage::from(self.products.multiply::<T>(&self.threads, (&parts, weight), None, [m, k, n]))
        })?;
        Ok(Tensor::from_storage(&[m, n], sums))
    }

    fn sum_of_leaves(&self, terms: &Tensor, out: DType) -> Result<Tensor> {
        let [count, rows, columns] = shapes::sum_of_leaves(terms)?;
        let stored = terms.host()?;
        self.build([rows, columns], out, |row, to| {
            let mut sums = vec![0.0; tree::places(count) * columns];
            for leaf in 0..count {
                let at = (leaf * rows + row) * columns;
                self.widen(
                    stored,
                    at..at + columns,
                    &mut sums[tree::place(leaf, count) * columns..][..columns],
                );
                tree::add(self.products.arch(), &mut sums, columns, leaf, count);
            }
            to.copy_from_slice(&sums[..columns]);
        })
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (rows, columns) = (table.rows(), table.columns());
        let (ids, stored) = (batch.tokens(), table.host()?);
        self.build([ids.len(), columns], out, |i, to| {
            match (ids[i] as usize).checked_sub(first).filter(|row| *row < rows) {
                Some(row) => self.widen(stored, row * columns..(row + 1) * columns, to),
                None => to.fill(0.0),
            }
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        shapes::rms_norm(x, weight)?;
        let columns = x.columns();
        let (stored, weight) = (x.host()?, weight.host_values()?);
        self.build([x.rows(), columns], x.dtype(), |i, to| {
            with_elements!(stored, x => {
                rows::rms_norm(self.products.arch(), &x[i * columns..(i + 1) * columns], &weight, epsilon, to);
            });
        })
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        shapes::add(x, y)?;
        let (columns, count, y) = (x.columns(), y.count(), y.host()?);
        if count > 0 {
            with_elements!(x.host_mut()?, x => with_elements!(y, y => self.add_rows(x, y, columns)));
        }
        Ok(())
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let width = shapes::swiglu(x)?;
        let stored = x.host()?;
        self.build([x.rows(), width], x.dtype(), |i, to| {
            with_elements!(stored, stored => {
                let (gate, up) = stored[2 * i * width..2 * (i + 1) * width].split_at(width);
                rows::swiglu(self.products.arch(), gate, up, to);
            });
        })
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        attend::attention(self, &qkv, call, cache)
    }

    fn select_columns(&self, blocks: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        let [rows, width] = shapes::select_columns(blocks, &columns)?;
        let stored = blocks.host()?;
        self.build([rows, columns.len()], blocks.dtype(), |i, mut to| {
            let mut at = columns.start;
            while at < columns.end {
                let (block, column) = (at / width, at % width);
                let (these, others) = to.split_at_mut((width - column).min(columns.end - at));
                let from = (block * rows + i) * width + column;
                self.widen(stored, from..from + these.len(), these);
                at += these.len();
                to = others;
            }
        })
    }
}
