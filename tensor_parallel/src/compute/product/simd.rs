//! Products with the processor's vectors, for any element type. Weights are widened in pieces that stay in the first-level cache,
//! and each piece is multiplied with several activation rows.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use ryzanstein_process_group::Element as _;

use super::totals::totals;
use crate::float::Float;

/// Weights of a row that are widened at a time.
const PIECE: usize = 1024;
/// Weight rows in a tile of sums.
const TILE: usize = 4;

/// The maximum number of activation rows for which this is faster than a blocked product.
pub(super) const MOST_ROWS: usize = 32;

/// Computes `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products) does.
pub(super) fn multiply<T: Float>(arch: Arch, x: &[f32], w: &[T], out: &mut [f32], k: usize) {
    assert!(x.len().is_multiple_of(k) && w.len().is_multiple_of(k), "operands must be whole rows");
    arch.dispatch(Product { x, w, out, k });
}

struct Product<'a, T> {
    x: &'a [f32],
    w: &'a [T],
    out: &'a mut [f32],
    k: usize,
}

impl<T: Float> WithSimd for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, w, out, k } = self;
        let n = w.len() / k;
        let mut buffer = [0.0f32; TILE * PIECE];
        out.fill(0.0);
        let tiles = w.chunks_exact(TILE * k);
        let last = tiles.remainder();
        for (i, w) in tiles.enumerate() {
            pieces::<S, T, TILE>(simd, x, w, &mut buffer, &mut out[i * TILE..], [k, n]);
        }
        for (i, w) in last.chunks_exact(k).enumerate() {
            pieces::<S, T, 1>(simd, x, w, &mut buffer, &mut out[n / TILE * TILE + i..], [k, n]);
        }
    }
}

/// Multiplies all activation rows with R weight rows, a piece at a time.
#[inline(always)]
fn pieces<S: Simd, T: Float, const R: usize>(
    simd: S,
    x: &[f32],
    w: &[T],
    buffer: &mut [f32; TILE * PIECE],
    out: &mut [f32],
    [k, n]: [usize; 2],
) {
    for at in (0..k).step_by(PIECE) {
        let width = PIECE.min(k - at);
        let mut wide: [&[f32]; R] = [&[]; R];
        let mut rest = &mut buffer[..];
        // R is a constant, so this loop is unrolled. Iterating over the rows of a slice makes the compiler gather addresses in
        // vectors, which takes longer than the product.
        for (r, wide) in wide.iter_mut().enumerate() {
            let (buffer, others) = rest.split_at_mut(PIECE);
            *wide = widened(&w[r * k + at..][..width], &mut buffer[..width]);
            rest = others;
        }
        strip::<S, R>(simd, x, wide, out, [k, n, at]);
    }
}

/// Adds the products of the elements from `at` on of all activation rows with R pieces of weights.
#[inline(always)]
fn strip<S: Simd, const R: usize>(
    simd: S,
    x: &[f32],
    w: [&[f32]; R],
    out: &mut [f32],
    [k, n, at]: [usize; 3],
) {
    let width = w[0].len();
    let piece = |r: usize| &x[r * k + at..][..width];
    let m = x.len() / k;
    let mut r = 0;
    // 16 sums, 4 weights and an activation need more than 16 registers, the number on x86 without AVX-512.
    let has_room = cfg!(not(target_arch = "x86_64")) || size_of::<S::f32s>() == 64;
    while has_room && r + 4 <= m {
        let sums = simd.vectorize(Tile { x: [piece(r), piece(r + 1), piece(r + 2), piece(r + 3)], w });
        add(sums, &mut out[r * n..], n);
        r += 4;
    }
    while r + 2 <= m {
        add(simd.vectorize(Tile { x: [piece(r), piece(r + 1)], w }), &mut out[r * n..], n);
        r += 2;
    }
    for r in r..m {
        add(simd.vectorize(Tile { x: [piece(r)], w }), &mut out[r * n..], n);
    }
}

#[inline(always)]
fn add<const C: usize, const R: usize>(sums: [[f32; R]; C], out: &mut [f32], n: usize) {
    for (c, sums) in sums.iter().enumerate() {
        let out: &mut [f32; R] = out[c * n..].first_chunk_mut().expect("a row has as many sums as weights");
        for (out, sum) in out.iter_mut().zip(sums) {
            *out += sum;
        }
    }
}

/// The products of each of C rows with each of R, all of one length. A separate function: inlined, its pointers would not stay in
/// registers.
struct Tile<'a, const C: usize, const R: usize> {
    x: [&'a [f32]; C],
    w: [&'a [f32]; R],
}

impl<const C: usize, const R: usize> WithSimd for Tile<'_, C, R> {
    type Output = [[f32; R]; C];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Self { x, w } = self;
        let mut sums = [[simd.splat_f32s(0.0); R]; C];
        let (xs, ws) = (x.map(|x| S::as_simd_f32s(x)), w.map(|w| S::as_simd_f32s(w)));
        let vectors = ws[0].0.len();
        // Slices of this length avoid bounds checks in the loop below.
        let (xv, wv) = (xs.map(|(x, _)| &x[..vectors]), ws.map(|(w, _)| &w[..vectors]));
        for i in 0..vectors {
            for (sums, x) in sums.iter_mut().zip(&xv) {
                for (sum, w) in sums.iter_mut().zip(&wv) {
                    *sum = simd.mul_add_e_f32s(x[i], w[i], *sum);
                }
            }
        }
        // Loops instead of closures, which would be functions without the instruction set.
        let mut all = [simd.splat_f32s(0.0); 16];
        for (all, sums) in all.chunks_exact_mut(R).zip(&sums) {
            all.copy_from_slice(sums);
        }
        let totals = totals(simd, all, C * R);
        let mut out = [[0.0; R]; C];
        for (out, totals) in out.iter_mut().zip(totals.chunks_exact(R)) {
            out.copy_from_slice(totals);
        }
        if ws[0].1.is_empty() {
            return out;
        }
        for ((out, totals), (_, x_rest)) in out.iter_mut().zip(totals.chunks_exact(R)).zip(xs) {
            for ((out, total), (_, w_rest)) in out.iter_mut().zip(totals).zip(ws) {
                let mut rest = 0.0;
                for (x, w) in x_rest.iter().zip(w_rest) {
                    rest += x * w;
                }
                *out = total + rest;
            }
        }
        out
    }
}

/// Returns the values of a slice as `f32`: the slice itself if it is `f32`, otherwise widened into the buffer, which has the same
/// length.
#[inline(always)]
fn widened<'a, T: Float>(values: &'a [T], buffer: &'a mut [f32]) -> &'a [f32] {
    if T::DTYPE == f32::DTYPE {
        return bytemuck::cast_slice(values);
    }
    T::widen_into(values, buffer);
    buffer
}

/// Computes `out[r * n + i] = w[i] · x[r]` for all rows of length k of both; n rows of `w`.
#[inline(always)]
pub(in crate::compute) fn all_pairs<S: Simd>(simd: S, x: &[f32], w: &[f32], out: &mut [f32], k: usize) {
    let n = w.len() / k;
    out.fill(0.0);
    for (i, rows) in w.chunks_exact(TILE * k).enumerate() {
        let (two, last) = rows.split_at(2 * k);
        let ((a, b), (c, d)) = (two.split_at(k), last.split_at(k));
        strip::<S, 4>(simd, x, [a, b, c, d], &mut out[i * TILE..], [k, n, 0]);
    }
    debug_assert!(n.is_multiple_of(TILE));
}

/// Adds the rows of `values` in `range` to each row of `sums`, each multiplied by its weight. A row of weights has `stride`
/// elements; a row of `sums` or `values` has `width`, a multiple of the lanes.
#[inline(always)]
pub(in crate::compute) fn add_weighted<S: Simd>(
    simd: S,
    (weights, range): (&[f32], Range<usize>),
    values: &[f32],
    sums: &mut [f32],
    [stride, width]: [usize; 2],
) {
    let values = &values[range.start * width..range.end * width];
    let mut rows = sums.chunks_exact_mut(2 * width);
    let mut pairs = weights.chunks_exact(2 * stride);
    for (sums, weights) in rows.by_ref().zip(pairs.by_ref()) {
        let ((one, other), (w, v)) = (sums.split_at_mut(width), weights.split_at(stride));
        weighted::<S, 2>(simd, [&w[range.clone()], &v[range.clone()]], values, [one, other]);
    }
    let (one, w) = (rows.into_remainder(), pairs.remainder());
    if !one.is_empty() {
        weighted::<S, 1>(simd, [&w[range]], values, [one]);
    }
}

#[inline(always)]
fn weighted<S: Simd, const R: usize>(simd: S, weights: [&[f32]; R], values: &[f32], sums: [&mut [f32]; R]) {
    let width = sums[0].len();
    let mut sums = sums.map(|sums| S::as_mut_simd_f32s(sums).0);
    let vectors = sums[0].len();
    let mut first = 0;
    while first + 4 <= vectors {
        columns::<S, R, 4>(simd, weights, values, &mut sums, [first, width]);
        first += 4;
    }
    for first in first..vectors {
        columns::<S, R, 1>(simd, weights, values, &mut sums, [first, width]);
    }
}

/// Computes [`weighted`] for V vectors of each row, from `first` on.
#[inline(always)]
fn columns<S: Simd, const R: usize, const V: usize>(
    simd: S,
    weights: [&[f32]; R],
    values: &[f32],
    sums: &mut [&mut [S::f32s]; R],
    [first, width]: [usize; 2],
) {
    let mut parts = [[simd.splat_f32s(0.0); V]; R];
    for (parts, sums) in parts.iter_mut().zip(&*sums) {
        parts.copy_from_slice(&sums[first..first + V]);
    }
    let count = weights[0].len();
    let weights = weights.map(|weights| &weights[..count]);
    for (i, value) in values.chunks_exact(width).take(count).enumerate() {
        let value = &S::as_simd_f32s(value).0[first..first + V];
        for (parts, weights) in parts.iter_mut().zip(&weights) {
            let weight = simd.splat_f32s(weights[i]);
            for (part, value) in parts.iter_mut().zip(value) {
                *part = simd.mul_add_e_f32s(weight, *value, *part);
            }
        }
    }
    for (parts, sums) in parts.iter().zip(sums) {
        sums[first..first + V].copy_from_slice(parts);
    }
}
