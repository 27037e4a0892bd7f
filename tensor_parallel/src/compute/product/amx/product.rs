//! Matrix products with tiles.
//!
//! Weights are read in place. With many activation rows, a part of the depth of each strip of weights is copied first: rows whose
//! distance is a power of two would evict each other from the first-level cache before they are reused.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use super::tiles::{DEPTH, Rows, SIDE, Tile, TileProducts, Tiles, pack, transpose};
use crate::compute::rows::vectorized;
use crate::compute::tree;
use crate::memory::{self, Array};
use crate::threads::{PARALLEL_THRESHOLD, Threads};

/// The minimum number of activation rows for which weights are copied.
const MANY_ROWS: usize = 256;
/// Number of steps of [`DEPTH`] in one part of the depth with many rows. A strip of weights then takes two thirds of the
/// first-level cache.
const STEPS: usize = 16;
/// Number of activation rows in a group, so that their part of the depth stays in the second-level cache with the sums.
const ROWS_TOGETHER: usize = 512;
/// Number of columns that are multiplied together with many rows, so that their sums stay in the second-level cache: half as many
/// with several leaves, of which unfinished sums are kept.
const MOST_COLUMNS: usize = 256;
/// The number of columns that are multiplied together should be a multiple of this.
pub(in crate::compute::product) const GRANULE: usize = PAIR;

/// Weight rows of a strip, and activation rows that it is multiplied by at a time, if they take more than one tile.
const PAIR: usize = 2 * SIDE;
/// Words in a tile.
const WORDS: usize = SIDE * SIDE;
/// Number of sums of one call.
const SUMS: usize = PAIR * PAIR;

/// Activations packed as columns of tiles.
pub(in crate::compute::product) struct Packed {
    /// For each part of the depth and each group of 16 rows, a tile for each step.
    tiles: Array<u32>,
    rows: usize,
    groups: usize,
    /// Number of steps in total, and in each part but the last.
    steps: usize,
    part: usize,
}

impl Packed {
    /// Packs `x`, which is rows of length `k`, a multiple of [`DEPTH`].
    pub(in crate::compute::product) fn new(threads: &Threads, x: &[bf16], k: usize) -> Self {
        assert!(k > 0 && k.is_multiple_of(DEPTH) && x.len().is_multiple_of(k), "whole rows of whole tiles");
        let (rows, steps) = (x.len() / k, k / DEPTH);
        let groups = rows.div_ceil(SIDE);
        let part = if rows < MANY_ROWS { steps } else { STEPS.min(steps) };
        let tiles = memory::built(groups * steps * WORDS, |all| {
            let mut parts = Vec::new();
            for (first, tiles) in (0..steps).step_by(part).zip(all.chunks((groups * part * WORDS).max(1))) {
                let steps = part.min(steps - first);
                parts.extend(
                    tiles
                        .chunks(steps * WORDS)
                        .zip(x.chunks(SIDE * k))
                        .map(|(tiles, rows)| (first, tiles, rows)),
                );
            }
            threads.for_each(x.len() >= PARALLEL_THRESHOLD, parts.into_iter(), |(first, tiles, rows)| {
                pack(&rows.chunks_exact(k).map(|row| &row[first * DEPTH..]), tiles.zeros().as_chunks_mut().0);
            });
        });
        Self { tiles, rows, groups, steps, part }
    }

    /// Returns the number of columns of a product of `leaves` parts that should be multiplied together.
    pub(in crate::compute::product) fn columns_together(&self, leaves: usize) -> usize {
        match leaves {
            1 if self.part == self.steps => usize::MAX,
            1 => MOST_COLUMNS,
            _ => MOST_COLUMNS / 2,
        }
    }

    /// Returns the tiles of a group in the part of the depth that begins with step `first`.
    fn group(&self, first: usize, group: usize) -> &[Tile] {
        let steps = self.part.min(self.steps - first);
        &self.tiles.as_chunks().0[first * self.groups + group * steps..][..steps]
    }
}

/// A block of a product: its rows and columns, and the sums, row by row with a stride.
pub(in crate::compute::product) struct Block<'a> {
    pub(in crate::compute::product) rows: Range<usize>,
    pub(in crate::compute::product) columns: Range<usize>,
    sums: &'a [f32],
    stride: usize,
}

impl Block<'_> {
    /// Iterates over the sums of each row.
    pub(in crate::compute::product) fn sums(&self) -> impl Iterator<Item = &[f32]> {
        self.sums.chunks(self.stride).take(self.rows.len()).map(|row| &row[..self.columns.len()])
    }
}

/// Calls `done` with every block of the product of the rows of `x` with the rows of `w`. With several of both, all of the same shape,
/// their products are added as a [`tree`].
pub(in crate::compute::product) fn multiply(
    arch: Arch,
    x: &[&Packed],
    w: &[&[bf16]],
    done: &mut impl FnMut(Block<'_>),
) {
    multiply_by(&Tiles::new(), arch, x, w, done);
}

fn multiply_by(
    tiles: &impl TileProducts,
    arch: Arch,
    x: &[&Packed],
    w: &[&[bf16]],
    done: &mut impl FnMut(Block<'_>),
) {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::default();
    }
    assert!(w.iter().all(|w| w.len().is_multiple_of(x[0].steps * DEPTH)), "weights must be whole rows");
    SCRATCH.with_borrow_mut(|scratch| {
        if x[0].rows <= SIDE {
            by_ones(tiles, arch, x, w, scratch, done);
        } else {
            by_pairs(tiles, arch, x, w, scratch, done);
        }
    });
}

/// Scratch memory that a thread reuses.
#[derive(Default)]
struct Scratch {
    /// A strip of weights.
    weights: Array<bf16>,
    /// Sums of a tile, or blocks of [`SUMS`].
    sums: Array<f32>,
    /// A transposed block.
    exchanged: Array<f32>,
}

/// Multiplies up to 16 activation rows: each tile of weights is used once.
fn by_ones(
    tiles: &impl TileProducts,
    arch: Arch,
    x: &[&Packed],
    w: &[&[bf16]],
    scratch: &mut Scratch,
    done: &mut impl FnMut(Block<'_>),
) {
    let (k, rows) = (x[0].steps * DEPTH, x[0].rows);
    let (leaves, places) = (x.len(), tree::places(x.len()));
    let Scratch { weights, sums, exchanged } = scratch;
    let strips = if leaves == 1 { 1 } else { w[0].len().div_ceil(SIDE * k) };
    let sums = sums.first(strips * places * WORDS);
    for (leaf, (x, w)) in x.iter().zip(w).enumerate() {
        let mut all = w.chunks(SIDE * k).enumerate().peekable();
        while let Some((strip, mut values)) = all.next() {
            let columns = strip * SIDE..strip * SIDE + values.len() / k;
            if columns.len() < SIDE {
                let (copied, missing) = weights.first(SIDE * k).split_at_mut(values.len());
                copied.copy_from_slice(values);
                missing.fill(bf16::ZERO);
                values = &weights[..SIDE * k];
            }
            let sums = &mut sums[strip % strips * places * WORDS..][..places * WORDS];
            let to = &mut sums[tree::place(leaf, leaves) * WORDS..];
            tiles.one_by_one(Rows { values, stride: k }, x.group(0, 0), to, all.peek().is_some());
            tree::add(arch, sums, WORDS, leaf, leaves);
            if leaf + 1 == leaves {
                let sums = exchange((&sums[..WORDS], SIDE), exchanged);
                done(Block { rows: 0..rows, columns, sums, stride: SIDE });
            }
        }
    }
}

/// Multiplies more activation rows: each tile is used twice.
fn by_pairs(
    tiles: &impl TileProducts,
    arch: Arch,
    x: &[&Packed],
    w: &[&[bf16]],
    scratch: &mut Scratch,
    done: &mut impl FnMut(Block<'_>),
) {
    let Packed { rows: m, groups, steps, part, .. } = *x[0];
    let (k, is_whole) = (steps * DEPTH, part == steps);
    let n = w[0].len() / k;
    let (leaves, places) = (x.len(), tree::places(x.len()));
    let Scratch { weights, sums, exchanged } = scratch;
    let all = groups.div_ceil(2);
    for pairs in
        (0..all).step_by(ROWS_TOGETHER / PAIR).map(|first| first..all.min(first + ROWS_TOGETHER / PAIR))
    {
        let blocks = if is_whole && leaves == 1 { 1 } else { n.div_ceil(PAIR) * pairs.len() };
        let sums = sums.first(blocks * places * SUMS);
        for (leaf, first) in
            (0..leaves).flat_map(|leaf| (0..steps).step_by(part).map(move |first| (leaf, first)))
        {
            let (x, place) = (x[leaf], tree::place(leaf, leaves));
            let depth = first * DEPTH..steps.min(first + part) * DEPTH;
            for (strip, values) in w[leaf].chunks(PAIR * k).enumerate() {
                let rows = values.len() / k;
                let strip_of_weights = if is_whole && rows == PAIR {
                    Rows { values, stride: k }
                } else {
                    let all = weights.first(PAIR * depth.len());
                    let (copied, missing) = all.split_at_mut(rows * depth.len());
                    copy(arch, Rows { values: &values[depth.start..], stride: k }, copied, depth.len());
                    missing.fill(bf16::ZERO);
                    Rows { values: all, stride: depth.len() }
                };
                for (at, pair) in pairs.clone().enumerate() {
                    let block = (strip * pairs.len() + at) % blocks;
                    let sums = &mut sums[block * places * SUMS..][..places * SUMS];
                    let both = [2 * pair, (2 * pair + 1).min(groups - 1)];
                    let next = next_rows(w, k, (leaf, strip, depth.clone()), (at, pairs.len()));
                    tiles.two_by_two(
                        strip_of_weights,
                        both.map(|group| x.group(first, group)),
                        (&mut sums[place * SUMS..], PAIR),
                        first > 0,
                        next,
                        !is_whole,
                    );
                    if depth.end < k {
                        continue;
                    }
                    tree::add(arch, sums, SUMS, leaf, leaves);
                    if leaf + 1 == leaves {
                        let sums = exchange((&sums[..SUMS], PAIR), exchanged);
                        let columns = strip * PAIR;
                        done(Block {
                            rows: pair * PAIR..m.min((pair + 1) * PAIR),
                            columns: columns..columns + rows,
                            sums,
                            stride: PAIR,
                        });
                    }
                }
            }
        }
    }
}

/// Returns the rows that product `at` of `of` prefetches: the next strip at the same depth, or after the last strip the first one
/// at the next depth, or of the next leaf. Prefetches slow loads of tiles least if they are spread over all products.
fn next_rows<'a>(
    w: &[&'a [bf16]],
    k: usize,
    (leaf, strip, depth): (usize, usize, Range<usize>),
    (at, of): (usize, usize),
) -> Rows<'a> {
    let whole = |leaf: usize, strip| w.get(leaf).and_then(|w| w.chunks_exact(PAIR * k).nth(strip));
    let (strip, start) = match whole(leaf, strip + 1) {
        Some(next) => (Some(next), depth.start),
        None if depth.end < k => (whole(leaf, 0), depth.end),
        None => (whole(leaf + 1, 0), 0),
    };
    let rows = PAIR.div_ceil(of).next_multiple_of(4);
    let part = strip.and_then(|strip| strip.chunks(rows * k).nth(at));
    part.map_or(Rows::NONE, |rows| Rows { values: &rows[start..], stride: k })
}

vectorized! {
    /// Copies `width` elements of each row.
    fn copy<'a>(from: Rows<'a>, to: &'a mut [bf16], width: usize) {
        for (from, to) in from.values.chunks(from.stride).zip(to.chunks_exact_mut(width)) {
            // For this constant length, the compiler copies with vectors. A library call for each row takes longer.
            match (from.first_chunk::<{ STEPS * DEPTH }>(), to.first_chunk_mut()) {
                (Some(from), Some(to)) if width == STEPS * DEPTH => *to = *from,
                _ => to.copy_from_slice(&from[..width]),
            }
        }
    }
}

/// Transposes rows of length `stride`.
fn exchange<'a>((sums, stride): (&[f32], usize), to: &'a mut Array<f32>) -> &'a [f32] {
    let to = to.first(sums.len());
    let to_stride = sums.len() / stride;
    let sums: &[u32] = bytemuck::cast_slice(sums);
    let words: &mut [u32] = bytemuck::cast_slice_mut(to);
    for row in (0..to_stride).step_by(SIDE) {
        for column in (0..stride).step_by(SIDE) {
            transpose(
                (&sums[row * stride + column..], stride),
                (&mut words[column * to_stride + row..], to_stride),
            );
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::super::tiles::tests::Plain;
    use super::*;

    #[test]
    fn tiles_cover_every_row_of_both_operands_whatever_their_numbers() {
        // Small integers: their sums are exact in any order.
        let value = |i: usize| bf16::from_f32((i * 7 % 9) as f32 - 4.0);
        for [m, k, n] in [
            [1, 32, 1],
            [16, 64, 32],
            [9, 64, 130],
            [17, 96, 33],
            [33, 32, 70],
            [70, 1024, 100],
            [MANY_ROWS, 2 * DEPTH * STEPS, 64],
            [ROWS_TOGETHER + 17, DEPTH * (STEPS + 3), 33],
        ] {
            for leaves in [1, 6] {
                let x: Vec<bf16> = (0..leaves * m * k).map(value).collect();
                let w: Vec<bf16> = (0..leaves * n * k).map(|i| value(i + i / 5)).collect();
                let threads = Threads::new(1, "test");
                let packed: Vec<_> = x.chunks(m * k).map(|x| Packed::new(&threads, x, k)).collect();
                let parts: Vec<_> = w.chunks(n * k).collect();
                let mut out = vec![f32::NAN; m * n];
                multiply_by(&Plain, Arch::new(), &packed.iter().collect::<Vec<_>>(), &parts, &mut |block| {
                    for (row, sums) in block.rows.clone().zip(block.sums()) {
                        out[row * n..][block.columns.clone()].copy_from_slice(sums);
                    }
                });
                for (r, out) in out.chunks_exact(n).enumerate() {
                    for (i, out) in out.iter().enumerate() {
                        let terms = (0..leaves).flat_map(|leaf| {
                            x[(leaf * m + r) * k..][..k].iter().zip(&w[(leaf * n + i) * k..][..k])
                        });
                        let want: f32 = terms.map(|(x, w)| x.to_f32() * w.to_f32()).sum();
                        assert_eq!(*out, want, "{leaves} x {m} x {k} x {n}: row {r}, column {i}");
                    }
                }
            }
        }
    }
}
