//! Products with the processor's vectors. Weights of bf16 are widened in registers: in a vector of pairs, a shift turns the first of
//! each pair into an `f32`, a mask the second; activations are deinterleaved once to match. Weights of f16 are widened in pieces that
//! stay in the first-level cache. Each tile of sums multiplies several rows of weights with several of activations.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use pulp::{Arch, Simd, WithSimd};
use ryzanstein_process_group::DType;

use super::fetch::fetch;
use super::totals::totals;
use crate::float::Float;

/// Elements of a row that are multiplied at a time, so that those of a tile's weights stay in the first-level cache.
const PIECE: usize = 1024;
/// Weight rows in a tile of sums, with 32 registers.
const TILE: usize = 6;
/// Weight rows in a tile with 16 registers, and of [`all_pairs`].
const SMALL_TILE: usize = 4;
/// The same for [`Pair`]s, which need registers to be widened.
const SMALL_TILE_OF_PAIRS: usize = 3;
/// Activation rows that are multiplied with all weights before the next ones are.
const ROWS: usize = 64;
/// Activations that stay in the second-level cache while all weights pass: [`ROWS`] pieces.
const STAYING: usize = ROWS * PIECE;

/// Two bf16 that are neighbours in a row: the first one in the lower half.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Pair(u32);

/// Weights as they are stored.
pub(super) trait Weights: Copy {
    /// The items that vectors are loaded from.
    type Item: Item;
    /// True if they are other than the weights, in a buffer.
    const ARE_WIDENED: bool;
    /// Returns the items of a part of a row: the part itself, or in the buffer.
    fn items<'a>(part: &'a [Self], buffer: &'a mut [f32]) -> &'a [Self::Item];
}

impl Weights for Pair {
    type Item = Self;
    const ARE_WIDENED: bool = false;

    #[inline(always)]
    fn items<'a>(part: &'a [Self], _: &'a mut [f32]) -> &'a [Self] {
        part
    }
}

impl<T: Float> Weights for T {
    type Item = f32;
    const ARE_WIDENED: bool = !matches!(T::DTYPE, DType::F32);

    #[inline(always)]
    fn items<'a>(part: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        if !Self::ARE_WIDENED {
            return bytemuck::cast_slice(part);
        }
        T::widen_into(part, &mut buffer[..part.len()]);
        &buffer[..part.len()]
    }
}

/// One or two neighbouring weights of a row, which lie in one lane of a vector.
pub(super) trait Item: Copy {
    /// Number of weights in an item.
    const WEIGHTS: usize;
    type Vector<S: Simd>: Copy;
    /// Returns the whole vectors, and the items that are left.
    fn vectors<S: Simd>(items: &[Self]) -> (&[Self::Vector<S>], &[Self]);
    /// Returns the weight at place `at` of each item.
    fn widened<S: Simd>(simd: S, vector: Self::Vector<S>, at: usize) -> S::f32s;
    /// Returns the weight at place `at`.
    fn weight(self, at: usize) -> f32;
}

impl Item for f32 {
    const WEIGHTS: usize = 1;
    type Vector<S: Simd> = S::f32s;

    #[inline(always)]
    fn vectors<S: Simd>(items: &[Self]) -> (&[S::f32s], &[Self]) {
        S::as_simd_f32s(items)
    }

    #[inline(always)]
    fn widened<S: Simd>(_: S, vector: S::f32s, _: usize) -> S::f32s {
        vector
    }

    #[inline(always)]
    fn weight(self, _: usize) -> f32 {
        self
    }
}

impl Item for Pair {
    const WEIGHTS: usize = 2;
    type Vector<S: Simd> = S::u32s;

    #[inline(always)]
    fn vectors<S: Simd>(items: &[Self]) -> (&[S::u32s], &[Self]) {
        let (vectors, rest) = S::as_simd_u32s(bytemuck::cast_slice(items));
        (vectors, bytemuck::cast_slice(rest))
    }

    #[inline(always)]
    fn widened<S: Simd>(simd: S, vector: S::u32s, at: usize) -> S::f32s {
        simd.transmute_f32s_u32s(if at == 0 {
            simd.wrapping_dyn_shl_u32s(vector, simd.splat_u32s(16))
        } else {
            simd.and_u32s(vector, simd.splat_u32s(0xFFFF_0000))
        })
    }

    #[inline(always)]
    fn weight(self, at: usize) -> f32 {
        f32::from_bits(if at == 0 { self.0 << 16 } else { self.0 & 0xFFFF_0000 })
    }
}

/// Returns rows of length `k` in the order in which [`multiply`] reads them with weights that are [`Pair`]s: of each two vectors,
/// first the elements at even places, then those at odd ones. The rest, which does not fill two vectors, keeps its order.
pub(super) fn deinterleaved(arch: Arch, x: &[f32], k: usize) -> Vec<f32> {
    struct Lanes;
    impl WithSimd for Lanes {
        type Output = usize;
        fn with_simd<S: Simd>(self, _: S) -> usize {
            size_of::<S::f32s>() / size_of::<f32>()
        }
    }
    let together = 2 * arch.dispatch(Lanes);
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(k) {
        let vectors = row.chunks_exact(together);
        let rest = vectors.remainder();
        for vectors in vectors {
            out.extend(vectors.iter().step_by(2));
            out.extend(vectors.iter().skip(1).step_by(2));
        }
        out.extend(rest);
    }
    out
}

/// Computes `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products) does. The other rows of `x` do not change the
/// bits of a result.
pub(super) fn multiply<W: Weights>(arch: Arch, x: &[f32], w: &[W], out: &mut [f32], k: usize) {
    let row = k / W::Item::WEIGHTS;
    assert!(row * W::Item::WEIGHTS == k && x.len().is_multiple_of(k), "rows must be whole items");
    assert!(
        w.len() / row * (x.len() / k) == out.len() && w.len().is_multiple_of(row),
        "operands must be whole rows"
    );
    arch.dispatch(Product { x, w, out, k });
}

struct Product<'a, W> {
    x: &'a [f32],
    w: &'a [W],
    out: &'a mut [f32],
    k: usize,
}

impl<W: Weights> WithSimd for Product<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match W::Item::WEIGHTS {
            _ if has_32_registers::<S>() => self.tiled::<S, TILE>(simd),
            1 => self.tiled::<S, SMALL_TILE>(simd),
            _ => self.tiled::<S, SMALL_TILE_OF_PAIRS>(simd),
        }
    }
}

impl<W: Weights> Product<'_, W> {
    /// Multiplies with tiles of R weight rows.
    #[inline(always)]
    fn tiled<S: Simd, const R: usize>(self, simd: S) {
        let Self { x, w, out, k } = self;
        let row = k / W::Item::WEIGHTS;
        let n = w.len() / row;
        let mut buffer = vec![0.0; if W::ARE_WIDENED { TILE * PIECE } else { 0 }];
        out.fill(0.0);
        for (x, out) in x.chunks(ROWS * k).zip(out.chunks_mut(ROWS * n)) {
            let width = (STAYING / (x.len() / k) / PIECE * PIECE).max(PIECE);
            for from in (0..k).step_by(width) {
                let part = from..k.min(from + width);
                let tiles = w.chunks_exact(R * row);
                let last = tiles.remainder();
                for (i, w) in tiles.enumerate() {
                    let out = &mut out[i * R..];
                    pieces::<S, W, R>(simd, x, w, &mut buffer, out, (part.clone(), [k, n]));
                }
                for (i, w) in last.chunks_exact(row).enumerate() {
                    let out = &mut out[n / R * R + i..];
                    pieces::<S, W, 1>(simd, x, w, &mut buffer, out, (part.clone(), [k, n]));
                }
            }
        }
    }
}

/// Returns true unless vectors are those of x86 without AVX-512, which has 16 registers: too few for large tiles.
const fn has_32_registers<S: Simd>() -> bool {
    cfg!(not(target_arch = "x86_64")) || size_of::<S::f32s>() == 64
}

/// Multiplies a part of all activation rows with that of R weight rows, a piece at a time.
#[inline(always)]
fn pieces<S: Simd, W: Weights, const R: usize>(
    simd: S,
    x: &[f32],
    w: &[W],
    buffer: &mut [f32],
    out: &mut [f32],
    (part, [k, n]): (Range<usize>, [usize; 2]),
) {
    let per = W::Item::WEIGHTS;
    let end = part.end;
    for at in part.step_by(PIECE) {
        let width = PIECE.min(end - at);
        let mut items: [&[W::Item]; R] = [&[]; R];
        let mut rest = &mut *buffer;
        // R is a constant, so this loop is unrolled. Iterating over the rows of a slice makes the compiler gather addresses in
        // vectors, which takes longer than the product.
        for (r, items) in items.iter_mut().enumerate() {
            let (buffer, others) = rest.split_at_mut(PIECE.min(rest.len()));
            *items = W::items(&w[(r * k + at) / per..][..width / per], buffer);
            rest = others;
        }
        // Processors do not prefetch the next short rows on their own.
        let next = w.as_ptr().wrapping_add((R * (k + at)) / per).cast();
        strip::<S, W::Item, R>(
            simd,
            x,
            (items, Some(Next { from: next, step: R * size_of::<W>() })),
            out,
            [k, n, at],
        );
    }
}

/// The memory to prefetch while a tile is multiplied.
#[derive(Clone, Copy)]
struct Next {
    from: *const u8,
    /// Bytes for each item.
    step: usize,
}

/// Adds the products of the elements from `at` on of all activation rows with R pieces of weights.
#[inline(always)]
fn strip<S: Simd, I: Item, const R: usize>(
    simd: S,
    x: &[f32],
    (w, mut next): ([&[I]; R], Option<Next>),
    out: &mut [f32],
    [k, n, at]: [usize; 3],
) {
    let width = w[0].len() * I::WEIGHTS;
    let piece = |r: usize| &x[r * k + at..][..width];
    let m = x.len() / k;
    let mut r = 0;
    while has_32_registers::<S>() && r + 4 <= m {
        let sums = simd.vectorize(Tile {
            x: [piece(r), piece(r + 1), piece(r + 2), piece(r + 3)],
            w,
            next: next.take(),
        });
        add(sums, &mut out[r * n..], n);
        r += 4;
    }
    // Fewer registers hold the sums of three rows.
    while r + 3 <= m {
        let x = [piece(r), piece(r + 1), piece(r + 2)];
        add(simd.vectorize(Tile { x, w, next: next.take() }), &mut out[r * n..], n);
        r += 3;
    }
    while r + 2 <= m {
        add(simd.vectorize(Tile { x: [piece(r), piece(r + 1)], w, next: next.take() }), &mut out[r * n..], n);
        r += 2;
    }
    for r in r..m {
        add(simd.vectorize(Tile { x: [piece(r)], w, next: next.take() }), &mut out[r * n..], n);
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
struct Tile<'a, I, const C: usize, const R: usize> {
    x: [&'a [f32]; C],
    w: [&'a [I]; R],
    next: Option<Next>,
}

impl<I: Item, const C: usize, const R: usize> WithSimd for Tile<'_, I, C, R> {
    type Output = [[f32; R]; C];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Self { x, w, next } = self;
        let mut sums = [[simd.splat_f32s(0.0); R]; C];
        let ws = w.map(|w| I::vectors::<S>(w));
        let vectors = ws[0].0.len();
        let (lanes, multiplied) = (size_of::<S::f32s>() / size_of::<f32>(), vectors * I::WEIGHTS);
        // Slices of these lengths avoid bounds checks in the loop below.
        let (xv, wv) = (x.map(|x| &S::as_simd_f32s(x).0[..multiplied]), ws.map(|(w, _)| &w[..vectors]));
        for i in 0..vectors {
            if let Some(Next { from, step }) = next {
                for line in (0..step * lanes).step_by(64) {
                    fetch(from.wrapping_add(i * step * lanes + line));
                }
            }
            for at in 0..I::WEIGHTS {
                let mut xs = [simd.splat_f32s(0.0); C];
                for (x, xv) in xs.iter_mut().zip(&xv) {
                    *x = xv[i * I::WEIGHTS + at];
                }
                for (row, w) in wv.iter().enumerate() {
                    let w = I::widened(simd, w[i], at);
                    for (sums, x) in sums.iter_mut().zip(&xs) {
                        sums[row] = simd.mul_add_e_f32s(*x, w, sums[row]);
                    }
                }
            }
        }
        let mut out = [[0.0; R]; C];
        // Loops instead of closures, which would be functions without the instruction set.
        for (out, sums) in out.as_flattened_mut().chunks_mut(16).zip(sums.as_flattened().chunks(16)) {
            let mut all = [simd.splat_f32s(0.0); 16];
            all[..sums.len()].copy_from_slice(sums);
            out.copy_from_slice(&totals(simd, all, sums.len())[..out.len()]);
        }
        if ws[0].1.is_empty() {
            return out;
        }
        for (out, x) in out.iter_mut().zip(x) {
            for (out, (_, w_rest)) in out.iter_mut().zip(ws) {
                let mut rest = 0.0;
                for (x, w) in x[multiplied * lanes..].chunks_exact(I::WEIGHTS).zip(w_rest) {
                    for (at, x) in x.iter().enumerate() {
                        rest += x * w.weight(at);
                    }
                }
                *out += rest;
            }
        }
        out
    }
}

/// Computes `out[r * n + i] = w[i] · x[r]` for all rows of length k of both; n rows of `w`.
#[inline(always)]
pub(in crate::compute) fn all_pairs<S: Simd>(simd: S, x: &[f32], w: &[f32], out: &mut [f32], k: usize) {
    let n = w.len() / k;
    out.fill(0.0);
    for (i, rows) in w.chunks_exact(SMALL_TILE * k).enumerate() {
        let (two, last) = rows.split_at(2 * k);
        let ((a, b), (c, d)) = (two.split_at(k), last.split_at(k));
        strip::<S, f32, SMALL_TILE>(simd, x, ([a, b, c, d], None), &mut out[i * SMALL_TILE..], [k, n, 0]);
    }
    debug_assert!(n.is_multiple_of(SMALL_TILE));
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
