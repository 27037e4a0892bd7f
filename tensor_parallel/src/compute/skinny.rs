//! Products of few activation rows with a matrix, as in decoding. They are bound by memory, so each weight is read once and
//! widened on the fly, in pieces that stay in the first-level cache.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use pulp::{Arch, Simd, WithSimd};
use ryzanstein_process_group::Element as _;

use crate::float::Float;

/// Weights widened at a time.
const PIECE: usize = 1024;

/// Up to this many activation rows, this is faster than a blocked product.
pub(super) const MOST_ROWS: usize = 32;

/// `out[i, r] = w[i] · x[r]` for the rows of `w` and the rows of `x`, all of length `k`.
pub(super) fn multiply<T: Float>(arch: Arch, x: &[f32], w: &[T], out: &mut [f32], k: usize) {
    arch.dispatch(Skinny { x, w, out, k });
}

struct Skinny<'a, T> {
    x: &'a [f32],
    w: &'a [T],
    out: &'a mut [f32],
    k: usize,
}

impl<T: Float> WithSimd for Skinny<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, w, out, k } = self;
        let m = x.len() / k;
        let mut buffer = [0.0f32; PIECE];
        for (row, out) in w.chunks_exact(k).zip(out.chunks_exact_mut(m)) {
            out.fill(0.0);
            for (i, piece) in row.chunks(PIECE).enumerate() {
                let wide = widened(piece, &mut buffer);
                for (r, out) in out.iter_mut().enumerate() {
                    *out += dot(simd, &x[r * k + i * PIECE..][..wide.len()], wide);
                }
            }
        }
    }
}

/// The values of a slice as `f32`: the slice itself if it is, otherwise in the buffer, which must be as long.
#[inline(always)]
pub(super) fn widened<'a, T: Float>(values: &'a [T], buffer: &'a mut [f32]) -> &'a [f32] {
    if T::DTYPE == f32::DTYPE {
        return bytemuck::cast_slice(values);
    }
    let wide = &mut buffer[..values.len()];
    T::widen_into(values, wide);
    wide
}

/// `x · y` of two slices of one length.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let ((x, x_rest), (y, y_rest)) = (S::as_simd_f32s(x), S::as_simd_f32s(y));
    let ((x, x_left), (y, y_left)) = (x.as_chunks::<4>(), y.as_chunks::<4>());
    // Four sums, so that additions need not wait for each other.
    let mut sums = [simd.splat_f32s(0.0); 4];
    for (x, y) in x.iter().zip(y) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum = simd.mul_add_e_f32s(*x, *y, *sum);
        }
    }
    for ((sum, x), y) in sums.iter_mut().zip(x_left).zip(y_left) {
        *sum = simd.mul_add_e_f32s(*x, *y, *sum);
    }
    let [a, b, c, d] = sums;
    let sum = simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)));
    sum + x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum::<f32>()
}
