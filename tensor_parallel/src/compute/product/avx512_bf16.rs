//! Products of bf16 with AVX-512's dot products of pairs. Weights are read as they are stored.

#![expect(
    unsafe_code,
    reason = "instructions that the caller must know the processor to have, and raw loads"
)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_setzero_ps, _mm512_setzero_si512,
};

use half::bf16;

use super::{instruction_set, totals};
use crate::threads::{PARALLEL_THRESHOLD, Threads};
use ryzanstein_config::InstructionSet;

/// Elements of a vector.
const LANES: usize = 32;
/// Weight rows of a tile of sums, which has a register for each sum: with 6 by 4, 10 loads feed 24 products.
const WEIGHTS: usize = 6;
/// Activation rows of a tile of sums.
const TILE: usize = 4;
/// Weight rows that are done before others: they stay in the second-level cache while activations go by.
const WEIGHT_ROWS: usize = 48;
/// Bytes of activations that one pass uses. They share the second-level cache with the weight rows.
const ACTIVATION_BYTES: usize = 256 << 10;

/// Activations in the order in which they are multiplied: of each group of [`TILE`] rows, 32 elements of each row in turn, with zeros
/// behind the last. Row by row, the loads would map to the same sets of the first-level cache.
pub(super) struct Packed {
    values: Vec<bf16>,
    rows: usize,
    columns: usize,
}

impl Packed {
    /// `x` is rows of `k`, of which there is at least one.
    pub(super) fn new(threads: &Threads, x: &[bf16], k: usize) -> Self {
        let (rows, width) = (x.len() / k, k.next_multiple_of(LANES));
        assert!(x.len() == rows * k, "operands must be whole rows");
        let mut values = vec![bf16::ZERO; rows * width];
        let groups = values.chunks_mut(TILE * width).zip(x.chunks(TILE * k));
        threads.for_each(x.len() >= PARALLEL_THRESHOLD, groups, |(group, x)| {
            let rows = x.len() / k;
            for (r, row) in x.chunks_exact(k).enumerate() {
                for (i, part) in row.chunks(LANES).enumerate() {
                    group[(i * rows + r) * LANES..][..part.len()].copy_from_slice(part);
                }
            }
        });
        Self { values, rows, columns: k }
    }

    fn width(&self) -> usize {
        self.columns.next_multiple_of(LANES)
    }
}

/// `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products). A sum has the same bits whatever rows are beside it.
pub(super) fn multiply(x: &Packed, w: &[bf16], out: &mut [f32]) {
    let n = w.len() / x.columns;
    assert!(w.len() == n * x.columns && out.len() == x.rows * n, "operands must be whole rows");
    assert!(instruction_set::is_supported(InstructionSet::Avx512Bf16), "checked when it was chosen");
    // SAFETY: the processor has the instructions, and the slices are as long as asserted.
    unsafe { blocked(x, w, out, n) }
}

/// # Safety
/// The processor has the instructions; `w` is n rows as long as those of `x`, and `out` has an element for each pair of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn blocked(x: &Packed, w: &[bf16], out: &mut [f32], n: usize) {
    let (k, width) = (x.columns, x.width());
    let rows = (ACTIVATION_BYTES / (2 * width)).max(TILE) / TILE * TILE;
    for i in (0..n).step_by(WEIGHT_ROWS) {
        let end = n.min(i + WEIGHT_ROWS);
        for (part, x) in x.values.chunks(rows * width).enumerate() {
            for i in (i..end).step_by(WEIGHTS) {
                let weights = &w[i * k..end.min(i + WEIGHTS) * k];
                // SAFETY: as the caller's.
                unsafe { strip(x, weights, &mut out[part * rows * n + i..], [k, n]) };
            }
        }
    }
}

/// All packed rows of `x` with at most [`WEIGHTS`] weight rows; rows of `out` are `n` apart.
///
/// # Safety
/// The processor has the instructions; `x` is whole packed rows and `w` whole rows of k; `out` has an element for each pair of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn strip(x: &[bf16], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    let width = k.next_multiple_of(LANES);
    for (at, x) in x.chunks(TILE * width).enumerate() {
        let out = &mut out[at * TILE * n..];
        let (tiles, rows) = (w.len() / k, x.len() / width);
        // SAFETY: as the caller's; the numbers are those of the rows.
        unsafe {
            match (tiles, rows) {
                (WEIGHTS, 4) => tile::<WEIGHTS, 4>(x, w, out, [k, n]),
                (WEIGHTS, 3) => tile::<WEIGHTS, 3>(x, w, out, [k, n]),
                (WEIGHTS, 2) => tile::<WEIGHTS, 2>(x, w, out, [k, n]),
                (WEIGHTS, 1) => tile::<WEIGHTS, 1>(x, w, out, [k, n]),
                _ => {
                    for (i, w) in w.chunks_exact(k).enumerate() {
                        let out = &mut out[i..];
                        match rows {
                            4 => tile::<1, 4>(x, w, out, [k, n]),
                            3 => tile::<1, 3>(x, w, out, [k, n]),
                            2 => tile::<1, 2>(x, w, out, [k, n]),
                            _ => tile::<1, 1>(x, w, out, [k, n]),
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// The processor has the instructions; `w` is R rows of k, `x` is C packed rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize, const C: usize>(x: &[bf16], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    assert!(x.len() == C * k.next_multiple_of(LANES) && w.len() == R * k);
    let (x, w) = (x.as_ptr().cast::<i16>(), w.as_ptr().cast::<i16>());
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let whole = k / LANES * LANES;
    // SAFETY: the loads read elements of rows of k, none behind their ends, and of packed rows, which are as long as whole vectors.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let xs = load(x.add(i * C));
            for (r, sums) in sums.iter_mut().enumerate() {
                add(sums, _mm512_loadu_si512(w.add(r * k + i).cast()), &xs);
            }
        }
        if whole < k {
            let mask = (1 << (k - whole)) - 1;
            let xs = load(x.add(whole * C));
            for (r, sums) in sums.iter_mut().enumerate() {
                add(sums, _mm512_maskz_loadu_epi16(mask, w.add(r * k + whole)), &xs);
            }
        }
    }
    // Of two rows of activations at a time.
    for c in (0..C).step_by(2) {
        let mut of_both = [_mm512_setzero_ps(); 16];
        for (r, sums) in sums.iter().enumerate() {
            of_both[r] = sums[c];
            of_both[8 + r] = if c + 1 < C { sums[c + 1] } else { _mm512_setzero_ps() };
        }
        for (c, totals) in (c..C).zip(totals::together(&of_both).chunks_exact(8)) {
            out[c * n..][..R].copy_from_slice(&totals[..R]);
        }
    }
}

/// # Safety
/// The processor has the instructions; C vectors are at `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn load<const C: usize>(x: *const i16) -> [__m512i; C] {
    let mut xs = [_mm512_setzero_si512(); C];
    for (c, to) in xs.iter_mut().enumerate() {
        // SAFETY: as the caller's.
        *to = unsafe { _mm512_loadu_si512(x.add(c * LANES).cast()) };
    }
    xs
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add<const C: usize>(sums: &mut [__m512; C], w: __m512i, xs: &[__m512i; C]) {
    for (sum, x) in sums.iter_mut().zip(xs) {
        *sum = _mm512_dpbf16_ps(*sum, pairs(w), pairs(*x));
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of any content.
    unsafe { std::mem::transmute(x) }
}
