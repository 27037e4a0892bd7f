//! Products of bf16 with AVX-512's dot products of pairs. Weights are read in place. A vector holds 4 elements of each of 8
//! activation rows, and is multiplied by the same 4 elements of a weight row. So a tile needs few loads for its products, and its
//! sums need few additions at the end. Fewer rows take the same instructions: memory limits them.

#![expect(
    unsafe_code,
    reason = "instructions that the caller must know the processor to have, and raw loads"
)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi64,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_ps,
};

use half::bf16;

use super::fetch::fetch;
use super::instruction_set;
use crate::memory::{self, Array};
use crate::threads::{PARALLEL_THRESHOLD, Threads};
use ryzanstein_config::InstructionSet;

/// Activation rows in a vector.
const ROWS: usize = 8;
/// Elements of each row in a vector.
const DEPTH: usize = 4;
/// Elements in a vector.
const LANES: usize = ROWS * DEPTH;
/// Weight rows in a tile, which has an accumulator for each of them and each group of activation rows.
const WEIGHTS: usize = 8;
/// The maximum number of groups of activation rows in a tile: with 8 by 3, 11 loads feed 24 products.
const GROUPS: usize = 3;
/// Weight rows that are multiplied together: they stay in the second-level cache for all activations.
const WEIGHT_ROWS: usize = 48;
/// Bytes of activations that one pass uses. They share the second-level cache with the weight rows.
const ACTIVATION_BYTES: usize = 256 << 10;
/// Activations in the order in which they are multiplied: groups of 8 rows, 4 elements of each row in turn, with zeros after the
/// last elements and the last row.
pub(super) struct Packed {
    values: Array<bf16>,
    rows: usize,
    columns: usize,
}

impl Packed {
    /// Packs `x`, which is rows of length `k`.
    pub(super) fn new(threads: &Threads, x: &[bf16], k: usize) -> Self {
        let (rows, width) = (x.len() / k, k.next_multiple_of(DEPTH));
        assert!(x.len() == rows * k, "operands must be whole rows");
        let count = rows.next_multiple_of(ROWS) * width;
        let values = memory::built(count, |all| {
            let groups = all.chunks(ROWS * width).zip(x.chunks(ROWS * k));
            threads.for_each(x.len() >= PARALLEL_THRESHOLD, groups, |(group, x)| {
                let vectors = group.zeros().as_chunks_mut::<LANES>().0;
                for (r, row) in x.chunks_exact(k).enumerate() {
                    let (whole, rest) = row.as_chunks::<DEPTH>();
                    for (vector, part) in vectors.iter_mut().zip(whole) {
                        vector[r * DEPTH..][..DEPTH].copy_from_slice(part);
                    }
                    if let Some(vector) = vectors.get_mut(whole.len()) {
                        vector[r * DEPTH..][..rest.len()].copy_from_slice(rest);
                    }
                }
            });
        });
        Self { values, rows, columns: k }
    }
}

/// Computes `out[r * n + i] = w[i] · x[r]`. The bits of a sum do not depend on the other rows.
pub(super) fn multiply(x: &Packed, w: &[bf16], out: &mut [f32]) {
    let k = x.columns;
    let n = w.len() / k;
    assert!(w.len() == n * k && out.len() == x.rows * n, "operands must be whole rows");
    assert!(instruction_set::is_supported(InstructionSet::Avx512Bf16), "checked when it was chosen");
    let width = k.next_multiple_of(DEPTH);
    let group = ROWS * width;
    let part = (ACTIVATION_BYTES / (2 * group)).max(1).next_multiple_of(GROUPS);
    // The last rows, padded with zeros.
    let strip = WEIGHTS * k;
    let mut padded = w[w.len() / strip * strip..].to_vec();
    padded.resize(padded.len().next_multiple_of(strip), bf16::ZERO);
    let strips: Vec<&[bf16]> = w.chunks_exact(strip).chain(padded.chunks(strip)).collect();
    for (at, strips) in strips.chunks(WEIGHT_ROWS / WEIGHTS).enumerate() {
        for (first, x_part) in x.values.chunks(part * group).enumerate() {
            for (i, w) in strips.iter().enumerate() {
                let column = at * WEIGHT_ROWS + i * WEIGHTS;
                for (beside, groups) in x_part.chunks(GROUPS * group).enumerate() {
                    let row = (first * part + beside * GROUPS) * ROWS;
                    let count = groups.len() / group;
                    // SAFETY: the processor has the instructions.
                    let sums = unsafe {
                        match count {
                            3 => tile::<3>(groups, w, k),
                            2 => tile::<2>(groups, w, k),
                            _ => tile::<1>(groups, w, k),
                        }
                    };
                    let columns = WEIGHTS.min(n - column);
                    for (r, sums) in (row..x.rows).zip(sums[..count].as_flattened()) {
                        out[r * n + column..][..columns].copy_from_slice(&sums[..columns]);
                    }
                }
            }
        }
    }
}

/// Computes the sums of [`WEIGHTS`] rows with each row of `C` groups; those of the other groups are zeros.
///
/// # Safety
/// The processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile<const C: usize>(x: &[bf16], w: &[bf16], k: usize) -> [[[f32; WEIGHTS]; ROWS]; GROUPS] {
    let group = ROWS * k.next_multiple_of(DEPTH);
    assert!(x.len() == C * group && w.len() == WEIGHTS * k);
    let x = x.as_ptr();
    let mut sums = [[_mm512_setzero_ps(); C]; WEIGHTS];
    let whole = k / DEPTH * DEPTH;
    for line in (0..whole).step_by(LANES) {
        // The next rows in the order of memory: processors do not prefetch several short rows on their own.
        for next in 0..WEIGHTS {
            fetch(w.as_ptr().wrapping_add(WEIGHTS * (k + line) + next * LANES));
        }
        for i in (line..whole.min(line + LANES)).step_by(DEPTH) {
            let mut xs = [_mm512_setzero_si512(); C];
            for (c, to) in xs.iter_mut().enumerate() {
                // SAFETY: each group has a vector for each part of a row.
                *to = unsafe { _mm512_loadu_si512(x.add(c * group + i * ROWS).cast()) };
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: row r has 4 elements from i on.
                let w = unsafe { w.as_ptr().add(r * k + i).cast::<i64>().read_unaligned() };
                let w = pairs(_mm512_set1_epi64(w));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = _mm512_dpbf16_ps(*sum, pairs(x), w);
                }
            }
        }
    }
    if whole < k {
        let mut weights = [0; WEIGHTS];
        for (to, row) in weights.iter_mut().zip(w.chunks_exact(k)) {
            for (at, w) in row[whole..].iter().enumerate() {
                *to |= i64::from(w.to_bits()) << (16 * at);
            }
        }
        for c in 0..C {
            // SAFETY: each group has a vector for each part of a row.
            let x = unsafe { _mm512_loadu_si512(x.add(c * group + whole * ROWS).cast()) };
            for (sums, w) in sums.iter_mut().zip(weights) {
                sums[c] = _mm512_dpbf16_ps(sums[c], pairs(x), pairs(_mm512_set1_epi64(w)));
            }
        }
    }
    let mut out = [[[0.0; WEIGHTS]; ROWS]; GROUPS];
    for (c, out) in out.iter_mut().enumerate().take(C) {
        *out = by_row(&sums.map(|sums| sums[c]));
    }
    out
}

/// Adds two sums of each of 8 activation rows for each weight row. Returns the sums of the weight rows, row by row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn by_row(sums: &[__m512; WEIGHTS]) -> [[f32; WEIGHTS]; ROWS] {
    // In each quarter: two rows with a weight row, then the same rows with the next.
    let pair = |i: usize| {
        let [a, b] = [sums[i], sums[i + 1]];
        _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xDD>(a, b))
    };
    let [a, b, c, d] = [pair(0), pair(2), pair(4), pair(6)];
    // In each quarter: a row with four weight rows.
    let quarters = [
        [_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0x88>(c, d)],
        [_mm512_shuffle_ps::<0xDD>(a, b), _mm512_shuffle_ps::<0xDD>(c, d)],
    ];
    // SAFETY: both are the same number of bytes of any content.
    let quarters: [[[[f32; 4]; 4]; 2]; 2] = unsafe { std::mem::transmute(quarters) };
    let mut out = [[0.0; WEIGHTS]; ROWS];
    for (r, out) in out.iter_mut().enumerate() {
        for (half, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *out = quarters[r % 2][half][r / 2];
        }
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(x: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of any content.
    unsafe { std::mem::transmute(x) }
}
