//! Products of bf16 with AVX-512's dot products of pairs. Weights and activations are read as they are stored: both are
//! contiguous along the sums.

#![expect(
    unsafe_code,
    reason = "instructions that the caller must know the processor to have, and raw loads"
)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_reduce_add_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};

use half::bf16;

use super::InstructionSet;

/// Elements of a vector.
const LANES: usize = 32;
/// Weight rows of a tile of sums, and activation rows.
const TILE: usize = 4;
/// Weight rows that are done before others: they stay in the second-level cache while activations go by.
const WEIGHT_ROWS: usize = 64;
/// Bytes of activations that stay in the second-level cache.
const ACTIVATION_BYTES: usize = 512 << 10;

/// `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products). A sum has the same bits whatever rows are beside it.
pub(super) fn multiply(x: &[bf16], w: &[bf16], out: &mut [f32], k: usize) {
    let (m, n) = (x.len() / k, w.len() / k);
    assert!(x.len() == m * k && w.len() == n * k && out.len() == m * n, "operands must be whole rows");
    assert!(InstructionSet::Avx512Bf16.is_supported(), "checked when it was chosen");
    // SAFETY: the processor has the instructions, and the slices are as long as asserted.
    unsafe { blocked(x, w, out, [m, k, n]) }
}

/// # Safety
/// The processor has the instructions; `x` is m rows of k, `w` is n rows of k, `out` is m rows of n.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn blocked(x: &[bf16], w: &[bf16], out: &mut [f32], [m, k, n]: [usize; 3]) {
    let rows = (ACTIVATION_BYTES / (2 * k)).max(TILE) / TILE * TILE;
    for i in (0..n).step_by(WEIGHT_ROWS) {
        let end = n.min(i + WEIGHT_ROWS);
        for r in (0..m).step_by(rows) {
            for i in (i..end).step_by(TILE) {
                let weights = &w[i * k..end.min(i + TILE) * k];
                // SAFETY: as the caller's.
                unsafe { strip(&x[r * k..m.min(r + rows) * k], weights, &mut out[r * n + i..], [k, n]) };
            }
        }
    }
}

/// All activation rows of `x` with at most [`TILE`] weight rows; rows of `out` are `n` apart.
///
/// # Safety
/// The processor has the instructions; `x` and `w` are whole rows of k; `out` has an element for each pair of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn strip(x: &[bf16], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    for (at, x) in x.chunks(TILE * k).enumerate() {
        let out = &mut out[at * TILE * n..];
        // SAFETY: as the caller's; the numbers are those of the rows.
        unsafe {
            match (w.len() / k, x.len() / k) {
                (4, 4) => tile::<4, 4>(x, w, out, [k, n]),
                (4, 3) => tile::<4, 3>(x, w, out, [k, n]),
                (4, 2) => tile::<4, 2>(x, w, out, [k, n]),
                (4, 1) => tile::<4, 1>(x, w, out, [k, n]),
                _ => {
                    for (i, w) in w.chunks_exact(k).enumerate() {
                        for (r, x) in x.chunks_exact(k).enumerate() {
                            tile::<1, 1>(x, w, &mut out[r * n + i..], [k, n]);
                        }
                    }
                }
            }
        }
    }
}

/// # Safety
/// The processor has the instructions; `w` is R rows of k, `x` is C.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const R: usize, const C: usize>(x: &[bf16], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    debug_assert!(x.len() == C * k && w.len() == R * k);
    let (x, w) = (x.as_ptr().cast::<i16>(), w.as_ptr().cast::<i16>());
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let whole = k / LANES * LANES;
    // SAFETY: the loads read elements of rows of k, none behind their ends.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let mut xs = [_mm512_setzero_si512(); C];
            for (c, to) in xs.iter_mut().enumerate() {
                *to = _mm512_loadu_si512(x.add(c * k + i).cast());
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                add(sums, _mm512_loadu_si512(w.add(r * k + i).cast()), &xs);
            }
        }
        if whole < k {
            let mask = (1 << (k - whole)) - 1;
            let mut xs = [_mm512_setzero_si512(); C];
            for (c, to) in xs.iter_mut().enumerate() {
                *to = _mm512_maskz_loadu_epi16(mask, x.add(c * k + whole));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                add(sums, _mm512_maskz_loadu_epi16(mask, w.add(r * k + whole)), &xs);
            }
        }
    }
    for (r, sums) in sums.into_iter().enumerate() {
        for (c, sum) in sums.into_iter().enumerate() {
            out[c * n + r] = _mm512_reduce_add_ps(sum);
        }
    }
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
