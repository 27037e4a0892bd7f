//! Attention on the CPU.
//!
//! Keys are processed in blocks that start at multiples of the block length. Each block is widened or packed once for all queries
//! that attend to it: several rows of a sequence, and all query heads that share a key head. The softmax is computed online, as
//! in `FlashAttention`. The result of a query does not depend on the other queries. Tiles round queries and weights.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use pulp::{Simd, WithSimd};
use ryzanstein_config::InstructionSet;

use super::batch::PAGE_SIZE;
use super::exponential::exp;
use super::host::Host;
use super::operations::{AttentionCall, HeadNorms, LayerCache};
#[cfg(target_arch = "x86_64")]
use super::product::amx::Tiles;
use super::product::simd;
use super::rows::{self, fold};
use crate::error::Result;
use crate::float::Float;
use crate::memory::{self, Array};
use crate::storage::{Storage, with_elements};
use crate::tensor::Tensor;
use crate::threads::PARALLEL_THRESHOLD;

/// Number of keys in a block.
const BLOCK: usize = 64;
/// The maximum number of queries that process a block together.
const QUERIES: usize = 64;
/// The same with tiles. Keys and values are packed once for this number of queries.
const QUERIES_OF_TILES: usize = 128;
/// The maximum number of lanes of a vector. Heads are padded to a multiple of it.
const LANES: usize = 16;

pub(super) fn attention(
    host: &Host,
    qkv: &Tensor,
    call: &AttentionCall<'_>,
    cache: &mut LayerCache,
) -> Result<Tensor> {
    cache.check(qkv, call)?;
    let &AttentionCall { heads, kv_heads, head_dim, batch, window, norms } = call;
    let (slots, rotary) = (batch.slots().rows().collect::<Vec<_>>(), batch.rotations()?);
    let rows = qkv.rows();
    let width = (heads + 2 * kv_heads) * head_dim;
    let stored = qkv.host()?;
    let norms = match norms {
        Some(HeadNorms { queries, keys, epsilon }) => {
            Some((queries.host_values()?, keys.host_values()?, epsilon))
        }
        None => None,
    };
    let rotated: Array<f32> = host.built([rows, width], |i, row| {
        host.widen(stored, i * width..(i + 1) * width, row);
        let (turned, _) = row.split_at_mut((heads + kv_heads) * head_dim);
        if let Some((of_queries, of_keys, epsilon)) = &norms {
            let (queries, keys) = turned.split_at_mut(heads * head_dim);
            rows::normalize_heads(host.products.arch(), queries, of_queries, *epsilon);
            rows::normalize_heads(host.products.arch(), keys, of_keys, *epsilon);
        }
        rows::rotate(host.products.arch(), rotary, i, head_dim, turned);
    });
    let pages = |run: usize| batch.slots().tables(run..run + 1);
    for (row, (run, position)) in rotated.chunks_exact(width).zip(&slots) {
        store(host, cache, &row[heads * head_dim..], (pages(*run), *position), (kv_heads, head_dim))?;
    }

    let group = heads / kv_heads * head_dim;
    let (keys, values) = (cache.keys.host()?, cache.values.host()?);
    let cache = &*cache;
    let queries = if host.products.set() == InstructionSet::Amx { QUERIES_OF_TILES } else { QUERIES };
    let together = (queries * head_dim / group).max(1);
    let some_rows = |head: usize, first: usize, out: &mut [f32]| {
        let (mut first, mut out) = (first, out);
        while !out.is_empty() {
            let run = slots[first].0;
            let those = &slots[first..first + out.len() / group];
            let count = those.iter().take_while(|slot| slot.0 == run).count();
            let (these, others) = out.split_at_mut(count * group);
            let seen = slots[first..first + count]
                .iter()
                .map(|(_, position)| window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1)
                .collect();
            let rows =
                rotated[first * width..].chunks(width).take(count).map(|row| &row[head * group..][..group]);
            let queries = Queries { rows: rows.collect(), seen, head_dim, out: these };
            let at = |positions| cache.elements(pages(run), head, positions);
            attend(host, queries, Cached { keys, values, at: &at });
            (first, out) = (first + count, others);
        }
    };
    let longest = slots.iter().map(|(_, position)| position + 1).max().unwrap_or(0);
    let is_worth_it = rows * heads * head_dim * longest >= PARALLEL_THRESHOLD;
    // The rows of the query heads, by key head.
    let out = memory::built(rows * heads * head_dim, |all| {
        let mut parts = Vec::new();
        for (head, out) in all.chunks((rows * group).max(1)).enumerate() {
            for (part, out) in out.chunks(together * group).enumerate() {
                parts.push((head, part * together, out));
            }
        }
        host.threads.for_each(is_worth_it, parts.into_iter(), |(head, first, out)| {
            some_rows(head, first, out.zeros());
        });
    });
    host.build([rows, heads * head_dim], qkv.dtype(), |row, to| {
        for (head, to) in to.chunks_exact_mut(group).enumerate() {
            to.copy_from_slice(&out[(head * rows + row) * group..][..group]);
        }
    })
}

/// The cached keys and values of one head of a sequence.
struct Cached<'a, T: ?Sized> {
    keys: &'a T,
    values: &'a T,
    /// Returns the elements at positions of one block. A page has whole blocks.
    at: &'a dyn Fn(Range<usize>) -> Range<usize>,
}

const _: () = assert!(PAGE_SIZE.is_multiple_of(BLOCK), "a block lies within a page");

/// Computes attention with tiles, if they suit the elements, otherwise with vectors.
fn attend(host: &Host, queries: Queries<'_>, cached: Cached<'_, Storage>) {
    #[cfg(target_arch = "x86_64")]
    if let (Storage::BF16(k), Storage::BF16(v)) = (cached.keys, cached.values)
        && host.products.set() == InstructionSet::Amx
        && tiles::fit(&queries)
    {
        tiles::attend(
            &Tiles::new(),
            host.products.arch(),
            queries,
            Cached { keys: &**k, values: &**v, at: cached.at },
        );
        return;
    }
    host.products.arch().dispatch(OfVectors { queries, cached });
}

/// Writes the keys and values of one position to the cache, rounded to its type.
fn store(
    host: &Host,
    cache: &mut LayerCache,
    kv: &[f32],
    (pages, position): (&[u32], usize),
    (kv_heads, head_dim): (usize, usize),
) -> Result<()> {
    let (keys, values) = kv.split_at(kv_heads * head_dim);
    let places: Vec<_> =
        (0..kv_heads).map(|head| cache.elements(pages, head, position..position + 1)).collect();
    for (target, source) in [(&mut cache.keys, keys), (&mut cache.values, values)] {
        with_elements!(target.host_mut()?, to => {
            for (at, from) in places.iter().zip(source.chunks_exact(head_dim)) {
                rows::narrow(host.products.arch(), from, &mut to[at.clone()]);
            }
        });
    }
    Ok(())
}

/// Rows of a sequence, with the query heads that share a key head.
struct Queries<'a> {
    rows: Vec<&'a [f32]>,
    /// The positions that each row attends to.
    seen: Vec<Range<usize>>,
    head_dim: usize,
    /// The output, as long as the queries; it is overwritten completely.
    out: &'a mut [f32],
}

impl Queries<'_> {
    /// Returns the range of the keys that any row attends to, rounded down to the start of a block.
    fn positions(&self) -> Range<usize> {
        let start = self.seen.iter().map(|seen| seen.start).min().unwrap_or(0) / BLOCK * BLOCK;
        start..self.seen.iter().map(|seen| seen.end).max().unwrap_or(0)
    }
}

/// Attention of queries with vectors of `f32`.
struct OfVectors<'a> {
    queries: Queries<'a>,
    cached: Cached<'a, Storage>,
}

impl WithSimd for OfVectors<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, lanes: S) {
        let Self { queries, cached } = self;
        let Range { start, end } = queries.positions();
        let Queries { rows, seen, head_dim, out } = queries;
        let width = head_dim.next_multiple_of(LANES);
        let shared = rows.first().map_or(1, |row| row.len() / head_dim);
        let count = rows.len() * shared;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut scaled = vec![0.0; count * width];
        let all = rows.iter().flat_map(|row| row.chunks_exact(head_dim));
        for (to, from) in scaled.chunks_exact_mut(width).zip(all) {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from * scale;
            }
        }
        let mut block = vec![0.0; BLOCK * width];
        let mut scores = vec![0.0; count * BLOCK];
        let mut sums = vec![0.0; count * width];
        let mut softmax = vec![Softmax::EMPTY; count];
        for first in (start..end).step_by(BLOCK) {
            let last = end.min(first + BLOCK);
            let elements = (cached.at)(first..last);
            widen(cached.keys, elements.clone(), head_dim, &mut block);
            simd::all_pairs(lanes, &scaled, &block, &mut scores, width);
            for (i, (scores, sums)) in
                scores.chunks_exact_mut(BLOCK).zip(sums.chunks_exact_mut(width)).enumerate()
            {
                softmax[i].add(scores, within(&seen[i / shared], first..last), sums);
            }
            widen(cached.values, elements, head_dim, &mut block);
            if seen.iter().all(|seen| seen.start <= first && last <= seen.end) {
                simd::add_weighted(lanes, (&scores, 0..last - first), &block, &mut sums, [BLOCK, width]);
                continue;
            }
            // Masked positions are skipped: infinity times a weight of zero is NaN.
            let of_rows = scores.chunks_exact(shared * BLOCK).zip(sums.chunks_exact_mut(shared * width));
            for (seen, (scores, sums)) in seen.iter().zip(of_rows) {
                simd::add_weighted(lanes, (scores, within(seen, first..last)), &block, sums, [BLOCK, width]);
            }
        }
        for ((out, sums), softmax) in
            out.chunks_exact_mut(head_dim).zip(sums.chunks_exact(width)).zip(&softmax)
        {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum / softmax.sum;
            }
        }
    }
}

/// Returns the unmasked positions of a block, relative to its start.
fn within(seen: &Range<usize>, block: Range<usize>) -> Range<usize> {
    seen.start.clamp(block.start, block.end) - block.start
        ..seen.end.clamp(block.start, block.end) - block.start
}

/// Widens elements of a head, each position into a row of the block.
#[inline(always)]
fn widen(stored: &Storage, elements: Range<usize>, head_dim: usize, block: &mut [f32]) {
    let width = block.len() / BLOCK;
    with_elements!(stored, stored => {
        for (to, from) in block.chunks_exact_mut(width).zip(stored[elements].chunks_exact(head_dim)) {
            Float::widen_into(from, &mut to[..head_dim]);
        }
    });
}

/// The running softmax of the scores.
#[derive(Clone, Copy)]
struct Softmax {
    greatest: f32,
    /// Sum of the exponentials, relative to the greatest score.
    sum: f32,
}

impl Softmax {
    const EMPTY: Self = Self { greatest: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns the scores of a block into weights, which are 0 for masked positions, and rescales the earlier sums.
    #[inline(always)]
    fn add(&mut self, scores: &mut [f32], seen: Range<usize>, before: &mut [f32]) {
        let (scores, behind) = scores.split_at_mut(BLOCK);
        debug_assert!(behind.is_empty());
        if seen.start >= seen.end {
            scores.fill(0.0);
            return;
        }
        scores[..seen.start].fill(f32::NEG_INFINITY);
        scores[seen.end..].fill(f32::NEG_INFINITY);
        let mut most = [f32::NEG_INFINITY; LANES];
        for scores in scores.as_chunks::<LANES>().0 {
            for (most, score) in most.iter_mut().zip(scores) {
                *most = if *score > *most { *score } else { *most };
            }
        }
        let greatest = self.greatest.max(fold(most, |a, b| if a > b { a } else { b }));
        let mut sums = [0.0; LANES];
        for scores in scores.as_chunks_mut::<LANES>().0 {
            for (sum, score) in sums.iter_mut().zip(scores) {
                *score = exp(*score - greatest);
                *sum += *score;
            }
        }
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        if greatest > self.greatest {
            // There are no earlier sums in the first block.
            let scale = if self.greatest == f32::NEG_INFINITY { 0.0 } else { exp(self.greatest - greatest) };
            self.sum *= scale;
            for sum in before {
                *sum *= scale;
            }
            self.greatest = greatest;
        }
        self.sum += fold(sums, |a, b| a + b);
    }
}
