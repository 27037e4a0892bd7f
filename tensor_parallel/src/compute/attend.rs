//! Attention on the processor.

use rayon::prelude::*;

use super::{AttentionCall, skinny};
use crate::attention::LayerCache;
use crate::dtype::Float;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, with_elements};

pub(super) fn attention(
    threads: usize,
    qkv: Tensor,
    call: &AttentionCall<'_>,
    cache: &mut LayerCache,
) -> Result<Tensor> {
    let &AttentionCall { heads, kv_heads, head_dim, rotary, position, window } = call;
    let rows = qkv.rows();
    let width = (heads + 2 * kv_heads) * head_dim;
    let fits = qkv.columns() == width
        && kv_heads > 0
        && heads.is_multiple_of(kv_heads)
        && rotary.positions() == rows
        && cache.fits(kv_heads, position + rows, head_dim);
    if !fits {
        return Err(Error::input(format!(
            "attention: {heads} query and {kv_heads} key/value heads of {head_dim} with input {:?} at position \
             {position} do not fit a cache of {:?}",
            qkv.shape(),
            cache.keys.shape()
        )));
    }
    let dtype = qkv.dtype();
    let mut values = match qkv.cast(crate::Dtype::F32).storage {
        crate::tensor::Storage::F32(values) => values,
        _ => Vec::new(),
    };
    let scale = 1.0 / (head_dim as f32).sqrt();
    for (i, row) in values.chunks_exact_mut(width).enumerate() {
        let (rotated, _) = row.split_at_mut((heads + kv_heads) * head_dim);
        for head in rotated.chunks_exact_mut(head_dim) {
            rotary.rotate(i, head);
        }
        store(cache, &row[heads * head_dim..], position + i, kv_heads, head_dim);
    }

    let mut out = vec![0.0; rows * heads * head_dim];
    let shared = heads / kv_heads;
    let capacity = cache.capacity();
    let one = |(index, out): (usize, &mut [f32])| {
        let (row, head) = (index / heads, index % heads);
        let query = &values[row * width + head * head_dim..][..head_dim];
        let end = position + row + 1;
        let start = window.map_or(0, |w| end.saturating_sub(w));
        let base = (head / shared) * capacity;
        let seen = (base + start) * head_dim..(base + end) * head_dim;
        attend(query, scale, cache, seen, out);
    };
    // Work grows with what is seen; a second thread costs some microseconds.
    if threads > 1 && rows * heads * head_dim * (position + rows) >= 1 << 17 {
        out.par_chunks_exact_mut(head_dim).enumerate().for_each(one);
    } else {
        out.chunks_exact_mut(head_dim).enumerate().for_each(one);
    }
    Tensor::new(&[rows, heads * head_dim], out, dtype)
}

/// Puts the keys and values of one position into the cache, rounded to its type.
fn store(cache: &mut LayerCache, kv: &[f32], position: usize, kv_heads: usize, head_dim: usize) {
    let capacity = cache.capacity();
    let (keys, values) = kv.split_at(kv_heads * head_dim);
    for (target, source) in [(&mut cache.keys, keys), (&mut cache.values, values)] {
        with_elements!(&mut target.storage, to => {
            for (head, from) in source.chunks_exact(head_dim).enumerate() {
                let at = (head * capacity + position) * head_dim;
                for (to, from) in to[at..at + head_dim].iter_mut().zip(from) {
                    *to = Float::narrow(*from);
                }
            }
        });
    }
}

/// Softmax of the query's products with the keys, as weights of the values. `seen` are elements of the cache.
fn attend(query: &[f32], scale: f32, cache: &LayerCache, seen: std::ops::Range<usize>, out: &mut [f32]) {
    let head_dim = query.len();
    let mut wide = vec![0.0; head_dim];
    let mut scores = Vec::with_capacity(seen.len() / head_dim);
    with_elements!(&cache.keys.storage, keys => {
        for key in keys[seen.clone()].chunks_exact(head_dim) {
            Float::widen_into(key, &mut wide);
            scores.push(skinny::dot(query, &wide) * scale);
        }
    });
    let greatest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in &mut scores {
        *score = (*score - greatest).exp();
        sum += *score;
    }
    with_elements!(&cache.values.storage, values => {
        for (value, score) in values[seen].chunks_exact(head_dim).zip(&scores) {
            Float::widen_into(value, &mut wide);
            let share = score / sum;
            for (out, value) in out.iter_mut().zip(&wide) {
                *out += share * value;
            }
        }
    });
}
