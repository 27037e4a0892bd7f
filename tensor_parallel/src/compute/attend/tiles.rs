//! Attention with the tiles of the processor (AMX). Queries and the weights of the values are rounded to bf16, as the products
//! require.

use std::ops::Range;

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use super::{BLOCK, Cached, Queries, Softmax, within};
use crate::compute::product::amx::{DEPTH, Rows, SIDE, Tile, TileProducts, pack};
use crate::compute::rows::vectorized;
use crate::float::Float;
use crate::memory;

/// Queries and elements of a head are processed in pairs of tiles.
const PAIR: usize = 2 * SIDE;
/// The exponent of a bf16 that is not finite.
const INFINITE: u16 = 0x7f80;
/// Number of steps in the products of weights and values.
const STEPS: usize = BLOCK / DEPTH;

/// Returns true if the queries have a suitable length.
pub(super) fn fit(queries: &Queries<'_>) -> bool {
    queries.head_dim.is_multiple_of(PAIR)
}

/// Computes the attention of queries with the cached keys and values of their head.
pub(super) fn attend(
    tiles: &impl TileProducts,
    arch: Arch,
    queries: Queries<'_>,
    Cached { keys, values, at }: Cached<'_, [bf16]>,
) {
    let positions = queries.positions();
    let Queries { rows, seen, head_dim, out } = queries;
    let count = out.len() / head_dim;
    let shared = count / rows.len();
    let padded = count.next_multiple_of(PAIR);
    let mut scaled = memory::zeros::<bf16>(padded * head_dim);
    for (to, from) in scaled.chunks_mut(shared * head_dim).zip(rows) {
        scale(arch, from, 1.0 / (head_dim as f32).sqrt(), &mut to[..from.len()]);
    }
    let mut scores = memory::zeros::<f32>(padded * BLOCK);
    let mut weights = memory::zeros::<bf16>(padded * BLOCK);
    let mut sums = memory::zeros::<f32>(padded * head_dim);
    let mut softmax = vec![Softmax::EMPTY; count];
    // A block of keys takes as many tiles as a block of values.
    let mut packed = memory::zeros::<u32>(SIDE * SIDE * BLOCK * head_dim / (SIDE * DEPTH));
    let packed: &mut [Tile] = packed.as_chunks_mut().0;
    for first in positions.clone().step_by(BLOCK) {
        let last = positions.end.min(first + BLOCK);
        let elements = at(first..last);
        let [keys, values] = [keys, values].map(|all| &all[elements.clone()]);
        pack_keys(keys, head_dim, packed);
        product(tiles, (&scaled, head_dim), packed, &mut scores, false);
        let of_rows = scores.chunks_mut(shared * BLOCK).zip(weights.chunks_mut(shared * BLOCK));
        let of_rows = of_rows.zip(sums.chunks_mut(shared * head_dim)).zip(softmax.chunks_mut(shared));
        for ((((scores, weights), sums), softmax), seen) in of_rows.zip(&seen) {
            weigh(arch, scores, weights, sums, softmax, within(seen, first..last));
        }
        let mut are_finite = true;
        pack_values(arch, values, head_dim, packed, &mut are_finite);
        product(tiles, (&weights, BLOCK), packed, &mut sums, true);
        if are_finite {
            continue;
        }
        // Only queries that attend to an infinity add it: infinity times a weight of zero is NaN.
        for (i, (scores, sums)) in
            scores.chunks_exact(BLOCK).zip(sums.chunks_exact_mut(head_dim)).take(count).enumerate()
        {
            for at in within(&seen[i / shared], first..last) {
                let values = sums.iter_mut().zip(&values[at * head_dim..]);
                for (sum, value) in values.filter(|(_, value)| !value.is_finite()) {
                    *sum += scores[at] * value.to_f32();
                }
            }
        }
    }
    for ((out, sums), softmax) in
        out.chunks_exact_mut(head_dim).zip(sums.chunks_exact(head_dim)).zip(&softmax)
    {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum / softmax.sum;
        }
    }
}

/// Computes the product of rows of length `depth` with packed columns. Adds it to the content of the output if `adds`.
fn product(
    tiles: &impl TileProducts,
    (rows, depth): (&[bf16], usize),
    packed: &[Tile],
    out: &mut [f32],
    adds: bool,
) {
    let steps = depth / DEPTH;
    let columns = packed.len() / steps * SIDE;
    for (values, out) in rows.chunks_exact(PAIR * depth).zip(out.chunks_exact_mut(PAIR * columns)) {
        for (i, pair) in packed.chunks_exact(2 * steps).enumerate() {
            let pair = [&pair[..steps], &pair[steps..]];
            tiles.two_by_two(
                Rows { values, stride: depth },
                pair,
                (&mut out[i * PAIR..], columns),
                adds,
                Rows::NONE,
                false,
            );
        }
    }
}

/// Packs keys as columns: for each 16 keys, tiles along the head. Keys that are missing in the block are zeros.
fn pack_keys(keys: &[bf16], head_dim: usize, packed: &mut [Tile]) {
    let mut groups = keys.chunks(SIDE * head_dim);
    for tiles in packed.chunks_exact_mut(head_dim / DEPTH) {
        pack(&groups.next().unwrap_or_default().chunks_exact(head_dim), tiles);
    }
}

vectorized! {
    /// Multiplies rows by a factor and rounds them to the nearest values.
    fn scale<'a>(from: &'a [f32], factor: f32, to: &'a mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Float::narrow(from * factor);
        }
    }

    /// Adds the scores of a block to the softmax of queries that attend to the same keys of it, and rounds their weights.
    fn weigh<'a>(
        scores: &'a mut [f32],
        weights: &'a mut [bf16],
        sums: &'a mut [f32],
        softmax: &'a mut [Softmax],
        seen: Range<usize>,
    ) {
        let head_dim = sums.len() / softmax.len();
        let of_queries = scores.chunks_exact_mut(BLOCK).zip(weights.chunks_exact_mut(BLOCK));
        for (((scores, weights), sums), softmax) in of_queries.zip(sums.chunks_exact_mut(head_dim)).zip(softmax) {
            softmax.add(scores, seen.clone(), sums);
            Float::narrow_into(scores, weights);
        }
    }

    /// Packs values as columns of their elements: for each 16 elements of the head, tiles along the positions, in which a word
    /// holds the elements of two positions. Values that are missing in the block or not finite are zeros.
    fn pack_values<'a>(values: &'a [bf16], head_dim: usize, packed: &'a mut [Tile], are_finite: &'a mut bool) {
        let bits: &[u16] = bytemuck::cast_slice(values);
        let mut pairs = bits.chunks(2 * head_dim);
        let mut lost = [0; SIDE];
        for at in 0..BLOCK / 2 {
            let (step, row) = (at / SIDE, at % SIDE);
            let pair = pairs.next().unwrap_or_default();
            let (even, odd) = pair.split_at(head_dim.min(pair.len()));
            for (column, tiles) in packed.chunks_exact_mut(STEPS).enumerate() {
                let of = |position: &[u16]| {
                    let elements = position.get(column * SIDE..).and_then(<[u16]>::first_chunk::<SIDE>);
                    elements.copied().unwrap_or_default()
                };
                let (even, odd): ([u16; SIDE], _) = (of(even), of(odd));
                let words = &mut tiles[step][row * SIDE..][..SIDE];
                for (((word, even), odd), lost) in words.iter_mut().zip(even).zip(odd).zip(&mut lost) {
                    let [low, high] = [even, odd].map(|bits| if bits & INFINITE == INFINITE { 0 } else { bits });
                    *word = u32::from(low) | u32::from(high) << 16;
                    *lost |= low ^ even | high ^ odd;
                }
            }
        }
        *are_finite = lost == [0; SIDE];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::product::amx::Plain;

    const LENGTH: usize = 150;

    /// Returns values of about 1 that use all bits.
    fn some(count: usize, seed: usize) -> Vec<bf16> {
        let value = |i: usize| ((i * 7919 + i / 31 + seed * 977) % 1009) as f32 / 400.0 - 1.25;
        (0..count).map(|i| bf16::from_f32(value(i))).collect()
    }

    /// Returns the result for each query, and the f64 reference from the same rounded queries.
    fn both(seen: &[Range<usize>], shared: usize, head_dim: usize, values: &[bf16]) -> Vec<[f64; 2]> {
        let keys = some(LENGTH * head_dim, 1);
        let at = |positions: Range<usize>| positions.start * head_dim..positions.end * head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let rows: Vec<f32> =
            some(seen.len() * shared * head_dim, 3).into_iter().map(|value| value.to_f32() / scale).collect();
        let run = |rows: &[f32], seen: &[Range<usize>]| {
            let mut out = vec![0.0; rows.len()];
            let queries = Queries {
                rows: rows.chunks(shared * head_dim).collect(),
                seen: seen.to_vec(),
                head_dim,
                out: &mut out,
            };
            attend(&Plain, Arch::new(), queries, Cached { keys: keys.as_slice(), values, at: &at });
            out
        };
        let out = run(&rows, seen);
        let bits = |out: &[f32]| out.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (i, (row, out)) in rows.chunks(shared * head_dim).zip(out.chunks(shared * head_dim)).enumerate() {
            assert_eq!(bits(&run(row, &seen[i..=i])), bits(out), "row {i} alone and with the others");
        }
        let mut results = Vec::new();
        for (i, (query, out)) in rows.chunks(head_dim).zip(out.chunks(head_dim)).enumerate() {
            let query: Vec<f64> = query.iter().map(|value| bf16::from_f32(value * scale).to_f64()).collect();
            let seen = seen[i / shared].clone();
            let score = |at: usize| {
                query.iter().zip(&keys[at * head_dim..]).map(|(q, k)| q * k.to_f64()).sum::<f64>().exp()
            };
            let scores: Vec<f64> = seen.clone().map(score).collect();
            let sum: f64 = scores.iter().sum();
            results.extend(out.iter().enumerate().map(|(at, out)| {
                let terms = seen
                    .clone()
                    .zip(&scores)
                    .map(|(key, score)| score * values[key * head_dim + at].to_f64());
                [f64::from(*out), terms.sum::<f64>() / sum]
            }));
        }
        results
    }

    #[test]
    fn it_is_that_of_f64_but_for_the_rounding_of_weights() {
        let causal: Vec<_> = (LENGTH - 70..LENGTH).map(|position| 0..position + 1).collect();
        let window: Vec<_> = (60..101).map(|position| position - 30..position + 1).collect();
        for (seen, shared, head_dim) in [(&causal, 1, 64), (&causal, 3, 32), (&window, 2, 96)] {
            for [got, want] in both(seen, shared, head_dim, &some(LENGTH * head_dim, 2)) {
                // The greatest value is 1.25, and a weight is rounded to 8 bits.
                assert!((got - want).abs() < 1.25 / 256.0, "{shared} x {head_dim}: {got} is not {want}");
            }
        }
    }

    #[test]
    fn infinity_reaches_those_who_see_it() {
        let head_dim = 32;
        let seen: Vec<_> = (0..LENGTH).map(|position| 0..position + 1).collect();
        let mut values = some(LENGTH * head_dim, 2);
        values[100 * head_dim + 5] = bf16::INFINITY;
        for (at, [got, _]) in both(&seen, 1, head_dim, &values).into_iter().enumerate() {
            let is_seen = at / head_dim >= 100 && at % head_dim == 5;
            assert_eq!(got == f64::INFINITY, is_seen, "row {}, element {}", at / head_dim, at % head_dim);
            assert_eq!(got.is_finite(), !is_seen);
        }
    }
}
