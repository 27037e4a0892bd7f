//! Arithmetic on the CPU.

use std::ops::Range;

use ryzanstein_config::{InstructionSet, Numerics};
use ryzanstein_process_group::DType;

use super::batch::{Batch, SlotMapping};
use super::operations::{AttentionCall, Compute, LayerCache};
use super::processor::Processor;
use super::product::instruction_set;
use super::{attend, rows, shapes, tree};
use crate::error::{ConfigurationError, Result};
use crate::float::{self, with_float};
use crate::rotary::Rotary;
use crate::storage::{Storage, with_elements};
use crate::tensor::{Tensor, element_count};

/// The size in bytes from which arrays are first reserved by a fallible allocation. A failure of an infallible one would abort
/// the program.
const LARGE: usize = 64 << 20;

/// Arithmetic on the CPU.
#[derive(Debug)]
pub struct Host {
    processor: Processor,
    numerics: Numerics,
}

impl Host {
    /// Creates the arithmetic on at most `threads` threads: a pool of its own, or the caller's thread if there is only one.
    pub fn new(threads: usize) -> Self {
        Self::with_numerics(threads, instruction_set::current(), Numerics::Fast)
    }

    /// Creates the arithmetic as [`new`](Self::new) does, with an instruction set that this processor must have. Invariant numerics
    /// use the [`invariant`](instruction_set::invariant) variant of the set.
    ///
    /// # Panics
    /// Panics if this processor lacks the instruction set: [`instruction_set::supported`] lists those that it has.
    pub fn with_numerics(threads: usize, set: InstructionSet, numerics: Numerics) -> Self {
        assert!(instruction_set::is_supported(set), "this processor lacks {set}");
        let set = if numerics == Numerics::Invariant { instruction_set::invariant(set) } else { set };
        Self { processor: Processor::new(threads, set), numerics }
    }
}

impl Compute for Host {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        float::check(dtype)?;
        // Small arrays are not checked.
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
        let (x, weight, bias) = ([x.host()?], weight.host()?, bias.as_deref());
        let values = with_float!(out, T => {
            Storage::from(self.processor.multiply::<T>((&x, weight), bias, [m, k, n]))
        })?;
        Ok(Tensor::from_storage(&[m, n], values))
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn linear_of_leaves(&self, x: &Tensor, weight: &Tensor, leaves: usize) -> Result<Tensor> {
        if self.numerics != Numerics::Invariant {
            return Err(ConfigurationError::FastOnly.into());
        }
        let [m, k, n] = shapes::linear_of_leaves(x, weight, leaves)?;
        let parts = (0..leaves).map(|leaf| self.slice_columns(x, leaf * k..(leaf + 1) * k));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let parts = parts.iter().map(Tensor::host).collect::<Result<Vec<_>>>()?;
        let sums = self.processor.multiply::<f32>((&parts, weight.host()?), None, [m, k, n]);
        Ok(Tensor::from_storage(&[m, n], Storage::from(sums)))
    }

    fn sum_of_leaves(&self, terms: &Tensor, out: DType) -> Result<Tensor> {
        let [count, rows, columns] = shapes::sum_of_leaves(terms)?;
        let stored = terms.host()?;
        self.processor.build([rows, columns], out, |row, to| {
            let mut terms = vec![0.0; count * columns];
            for (i, term) in terms.chunks_exact_mut(columns).enumerate() {
                let at = (i * rows + row) * columns;
                self.processor.widen(stored, at..at + columns, term);
            }
            tree::sum(self.processor.arch(), &mut terms, columns);
            to.copy_from_slice(&terms[..columns]);
        })
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (rows, columns) = (table.rows(), table.columns());
        let (ids, stored) = (batch.tokens(), table.host()?);
        self.processor.build([ids.len(), columns], out, |i, to| {
            match (ids[i] as usize).checked_sub(first).filter(|row| *row < rows) {
                Some(row) => self.processor.widen(stored, row * columns..(row + 1) * columns, to),
                None => to.fill(0.0),
            }
        })
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        shapes::rms_norm(x, weight)?;
        let columns = x.columns();
        let (stored, weight) = (x.host()?, weight.host_values()?);
        self.processor.build([x.rows(), columns], x.dtype(), |i, to| {
            with_elements!(stored, x => {
                rows::rms_norm(self.processor.arch(), &x[i * columns..(i + 1) * columns], &weight, epsilon, to);
            });
        })
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        shapes::add(x, y)?;
        let (columns, count, y) = (x.columns(), y.count(), y.host()?);
        if count > 0 {
            with_elements!(x.host_mut()?, x => with_elements!(y, y => self.processor.add_rows(x, y, columns)));
        }
        Ok(())
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let width = shapes::swiglu(x)?;
        let stored = x.host()?;
        self.processor.build([x.rows(), width], x.dtype(), |i, to| {
            with_elements!(stored, stored => {
                let (gate, up) = stored[2 * i * width..2 * (i + 1) * width].split_at(width);
                rows::swiglu(self.processor.arch(), gate, up, to);
            });
        })
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        attend::attention(&self.processor, &qkv, call, cache)
    }

    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        shapes::slice_columns(x, &columns)?;
        let stored = x.host()?;
        self.processor.build([x.rows(), columns.len()], x.dtype(), |i, to| {
            let at = i * x.columns();
            self.processor.widen(stored, at + columns.start..at + columns.end, to);
        })
    }

    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor> {
        let [count, rows, width] = shapes::concat_columns(&blocks, keep)?;
        if count == 1 && keep == width {
            return blocks.reshape(&[rows, width]);
        }
        let stored = blocks.host()?;
        self.processor.build([rows, keep], blocks.dtype(), |i, to| {
            for (block, to) in to.chunks_mut(width).enumerate() {
                let from = (block * rows + i) * width;
                self.processor.widen(stored, from..from + to.len(), to);
            }
        })
    }
}
