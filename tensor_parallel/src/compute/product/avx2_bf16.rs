//! Products with bf16 weights with AVX2, for few activation rows. Weights are widened in registers: in a vector of pairs, a shift
//! turns the first element of each pair into an `f32`, a mask the second. Activations are deinterleaved once to match.

#![expect(
    unsafe_code,
    reason = "instructions that the caller must know the processor to have, and raw loads"
)]

use std::arch::x86_64::{
    _MM_HINT_T1, _mm_prefetch, _mm256_and_si256, _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_set1_epi32, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use half::bf16;
use ryzanstein_config::InstructionSet;

use super::instruction_set;

/// Elements in a vector of weights.
const LANES: usize = 16;
/// Elements of a row that are multiplied together, so that those of 4 weight rows stay in the first-level cache for all
/// activation rows.
const PIECE: usize = 2048;
/// Weight rows in a tile of sums.
const WEIGHTS: usize = 4;
/// Activation rows in a tile. Its sums, the activations and a vector of weights take 14 of 16 registers.
const ROWS: usize = 2;
/// Elements in a cache line.
const LINE: usize = 32;

/// Rows of activations: of each [`LANES`] elements first those at even places, then those at odd ones. The remainder that does
/// not fill a vector keeps its order.
pub(super) struct Prepared {
    x: Vec<f32>,
    k: usize,
}

impl Prepared {
    /// Deinterleaves `x`, which is rows of length `k`.
    pub(super) fn new(x: &[f32], k: usize) -> Self {
        let mut deinterleaved = Vec::with_capacity(x.len());
        for row in x.chunks_exact(k) {
            let vectors = row.chunks_exact(LANES);
            let rest = vectors.remainder();
            for vector in vectors {
                deinterleaved.extend(vector.iter().step_by(2));
                deinterleaved.extend(vector.iter().skip(1).step_by(2));
            }
            deinterleaved.extend(rest);
        }
        Self { x: deinterleaved, k }
    }

    /// Computes `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products) does.
    pub(super) fn multiply(&self, w: &[bf16], out: &mut [f32]) {
        let Self { x, k } = self;
        let (m, n) = (x.len() / k, w.len() / k);
        assert!(x.len() == m * k && w.len() == n * k && out.len() == m * n, "operands must be whole rows");
        assert!(instruction_set::is_supported(InstructionSet::Avx2), "checked when it was chosen");
        out.fill(0.0);
        for (i, w) in w.chunks(WEIGHTS * k).enumerate() {
            let out = &mut out[i * WEIGHTS..];
            // SAFETY: the processor has the instructions.
            unsafe {
                if w.len() == WEIGHTS * k {
                    pieces::<WEIGHTS>(x, w, out, [*k, n]);
                } else {
                    for (i, w) in w.chunks_exact(*k).enumerate() {
                        pieces::<1>(x, w, &mut out[i..], [*k, n]);
                    }
                }
            }
        }
    }
}

/// Multiplies all rows of activations with N rows of weights, a piece at a time.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx2,fma")]
unsafe fn pieces<const N: usize>(x: &[f32], w: &[bf16], out: &mut [f32], [k, n]: [usize; 2]) {
    for at in (0..k).step_by(PIECE) {
        let width = PIECE.min(k - at);
        let (mut x, mut out, mut is_first) = (x, &mut *out, true);
        while !x.is_empty() {
            let rows = if x.len() >= ROWS * k { ROWS } else { 1 };
            // SAFETY: the processor has the instructions.
            unsafe {
                match (rows, is_first) {
                    (ROWS, true) => tile::<ROWS, N, true>(x, w, out, [k, n, at, width]),
                    (ROWS, false) => tile::<ROWS, N, false>(x, w, out, [k, n, at, width]),
                    (_, true) => tile::<1, N, true>(x, w, out, [k, n, at, width]),
                    (_, false) => tile::<1, N, false>(x, w, out, [k, n, at, width]),
                }
            }
            is_first = false;
            x = &x[rows * k..];
            out = &mut out[if x.is_empty() { 0 } else { rows * n }..];
        }
    }
}

/// Adds the products of `width` elements from `at` on of M rows of activations and N rows of weights; rows of `out` are `n`
/// apart. `FETCH`: prefetches the weights of the next N rows, in the order of memory.
///
/// # Safety
/// The processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize, const N: usize, const FETCH: bool>(
    x: &[f32],
    w: &[bf16],
    out: &mut [f32],
    [k, n, at, width]: [usize; 4],
) {
    assert!(x.len() >= M * k && w.len() == N * k && at + width <= k);
    let seconds = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
    let mut sums = [[_mm256_setzero_ps(); N]; M];
    let whole = width / LANES * LANES;
    // SAFETY: the loads read elements of rows of k, and none past their ends. A prefetch may use any address.
    unsafe {
        for i in (at..at + whole).step_by(LANES) {
            if FETCH {
                for line in (0..N * LANES).step_by(LINE) {
                    _mm_prefetch::<_MM_HINT_T1>(w.as_ptr().wrapping_add(N * (k + i) + line).cast());
                }
            }
            let mut xs = [[_mm256_setzero_ps(); 2]; M];
            for (r, xs) in xs.iter_mut().enumerate() {
                let x = x.as_ptr().add(r * k + i);
                *xs = [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(LANES / 2))];
            }
            for row in 0..N {
                let w = w.as_ptr().add(row * k + i);
                let pairs = _mm256_loadu_si256(w.cast());
                let first = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                let second = _mm256_castsi256_ps(_mm256_and_si256(pairs, seconds));
                for (sums, [first_x, second_x]) in sums.iter_mut().zip(xs) {
                    sums[row] = _mm256_fmadd_ps(first_x, first, sums[row]);
                    sums[row] = _mm256_fmadd_ps(second_x, second, sums[row]);
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (row, sum) in sums.iter().enumerate() {
            let mut lanes = [0.0f32; LANES / 2];
            // SAFETY: the array is a vector long.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), *sum) };
            let [a, b, c, d, e, f, g, h] = lanes;
            let mut total = ((a + e) + (c + g)) + ((b + f) + (d + h));
            for i in at + whole..at + width {
                total += x[r * k + i] * w[row * k + i].to_f32();
            }
            out[r * n + row] += total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_several_pieces_have_the_sums_of_f64() {
        if !instruction_set::is_supported(InstructionSet::Avx2) {
            return;
        }
        let value = |i: usize| bf16::from_f32(((i * 7919 + i / 31) % 1009) as f32 / 400.0 - 1.25);
        for (k, n, m) in [(PIECE, 4, 1), (2 * PIECE + 5, 9, 3), (3 * PIECE - 1, 5, 4)] {
            let w: Vec<bf16> = (0..n * k).map(value).collect();
            let x: Vec<f32> = (0..m * k).map(|i| value(i + 5).to_f32()).collect();
            let mut out = vec![f32::NAN; m * n];
            Prepared::new(&x, k).multiply(&w, &mut out);
            for (i, got) in out.iter().enumerate() {
                let terms = x[i / n * k..][..k].iter().zip(&w[i % n * k..]);
                let want: f64 = terms.map(|(x, w)| f64::from(*x) * w.to_f64()).sum();
                assert!(
                    (f64::from(*got) - want).abs() <= 2e-2,
                    "{m} x {k} x {n}, result {i}: {got}, not {want}"
                );
            }
        }
    }
}
