//! Matrix products on the CPU.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod fetch;
pub mod instruction_set;
pub(super) mod simd;
mod totals;

use std::borrow::Cow;
use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use ryzanstein_config::InstructionSet;

use self::simd::Pair;
use super::rows::vectorized;
use super::tree;
use crate::float::Float;
use crate::memory::{self, Array, Columns};
use crate::storage::{Storage, with_elements};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// Number of blocks of weight rows per thread. Small blocks keep the threads balanced at the end.
const BLOCKS: usize = 16;
/// The number of weight rows in a block is a multiple of this, and so of the rows of every kernel's tiles.
const GRANULE: usize = 96;
/// Bytes of sums that are rounded at a time, so that they are still in the second-level cache. At least [`GRANULE`] weight rows
/// are multiplied, even if their sums take more.
const SUMS_BYTES: usize = 256 << 10;

/// Matrix products with one instruction set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    set: InstructionSet,
    arch: Arch,
}

/// Activations in the layout of an instruction set.
enum Prepared<'a> {
    Wide(Cow<'a, [f32]>),
    /// For weights of bf16 in pairs.
    Deinterleaved(Vec<f32>),
    #[cfg(target_arch = "x86_64")]
    Packed(avx512_bf16::Packed),
    #[cfg(target_arch = "x86_64")]
    Tiles(amx::Packed),
}

impl Prepared<'_> {
    /// Returns the number of weight rows that a thread multiplies at a time, of `n` rows of each of `leaves` shared by `threads`
    /// threads.
    fn block(&self, threads: usize, n: usize, leaves: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles(x) => n
                .div_ceil(BLOCKS / 2 * threads)
                .next_multiple_of(amx::GRANULE)
                .min(x.columns_together(leaves)),
            _ if threads > 1 => n.div_ceil(BLOCKS * threads).next_multiple_of(GRANULE),
            _ => n,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn tiles(&self) -> Option<&amx::Packed> {
        match self {
            Self::Tiles(x) => Some(x),
            _ => None,
        }
    }

    /// Returns the number of weight rows that are multiplied before their sums are rounded; each has `sums` of them.
    fn rows_together(sums: usize) -> usize {
        (SUMS_BYTES / (4 * sums) / GRANULE * GRANULE).max(GRANULE)
    }
}

impl Products {
    pub(super) fn new(set: InstructionSet) -> Self {
        Self { set, arch: instruction_set::arch(set) }
    }

    pub(super) fn arch(self) -> Arch {
        self.arch
    }

    pub(super) fn set(self) -> InstructionSet {
        self.set
    }

    /// Computes `x[m, k] · w[n, k]ᵀ`, with the bias of each column, rounded once. With several `x`, `w` has `n` rows for each of
    /// them in turn, and the products are added as a [`tree`](super::tree).
    pub(super) fn multiply<T: Float>(
        self,
        threads: &Threads,
        (x, w): (&[&Storage], &Storage),
        bias: Option<&[f32]>,
        [m, k, n]: [usize; 3],
    ) -> Array<T> {
        if m == 0 || n == 0 {
            return Array::default();
        }
        if k == 0 {
            let mut out = memory::zeros(m * n);
            out.chunks_exact_mut(n).for_each(|row| round(self.arch, &vec![0.0; n], bias, row));
            return out;
        }
        let prepared: Vec<_> = x.iter().map(|x| self.prepare(threads, x, w, k)).collect();
        let is_worth_it = threads.count() > 1 && m * k * x.len() * n >= PARALLEL_THRESHOLD;
        let block = prepared[0].block(if is_worth_it { threads.count() } else { 1 }, n, x.len());
        memory::built(m * n, |out| {
            let blocks = out.columns(n, block).into_iter().enumerate();
            threads.for_each(is_worth_it, blocks, |(i, mut out)| {
                self.columns(&prepared, w, bias, i * block..n.min((i + 1) * block), &mut out, [k, n]);
            });
        })
    }

    /// Computes the columns in `range` of a product; `out` has every row.
    fn columns<T: Float>(
        self,
        x: &[Prepared<'_>],
        w: &Storage,
        bias: Option<&[f32]>,
        range: Range<usize>,
        out: &mut Columns<'_, T>,
        [k, n]: [usize; 2],
    ) {
        let bias = bias.map(|bias| &bias[range.clone()]);
        let leaves = x.len();
        let rows = |leaf, columns: Range<usize>| leaf * n + columns.start..leaf * n + columns.end;
        #[cfg(target_arch = "x86_64")]
        if let (Some(x), Storage::BF16(w)) = (x.iter().map(Prepared::tiles).collect::<Option<Vec<_>>>(), w) {
            let all = (0..leaves).map(|leaf| rows(leaf, range.clone()));
            let w: Vec<_> = all.map(|rows| &w[rows.start * k..rows.end * k]).collect();
            amx::multiply(self.arch, &x, &w, &mut |block| {
                let bias = bias.map(|bias| &bias[block.columns.clone()]);
                for (row, sums) in block.rows.clone().zip(block.sums()) {
                    round(self.arch, sums, bias, &mut out.row(row)[block.columns.clone()]);
                }
            });
            return;
        }
        let places = tree::places(leaves);
        let m = out.row_count();
        let together = Prepared::rows_together(m * places).min(range.len());
        let mut sums = vec![0.0; m * together * places];
        for first in (0..range.len()).step_by(together) {
            let columns = first..range.len().min(first + together);
            let count = m * columns.len();
            for (leaf, x) in x.iter().enumerate() {
                let rows = rows(leaf, range.start + columns.start..range.start + columns.end);
                self.block(x, w, rows, &mut sums[tree::place(leaf, leaves) * count..][..count], k);
                tree::add(self.arch, &mut sums, count, leaf, leaves);
            }
            let bias = bias.map(|bias| &bias[columns.clone()]);
            for (row, sums) in sums[..count].chunks_exact(columns.len()).enumerate() {
                round(self.arch, sums, bias, &mut out.row(row)[columns.clone()]);
            }
        }
    }

    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(unused_variables, reason = "only kernels of this architecture use threads")
    )]
    fn prepare<'a>(self, threads: &Threads, x: &'a Storage, w: &Storage, k: usize) -> Prepared<'a> {
        let Storage::BF16(w) = w else { return Prepared::Wide(x.widened()) };
        match x {
            #[cfg(target_arch = "x86_64")]
            Storage::BF16(x) if self.set == InstructionSet::Amx && k.is_multiple_of(amx::DEPTH) => {
                Prepared::Tiles(amx::Packed::new(threads, x, k))
            }
            #[cfg(target_arch = "x86_64")]
            Storage::BF16(x) if matches!(self.set, InstructionSet::Amx | InstructionSet::Avx512Bf16) => {
                Prepared::Packed(avx512_bf16::Packed::new(threads, x, k))
            }
            // Rows of an odd length have no whole pairs.
            x if k.is_multiple_of(2) && bytemuck::try_cast_slice::<_, Pair>(w).is_ok() => {
                Prepared::Deinterleaved(simd::deinterleaved(self.arch, &x.widened(), k))
            }
            x => Prepared::Wide(x.widened()),
        }
    }

    /// Computes `out[r * rows.len() + i] = w[rows.start + i] · x[r]` for all rows of the activations.
    fn block(self, x: &Prepared<'_>, w: &Storage, rows: Range<usize>, out: &mut [f32], k: usize) {
        let part = rows.start * k..rows.end * k;
        match (x, w) {
            #[cfg(target_arch = "x86_64")]
            (Prepared::Packed(x), Storage::BF16(w)) => avx512_bf16::multiply(x, &w[part], out),
            (Prepared::Deinterleaved(x), Storage::BF16(w)) => {
                simd::multiply::<Pair>(self.arch, x, bytemuck::cast_slice(&w[part]), out, k);
            }
            (Prepared::Wide(x), w) => with_elements!(w, w => simd::multiply(self.arch, x, &w[part], out, k)),
            _ => unreachable!("activations are prepared for the type of the weights"),
        }
    }
}

vectorized! {
    /// Adds the bias to sums and rounds them.
    fn round<'a, T>(sums: &'a [f32], bias: Option<&'a [f32]>, out: &'a mut [T]) {
        match bias {
            None => T::narrow_into(sums, out),
            Some(bias) => {
                for ((out, sum), bias) in out.iter_mut().zip(sums).zip(bias) {
                    *out = T::narrow(sum + bias);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
