//! Products of matrices on the processor.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(not(target_arch = "x86_64"))]
#[path = "amx_absent.rs"]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod blocked;
pub mod instruction_set;
pub(super) mod simd;

use std::borrow::Cow;

use pulp::Arch;
use ryzanstein_config::InstructionSet;
use ryzanstein_process_group::{DType, Element as _};

use crate::float::Float;
use crate::storage::{Storage, with_elements};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// How many 16-bit weights are widened at a time for a blocked product.
const PANEL: usize = 1 << 18;
/// Blocks of weight rows for each thread. Small blocks keep the threads balanced at the end.
const BLOCKS: usize = 16;
/// Weight rows of a block are a multiple of this, and so of the rows of every kernel's tiles.
const GRANULE: usize = 96;

/// Products of matrices by one instruction set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    set: InstructionSet,
    arch: Arch,
}

/// Activations as an instruction set wants them.
enum Prepared<'a> {
    Wide(Cow<'a, [f32]>),
    #[cfg(target_arch = "x86_64")]
    Pairs(avx512_bf16::Packed),
    Tiles(amx::Packed),
}

/// The sums of a product, before they are rounded: blocks of columns, of which each has all rows.
pub(super) struct Sums {
    values: Vec<f32>,
    shape: [usize; 2],
    /// Columns of a block; the last may have fewer.
    block: usize,
}

impl Products {
    pub(super) fn new(set: InstructionSet) -> Self {
        Self { set, arch: instruction_set::arch(set) }
    }

    pub(super) fn arch(self) -> Arch {
        self.arch
    }

    /// `x[m, k] · w[n, k]ᵀ`.
    pub(super) fn multiply(self, threads: &Threads, x: &Storage, w: &Storage, [m, k, n]: [usize; 3]) -> Sums {
        let mut sums = Sums { values: vec![0.0; m * n], shape: [m, n], block: n };
        if m == 0 || n == 0 || k == 0 {
            return sums;
        }
        let prepared = self.prepare(threads, x, w.dtype(), k);
        let is_worth_it = threads.count() > 1 && m * k * n >= PARALLEL_THRESHOLD;
        if is_worth_it {
            sums.block = n.div_ceil(BLOCKS * threads.count()).next_multiple_of(GRANULE);
        }
        let block = sums.block;
        threads.for_each(is_worth_it, sums.values.chunks_mut(m * block).enumerate(), |(i, out)| {
            self.block(&prepared, w, i * block..n.min((i + 1) * block), out, k);
        });
        sums
    }

    fn prepare<'a>(self, threads: &Threads, x: &'a Storage, weights: DType, k: usize) -> Prepared<'a> {
        match x {
            Storage::BF16(x)
                if weights == DType::BF16
                    && self.set == InstructionSet::Amx
                    && x.len() >= amx::FEWEST_ROWS * k
                    && k.is_multiple_of(amx::DEPTH) =>
            {
                Prepared::Tiles(amx::Packed::new(threads, x, k))
            }
            #[cfg(target_arch = "x86_64")]
            Storage::BF16(x)
                if weights == DType::BF16
                    && matches!(self.set, InstructionSet::Amx | InstructionSet::Avx512Bf16) =>
            {
                Prepared::Pairs(avx512_bf16::Packed::new(threads, x, k))
            }
            x => Prepared::Wide(x.widened()),
        }
    }

    /// `out[r * rows.len() + i] = w[rows.start + i] · x[r]` for all rows of the activations.
    fn block(self, x: &Prepared<'_>, w: &Storage, rows: std::ops::Range<usize>, out: &mut [f32], k: usize) {
        let part = rows.start * k..rows.end * k;
        match (x, w) {
            (Prepared::Tiles(x), Storage::BF16(w)) => amx::multiply(x, &w[part], out),
            #[cfg(target_arch = "x86_64")]
            (Prepared::Pairs(x), Storage::BF16(w)) => avx512_bf16::multiply(x, &w[part], out),
            (Prepared::Wide(x), w) if x.len() > simd::MOST_ROWS * k => {
                with_elements!(w, w => blocked_product(x, &w[part], out, k));
            }
            (Prepared::Wide(x), w) => with_elements!(w, w => simd::multiply(self.arch, x, &w[part], out, k)),
            _ => unreachable!("activations are prepared for the type of the weights"),
        }
    }
}

/// A product with many rows, by the `gemm` crate; 16-bit weights are widened in panels.
fn blocked_product<T: Float>(x: &[f32], w: &[T], out: &mut [f32], k: usize) {
    let n = w.len() / k;
    if T::DTYPE == f32::DTYPE {
        blocked::multiply(x, bytemuck::cast_slice(w), out, k, n);
        return;
    }
    let rows = (PANEL / k).max(1);
    let mut panel = vec![0.0; rows.min(n) * k];
    for (i, w) in w.chunks(rows * k).enumerate() {
        let panel = &mut panel[..w.len()];
        T::widen_into(w, panel);
        blocked::multiply(x, panel, &mut out[i * rows..], k, n);
    }
}

impl Sums {
    /// The sums, each with the bias of its column, row by row, rounded once.
    pub(super) fn rounded<T: Float>(self, threads: &Threads, bias: Option<&[f32]>) -> Vec<T> {
        let [m, n] = self.shape;
        if n == 0 {
            return Vec::new();
        }
        let mut out = crate::memory::zeros::<T>(m * n);
        let row = |(r, out): (usize, &mut [T])| {
            for (i, out) in out.chunks_mut(self.block).enumerate() {
                let from = &self.values[i * self.block * m + r * out.len()..][..out.len()];
                match bias {
                    None => T::narrow_into(from, out),
                    Some(bias) => {
                        for ((out, from), bias) in out.iter_mut().zip(from).zip(&bias[i * self.block..]) {
                            *out = T::narrow(from + bias);
                        }
                    }
                }
            }
        };
        let rows = m.div_ceil(BLOCKS * threads.count()).max(1);
        threads.for_each(m * n >= PARALLEL_THRESHOLD, out.chunks_mut(rows * n).enumerate(), |(part, out)| {
            out.chunks_exact_mut(n).enumerate().for_each(|(i, out)| row((part * rows + i, out)));
        });
        out
    }
}

#[cfg(test)]
mod tests;
