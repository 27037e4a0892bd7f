//! The sums of the elements of vectors.

#![expect(
    unsafe_code,
    clippy::inline_always,
    reason = "instructions that the caller must know the processor to have; an instruction set chosen at run time applies only \
              to what is inlined"
)]

#[cfg(target_arch = "x86_64")]
use std::any::TypeId;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_shuffle_f32x4, _mm512_unpackhi_pd,
    _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use pulp::Simd;

/// The sum of the elements of each of the first `count` vectors.
#[inline(always)]
pub(super) fn totals<S: Simd>(simd: S, vectors: [S::f32s; 16], count: usize) -> [f32; 16] {
    #[cfg(target_arch = "x86_64")]
    if TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>() {
        let vectors: [pulp::f32x16; 16] = bytemuck::cast(vectors);
        // SAFETY: a value of type V4 exists only where the processor has AVX-512.
        return unsafe { avx512(&vectors.map(pulp::cast)) };
    }
    // No closure, which would be a function without the instruction set.
    let mut out = [0.0; 16];
    for (out, vector) in out.iter_mut().zip(vectors).take(count) {
        *out = simd.reduce_sum_f32s(vector);
    }
    out
}

/// All are added together, which takes a third of the instructions of one by one.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn avx512(vectors: &[__m512; 16]) -> [f32; 16] {
    // In each quarter of a vector: halves of the sums of two vectors, then the sums of four.
    let halves: [__m512; 8] = std::array::from_fn(|i| {
        let [a, b] = [vectors[2 * i], vectors[2 * i + 1]];
        _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
    });
    let quarters: [__m512; 4] = std::array::from_fn(|i| {
        let [a, b] = [halves[2 * i], halves[2 * i + 1]].map(|half| _mm512_castps_pd(half));
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    });
    // Then the quarters are added, two and two.
    let pair = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
    let [a, b] = [pair(quarters[0], quarters[1]), pair(quarters[2], quarters[3])];
    // SAFETY: both are 64 bytes of any content.
    unsafe { std::mem::transmute(pair(a, b)) }
}
