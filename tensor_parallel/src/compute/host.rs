//! Arithmetic on the processor.

use std::ops::Range;

use pulp::Arch;
use rayon::prelude::*;
use ryzanstein_process_group::{DType, Element as _};

use super::batch::{Batch, SlotMapping};
use super::operations::{AttentionCall, Compute, LayerCache};
use super::{attend, matmul, shapes, skinny};
use crate::error::{ConfigurationError, Result};
use crate::float::{self, Float};
use crate::rotary::Rotary;
use crate::storage::{Storage, with_elements};
use crate::tensor::{Tensor, element_count};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// How many 16-bit weights are widened at a time for a blocked product.
const PANEL: usize = 1 << 18;

/// Larger arrays are first reserved by an allocation that may fail. One that must not fail would end the program.
const LARGE: usize = 64 << 20;

/// Arithmetic on the processor, with the `gemm` crate for large products.
#[derive(Debug)]
pub struct Host {
    threads: Threads,
    arch: Arch,
}

impl Host {
    /// Computes on at most `threads` threads: a pool of its own, or the caller's thread for one.
    pub fn new(threads: usize) -> Self {
        Self { threads: Threads::new(threads, "compute"), arch: Arch::new() }
    }

    fn few_rows<T: Float>(&self, x: &[f32], w: &[T], out: &mut [f32], k: usize) {
        let m = x.len() / k;
        let n = w.len() / k;
        if m == 1 {
            self.many_products(x, w, out, k, 1);
            return;
        }
        let mut transposed = vec![0.0; m * n];
        self.many_products(x, w, &mut transposed, k, m);
        for (r, out) in out.chunks_exact_mut(n).enumerate() {
            for (out, products) in out.iter_mut().zip(transposed.chunks_exact(m)) {
                *out = products[r];
            }
        }
    }

    fn many_products<T: Float>(&self, x: &[f32], w: &[T], out: &mut [f32], k: usize, m: usize) {
        let Some(pool) = self.threads.pool_if(w.len() * m >= PARALLEL_THRESHOLD) else {
            skinny::multiply(self.arch, x, w, out, k);
            return;
        };
        let rows = (w.len() / k).div_ceil(pool.current_num_threads() * 4);
        pool.install(|| {
            w.par_chunks(rows * k)
                .zip(out.par_chunks_mut(rows * m))
                .for_each(|(w, out)| skinny::multiply(self.arch, x, w, out, k));
        });
    }

    fn many_rows<T: Float>(&self, x: &[f32], w: &[T], out: &mut [f32], k: usize) {
        let n = w.len() / k;
        if T::DTYPE == f32::DTYPE {
            self.blocked(x, bytemuck::cast_slice(w), out, k, n);
            return;
        }
        let rows = (PANEL / k).max(1);
        let mut panel = vec![0.0; rows.min(n) * k];
        for (i, w) in w.chunks(rows * k).enumerate() {
            let panel = &mut panel[..w.len()];
            T::widen_into(w, panel);
            self.blocked(x, panel, &mut out[i * rows..], k, n);
        }
    }

    fn blocked(&self, x: &[f32], w: &[f32], out: &mut [f32], k: usize, stride: usize) {
        let work = x.len() / k * w.len();
        match self.threads.pool_if(work >= PARALLEL_THRESHOLD.max(matmul::parallel_from())) {
            Some(pool) => {
                let threads = pool.current_num_threads();
                pool.install(|| matmul::multiply(x, w, out, k, stride, threads));
            }
            None => matmul::multiply(x, w, out, k, stride, 1),
        }
    }
}

/// Builds a tensor row by row: `fill` gets the row's number and `columns` values to set.
fn build(
    rows: usize,
    columns: usize,
    dtype: DType,
    mut fill: impl FnMut(usize, &mut [f32]),
) -> Result<Tensor> {
    let shape = [rows, columns];
    if columns == 0 {
        return Tensor::zeros(&shape, dtype);
    }
    let mut out = Storage::zeros(element_count(&shape, dtype)?, dtype)?;
    match &mut out {
        Storage::F32(out) => out.chunks_exact_mut(columns).enumerate().for_each(|(i, row)| fill(i, row)),
        half => {
            let mut wide = vec![0.0; columns];
            for i in 0..rows {
                fill(i, &mut wide);
                with_elements!(half, out => {
                    for (out, value) in out[i * columns..].iter_mut().zip(&wide) {
                        *out = Float::narrow(*value);
                    }
                });
            }
        }
    }
    Ok(Tensor::from_storage(&shape, out))
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
        let mut y = vec![0.0; m * n];
        let values = x.host_values()?;
        if m > 0 && n > 0 && k > 0 {
            with_elements!(weight.host()?, w => {
                if m <= skinny::MOST_ROWS {
                    self.few_rows(&values, w, &mut y, k);
                } else {
                    self.many_rows(&values, w, &mut y, k);
                }
            });
        }
        if let Some(bias) = bias {
            let bias = bias.host_values()?;
            for (y, b) in y.iter_mut().zip(bias.iter().cycle()) {
                *y += b;
            }
        }
        Tensor::new(&[m, n], y, out)
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        let (rows, columns) = (table.rows(), table.columns());
        let (ids, stored) = (batch.tokens(), table.host()?);
        build(ids.len(), columns, out, |i, to| {
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
        let (values, weight) = (x.host_values()?, weight.host_values()?);
        build(x.rows(), columns, x.dtype(), |i, to| {
            let row = &values[i * columns..(i + 1) * columns];
            let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f32>() / columns as f32 + epsilon).sqrt();
            for ((to, x), w) in to.iter_mut().zip(row).zip(weight.iter()) {
                *to = x * scale * w;
            }
        })
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        shapes::add(x, y)?;
        let y = y.host_values()?;
        with_elements!(x.host_mut()?, x => {
            for (x, y) in x.iter_mut().zip(y.iter().cycle()) {
                *x = Float::narrow((*x).widen() + y);
            }
        });
        Ok(())
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let width = shapes::swiglu(x)?;
        let values = x.host_values()?;
        build(x.rows(), width, x.dtype(), |i, to| {
            let (gate, up) = values[2 * i * width..2 * (i + 1) * width].split_at(width);
            for ((to, gate), up) in to.iter_mut().zip(gate).zip(up) {
                *to = gate / (1.0 + (-gate).exp()) * up;
            }
        })
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        attend::attention((&self.threads, self.arch), &qkv, call, cache)
    }

    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        shapes::slice_columns(x, &columns)?;
        let values = x.host_values()?;
        build(x.rows(), columns.len(), x.dtype(), |i, to| {
            to.copy_from_slice(&values[i * x.columns()..][columns.clone()]);
        })
    }

    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor> {
        let [count, rows, width] = shapes::concat_columns(&blocks, keep)?;
        if count == 1 && keep == width {
            return blocks.reshape(&[rows, width]);
        }
        let values = blocks.host_values()?;
        build(rows, keep, blocks.dtype(), |i, to| {
            for (block, to) in to.chunks_mut(width).enumerate() {
                let from = (block * rows + i) * width;
                to.copy_from_slice(&values[from..from + to.len()]);
            }
        })
    }
}
