//! Arithmetic on the processor.

use std::borrow::Cow;
use std::ops::Range;

use pulp::Arch;
use ryzanstein_config::InstructionSet;
use ryzanstein_process_group::{DType, Element as _};

use super::batch::{Batch, SlotMapping};
use super::exponential::exp;
use super::operations::{AttentionCall, Compute, LayerCache};
use super::product::{Products, instruction_set};
use super::{attend, shapes};
use crate::error::{ConfigurationError, Result};
use crate::float::{self, Float, with_float};
use crate::rotary::Rotary;
use crate::storage::{Storage, with_elements};
use crate::tensor::{Tensor, element_count};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// Larger arrays are first reserved by an allocation that may fail. One that must not fail would end the program.
const LARGE: usize = 64 << 20;

/// Parts for each thread, so that all end at about the same time.
const PARTS: usize = 4;

/// Arithmetic on the processor.
#[derive(Debug)]
pub struct Host {
    threads: Threads,
    products: Products,
}

impl Host {
    /// Computes on at most `threads` threads: a pool of its own, or the caller's thread for one.
    pub fn new(threads: usize) -> Self {
        Self::with_instruction_set(threads, instruction_set::current())
    }

    /// As [`new`](Self::new), with an instruction set, which this processor must have.
    ///
    /// # Panics
    /// When this processor lacks it: [`instruction_set::supported`] lists those that it has.
    pub fn with_instruction_set(threads: usize, set: InstructionSet) -> Self {
        assert!(instruction_set::is_supported(set), "this processor lacks {set}");
        Self { threads: Threads::new(threads, "compute"), products: Products::new(set) }
    }
}

impl Host {
    pub(super) fn threads(&self) -> &Threads {
        &self.threads
    }

    pub(super) fn arch(&self) -> Arch {
        self.products.arch()
    }

    pub(super) fn instruction_set(&self) -> InstructionSet {
        self.products.set()
    }

    /// Builds a tensor row by row: `fill` gets the row's number and `columns` zeros to set.
    pub(super) fn build(
        &self,
        [rows, columns]: [usize; 2],
        dtype: DType,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Result<Tensor> {
        let shape = [rows, columns];
        let mut out = Storage::zeros(element_count(&shape, dtype)?, dtype)?;
        if columns > 0 {
            with_elements!(&mut out, out => self.each_row(&mut out[..], columns, fill));
        }
        Ok(Tensor::from_storage(&shape, out))
    }

    /// Changes each row of an array, on the threads if it is large.
    pub(super) fn each_row<T: Float>(
        &self,
        out: &mut [T],
        columns: usize,
        change: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let arch = self.arch();
        let row = |(i, out): (usize, &mut [T])| {
            if T::DTYPE == f32::DTYPE {
                arch.dispatch(|| change(i, bytemuck::cast_slice_mut(out)));
                return;
            }
            let mut wide = vec![0.0; columns];
            arch.dispatch(|| {
                T::widen_into(out, &mut wide);
                change(i, &mut wide);
                T::narrow_into(&wide, out);
            });
        };
        let is_worth_it = out.len() >= PARALLEL_THRESHOLD;
        let rows = (out.len() / columns).div_ceil(PARTS * self.threads.count());
        let parts = out.chunks_mut(rows.max(1) * columns).enumerate();
        self.threads.for_each(is_worth_it, parts, |(part, out)| {
            out.chunks_exact_mut(columns).enumerate().for_each(|(i, out)| row((part * rows + i, out)));
        });
    }
}

/// The exact values of some elements.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]
pub(super) fn values(stored: &Storage, range: Range<usize>) -> Cow<'_, [f32]> {
    if let Storage::F32(stored) = stored {
        return Cow::Borrowed(&stored[range]);
    }
    let mut wide = vec![0.0; range.len()];
    with_elements!(stored, stored => Float::widen_into(&stored[range], &mut wide));
    Cow::Owned(wide)
}

/// Uses 16 partial sums, since each addition to one sum waits for the last.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (vectors, rest) = x.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for vector in vectors {
        for (sum, x) in sums.iter_mut().zip(vector) {
            *sum += x * x;
        }
    }
    sums.into_iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}

impl Compute for Host {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        float::check(dtype)?;
        // Small arrays are not worth the question.
        let has_room = |bytes| bytes < LARGE || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
        if element_count(shape, dtype).is_err() || !has_room(shape.iter().product::<usize>() * dtype.size()) {
            return Err(ConfigurationError::NoMemory { shape: shape.into(), dtype }.into());
        }
        Tensor::zeros(shape, dtype)
    }

    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        Batch::on_host(tokens, slots, rotary)
    }

    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        *batch = Batch::on_host(tokens, slots, rotary)?;
        Ok(())
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        let [m, k, n] = shapes::linear(x, weight, bias)?;
        let bias = bias.map(Tensor::host_values).transpose()?;
        let (operands, bias) = ((x.host()?, weight.host()?), bias.as_deref());
        let values = with_float!(out, T => {
            Storage::from(self.products.multiply::<T>(&self.threads, operands, bias, [m, k, n]))
        })?;
        Ok(Tensor::from_storage(&[m, n], values))
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (rows, columns) = (table.rows(), table.columns());
        let (ids, stored) = (batch.tokens(), table.host()?);
        self.build([ids.len(), columns], out, |i, to| {
            match (ids[i] as usize).checked_sub(first).filter(|row| *row < rows) {
                Some(row) => with_elements!(stored, from => {
                    Float::widen_into(&from[row * columns..(row + 1) * columns], to);
                }),
                None => to.fill(0.0),
            }
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        shapes::rms_norm(x, weight)?;
        let columns = x.columns();
        let (stored, weight) = (x.host()?, weight.host_values()?);
        self.build([x.rows(), columns], x.dtype(), |i, to| {
            let row = values(stored, i * columns..(i + 1) * columns);
            let scale = 1.0 / (sum_of_squares(&row) / columns as f32 + epsilon).sqrt();
            for ((to, x), w) in to.iter_mut().zip(row.iter()).zip(weight.iter()) {
                *to = x * scale * w;
            }
        })
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        shapes::add(x, y)?;
        let (columns, count, y) = (x.columns(), y.count(), y.host()?);
        if count > 0 {
            with_elements!(x.host_mut()?, x => self.each_row(&mut x[..], columns, |i, to| {
                // One row is added to all.
                let at = i * columns % count;
                for (to, y) in to.iter_mut().zip(values(y, at..at + columns).iter()) {
                    *to += y;
                }
            }));
        }
        Ok(())
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let width = shapes::swiglu(x)?;
        let stored = x.host()?;
        self.build([x.rows(), width], x.dtype(), |i, to| {
            let both = values(stored, 2 * i * width..2 * (i + 1) * width);
            let (gate, up) = both.split_at(width);
            for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
                *to = gate / (1.0 + exp(-gate)) * up;
            }
        })
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        attend::attention(self, &qkv, call, cache)
    }

    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        shapes::slice_columns(x, &columns)?;
        let stored = x.host()?;
        self.build([x.rows(), columns.len()], x.dtype(), |i, to| {
            let at = i * x.columns();
            to.copy_from_slice(&values(stored, at + columns.start..at + columns.end));
        })
    }

    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor> {
        let [count, rows, width] = shapes::concat_columns(&blocks, keep)?;
        if count == 1 && keep == width {
            return blocks.reshape(&[rows, width]);
        }
        let stored = blocks.host()?;
        self.build([rows, keep], blocks.dtype(), |i, to| {
            for (block, to) in to.chunks_mut(width).enumerate() {
                let from = (block * rows + i) * width;
                to.copy_from_slice(&values(stored, from..from + to.len()));
            }
        })
    }
}
