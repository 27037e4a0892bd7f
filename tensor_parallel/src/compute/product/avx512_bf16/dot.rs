//! Dot products of few rows. They are limited by memory bandwidth, so each load of weights is a whole vector.

#![expect(
    unsafe_code,
    reason = "instructions that the caller must know the processor to have, and raw loads"
)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_setzero_ps, _mm512_setzero_si512,
};

use half::bf16;

use super::fetch;
use crate::compute::product::instruction_set;
use crate::compute::product::totals;
use ryzanstein_config::InstructionSet;

/// Elements in a vector.
const LANES: usize = 32;
/// Weight rows that are read in parallel.
const WEIGHTS: usize = 4;

/// Computes `out[r * n + i] = w[i] · x[r]` for fewer than [`FEWEST_ROWS`](super::FEWEST_ROWS) rows of length `k`.
pub(super) fn multiply(x: &[bf16], w: &[bf16], out: &mut [f32], k: usize) {
    let (m, n) = (x.len() / k, w.len() / k);
    assert!(x.len() == m * k && w.len() == n * k && out.len() == m * n, "operands must be whole rows");
    assert!(instruction_set::is_supported(InstructionSet::Avx512Bf16), "checked when it was chosen");
    for (i, w) in w.chunks(WEIGHTS * k).enumerate() {
        let out = &mut out[i * WEIGHTS..];
        // SAFETY: the processor has the instructions.
        unsafe {
            if w.len() == WEIGHTS * k {
                rows_of_weights::<WEIGHTS>(x, w, out, [k, n]);
            } else {
                for (i, w) in w.chunks_exact(k).enumerate() {
                    rows_of_weights::<1>(x, w, &mut out[i..], [k, n]);
                }
            }
        }
    }
}

/// Multiplies all rows of activations with N rows of weights.
///
/// # Safety
/// The processor has the instructions.
unsafe fn rows_of_weights<const N: usize>(x: &[bf16], w: &[bf16], out: &mut [f32], shape: [usize; 2]) {
    // SAFETY: as the caller's.
    unsafe {
        match x.len() / shape[0] {
            1 => rows::<1, N>(x, w, out, shape),
            2 => rows::<2, N>(x, w, out, shape),
            3 => rows::<3, N>(x, w, out, shape),
            4 => rows::<4, N>(x, w, out, shape),
            _ => unreachable!("more rows have tiles"),
        }
    }
}

/// Multiplies M rows of activations with N rows of weights; rows of `out` are `n` apart.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn rows<const M: usize, const N: usize>(x: &[bf16], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    const { assert!(M * N <= 16) };
    assert!(x.len() == M * k && w.len() == N * k);
    let (weights, x, w) = (w, x.as_ptr().cast::<i16>(), w.as_ptr().cast::<i16>());
    let mut sums = [_mm512_setzero_ps(); 16];
    let whole = k / LANES * LANES;
    // SAFETY: the loads read elements of rows of k, and none past their ends.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            fetch::<N>(weights, i, k);
            add(&mut sums, vectors::<M>(x.add(i), k), vectors::<N>(w.add(i), k));
        }
        if whole < k {
            let mask = (1 << (k - whole)) - 1;
            let mut xs = [_mm512_setzero_si512(); M];
            let mut ws = [_mm512_setzero_si512(); N];
            for (r, to) in xs.iter_mut().enumerate() {
                *to = _mm512_maskz_loadu_epi16(mask, x.add(r * k + whole));
            }
            for (i, to) in ws.iter_mut().enumerate() {
                *to = _mm512_maskz_loadu_epi16(mask, w.add(i * k + whole));
            }
            add(&mut sums, xs, ws);
        }
    }
    let totals = totals::together(&sums);
    for (r, totals) in totals.chunks_exact(N).take(M).enumerate() {
        out[r * n..][..N].copy_from_slice(totals);
    }
}

/// Adds the products of pairs of each row of activations with each weight row.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add<const M: usize, const N: usize>(sums: &mut [__m512; 16], xs: [__m512i; M], ws: [__m512i; N]) {
    for (r, x) in xs.into_iter().enumerate() {
        for (i, w) in ws.into_iter().enumerate() {
            sums[r * N + i] = _mm512_dpbf16_ps(sums[r * N + i], pairs(w), pairs(x));
        }
    }
}

/// Loads the vectors at the same place of `R` rows of length k.
///
/// # Safety
/// The processor has the instructions; R rows have [`LANES`] elements there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn vectors<const R: usize>(at: *const i16, k: usize) -> [__m512i; R] {
    let mut vectors = [_mm512_setzero_si512(); R];
    for (r, to) in vectors.iter_mut().enumerate() {
        // SAFETY: as the caller's.
        *to = unsafe { _mm512_loadu_si512(at.add(r * k).cast()) };
    }
    vectors
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn pairs(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of any content.
    unsafe { std::mem::transmute(x) }
}
