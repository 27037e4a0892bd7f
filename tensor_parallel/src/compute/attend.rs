//! Attention on the processor.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::operations::{AttentionCall, LayerCache};
use super::product::simd;
use crate::error::Result;
use crate::float::Float;
use crate::storage::{Storage, with_elements};
use crate::tensor::Tensor;
use crate::threads::{PARALLEL_THRESHOLD, Threads};

pub(super) fn attention(
    (threads, arch): (&Threads, Arch),
    qkv: &Tensor,
    call: &AttentionCall<'_>,
    cache: &mut LayerCache,
) -> Result<Tensor> {
    cache.check(qkv, call)?;
    let &AttentionCall { heads, kv_heads, head_dim, batch, window } = call;
    let (slots, rotary) = (batch.slots().slots().collect::<Vec<_>>(), batch.rotations()?);
    let rows = qkv.rows();
    let width = (heads + 2 * kv_heads) * head_dim;
    let mut values = qkv.host_values()?.into_owned();
    for (i, row) in values.chunks_exact_mut(width).enumerate() {
        for head in row[..(heads + kv_heads) * head_dim].chunks_exact_mut(head_dim) {
            rotary.rotate(i, head);
        }
        store(cache, &row[heads * head_dim..], slots[i], (kv_heads, head_dim))?;
    }

    let shared = heads / kv_heads;
    let (keys, cached) = (cache.keys.host()?, cache.values.host()?);
    let mut out = vec![0.0; rows * heads * head_dim];
    let one_head = |(index, out): (usize, &mut [f32])| {
        let (row, head) = (index / heads, index % heads);
        let query = &values[row * width + head * head_dim..][..head_dim];
        let (sequence, position) = slots[row];
        let end = position + 1;
        let start = window.map_or(0, |w| end.saturating_sub(w));
        let seen = cache.offset(sequence, head / shared, start)..cache.offset(sequence, head / shared, end);
        arch.dispatch(OneHead { query, keys, values: cached, seen, out });
    };
    let longest = slots.iter().map(|(_, position)| position + 1).max().unwrap_or(0);
    match threads.pool_if(out.len() * longest >= PARALLEL_THRESHOLD) {
        Some(pool) => {
            pool.install(|| out.par_chunks_exact_mut(head_dim).enumerate().for_each(one_head));
        }
        None => out.chunks_exact_mut(head_dim).enumerate().for_each(one_head),
    }
    Tensor::new(&[rows, heads * head_dim], out, qkv.dtype())
}

/// Writes the keys and values of one position to the cache, rounded to its type.
fn store(
    cache: &mut LayerCache,
    kv: &[f32],
    (sequence, position): (usize, usize),
    (kv_heads, head_dim): (usize, usize),
) -> Result<()> {
    let (keys, values) = kv.split_at(kv_heads * head_dim);
    let starts: Vec<usize> = (0..kv_heads).map(|head| cache.offset(sequence, head, position)).collect();
    for (target, source) in [(&mut cache.keys, keys), (&mut cache.values, values)] {
        with_elements!(target.host_mut()?, to => {
            for (at, from) in starts.iter().copied().zip(source.chunks_exact(head_dim)) {
                for (to, from) in to[at..at + head_dim].iter_mut().zip(from) {
                    *to = Float::narrow(*from);
                }
            }
        });
    }
    Ok(())
}

/// Softmax of a query's products with the keys, as weights of the values.
struct OneHead<'a> {
    query: &'a [f32],
    keys: &'a Storage,
    values: &'a Storage,
    /// The elements of the cache that the query attends to.
    seen: Range<usize>,
    out: &'a mut [f32],
}

impl WithSimd for OneHead<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, lanes: S) {
        let Self { query, keys, values, seen, out } = self;
        let head_dim = query.len();
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut wide = vec![0.0; if matches!(keys, Storage::F32(_)) { 0 } else { head_dim }];
        let mut scores = Vec::with_capacity(seen.len() / head_dim);
        with_elements!(keys, keys => {
            for key in keys[seen.clone()].chunks_exact(head_dim) {
                scores.push(simd::dot(lanes, query, simd::widened(key, &mut wide)) * scale);
            }
        });
        let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in &mut scores {
            *score = (*score - greatest).exp();
            sum += *score;
        }
        with_elements!(values, values => {
            for (value, score) in values[seen].chunks_exact(head_dim).zip(&scores) {
                let share = score / sum;
                for (out, value) in out.iter_mut().zip(simd::widened(value, &mut wide)) {
                    *out += share * value;
                }
            }
        });
    }
}
