//! Products of few activation rows with a matrix: decoding. Bound by memory, so each weight is read once and widened
//! on the way, a piece that stays in the first cache at a time.

use pulp::{Arch, NullaryFnOnce};

use crate::dtype::Float;

/// Weights widened at a time.
const PIECE: usize = 512;
/// Independent sums, so that additions need not wait for each other.
const LANES: usize = 32;

/// The most activation rows for which this is faster than a blocked product.
pub(super) const MOST_ROWS: usize = 4;

/// `out[r, i] = x[r] · w[i]` for the rows `w`, where `out` is laid out `[n, m]`: all products with one weight row
/// are neighbours.
pub(super) fn multiply<T: Float>(arch: Arch, x: &[f32], w: &[T], out: &mut [f32], k: usize) {
    arch.dispatch(Skinny { x, w, out, k });
}

/// `x · y` of two slices of the same length.
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    accumulate(&mut lanes, x, y);
    sum(&lanes)
}

struct Skinny<'a, T> {
    x: &'a [f32],
    w: &'a [T],
    out: &'a mut [f32],
    k: usize,
}

impl<T: Float> NullaryFnOnce for Skinny<'_, T> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the caller's instruction set applies only to what is inlined")]
    fn call(self) {
        let Self { x, w, out, k } = self;
        let m = x.len() / k;
        let mut buffer = [0.0f32; PIECE];
        let mut lanes = [[0.0; LANES]; MOST_ROWS];
        for (row, out) in w.chunks_exact(k).zip(out.chunks_exact_mut(m)) {
            for lanes in &mut lanes[..m] {
                *lanes = [0.0; LANES];
            }
            for (i, piece) in row.chunks(PIECE).enumerate() {
                let wide: &[f32] = if let Ok(same) = bytemuck::try_cast_slice::<T, f32>(piece)
                    && size_of::<T>() == size_of::<f32>()
                {
                    same
                } else {
                    let wide = &mut buffer[..piece.len()];
                    T::widen_into(piece, wide);
                    wide
                };
                for (r, lanes) in lanes[..m].iter_mut().enumerate() {
                    accumulate(lanes, &x[r * k + i * PIECE..][..wide.len()], wide);
                }
            }
            for (out, lanes) in out.iter_mut().zip(&lanes) {
                *out = sum(lanes);
            }
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "the caller's instruction set applies only to what is inlined")]
fn accumulate(lanes: &mut [f32; LANES], x: &[f32], y: &[f32]) {
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    let mut sums = *lanes;
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
        }
    }
    for (sum, (x, y)) in sums.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *sum += x * y;
    }
    *lanes = sums;
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "the caller's instruction set applies only to what is inlined")]
fn sum(lanes: &[f32; LANES]) -> f32 {
    let mut lanes = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
