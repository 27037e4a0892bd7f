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
    __m512, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_cvtss_f32, _mm512_permute_ps,
    _mm512_shuffle_f32x4, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
#[cfg(target_arch = "x86_64")]
use std::mem::transmute_copy;

use pulp::Simd;

/// The sum of the elements of each of the first `count` vectors, with the same bits however many there are.
#[inline(always)]
pub(super) fn totals<S: Simd>(simd: S, vectors: [S::f32s; 16], count: usize) -> [f32; 16] {
    // From five vectors on, adding all 16 together takes fewer instructions.
    #[cfg(target_arch = "x86_64")]
    if is_avx512::<S>() && count > 4 {
        // SAFETY: vectors of V4 are 64 bytes of any content, and a value of type V4 exists only where the processor has AVX-512.
        return unsafe { together(&transmute_copy::<_, [__m512; 16]>(&vectors)) };
    }
    // No closure, which would be a function without the instruction set.
    let mut out = [0.0; 16];
    for (out, vector) in out.iter_mut().zip(vectors).take(count) {
        *out = total(simd, vector);
    }
    out
}

/// The sum of the elements of one vector.
#[inline(always)]
fn total<S: Simd>(simd: S, vector: S::f32s) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_avx512::<S>() {
        // SAFETY: as in `totals`.
        return unsafe { one(transmute_copy(&vector)) };
    }
    simd.reduce_sum_f32s(vector)
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn is_avx512<S: Simd>() -> bool {
    TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>()
}

/// The sum of each vector, in a third of the instructions of 16 calls of [`one`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn together(vectors: &[__m512; 16]) -> [f32; 16] {
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

/// The sum of one vector, in the order of [`together`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn one(vector: __m512) -> f32 {
    let halves = _mm512_add_ps(vector, _mm512_permute_ps::<0b01_00_11_10>(vector));
    let quarters = _mm512_add_ps(halves, _mm512_permute_ps::<0b10_11_00_01>(halves));
    let pairs = _mm512_add_ps(quarters, _mm512_shuffle_f32x4::<0b10_11_00_01>(quarters, quarters));
    _mm512_cvtss_f32(_mm512_add_ps(pairs, _mm512_shuffle_f32x4::<0b01_00_11_10>(pairs, pairs)))
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use pulp::{Simd, WithSimd};

    struct Both([f32; 256]);

    impl WithSimd for Both {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let lanes = size_of::<S::f32s>() / 4;
            let mut vectors = [simd.splat_f32s(0.0); 16];
            vectors.copy_from_slice(&S::as_simd_f32s(&self.0[..16 * lanes]).0[..16]);
            let together = super::totals(simd, vectors, 16);
            for (i, vector) in vectors.into_iter().enumerate() {
                for count in [1, 4, 5] {
                    let few = super::totals(simd, [vector; 16], count);
                    assert!(few[..count].iter().all(|sum| sum.to_bits() == together[i].to_bits()), "{i}");
                }
                let magnitudes = simd.reduce_sum_f32s(simd.abs_f32s(vector));
                let error = (together[i] - simd.reduce_sum_f32s(vector)).abs();
                assert!(error <= 1e-6 * magnitudes, "vector {i}: {}, off by {error}", together[i]);
            }
        }
    }

    #[test]
    fn sums_have_the_same_bits_together_and_one_by_one() {
        let mut state = 1u32;
        for _ in 0..100 {
            let values = std::array::from_fn(|_| {
                state = state.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
                state as i32 as f32 / (state % 7 + 1) as f32
            });
            pulp::Arch::new().dispatch(Both(values));
        }
    }
}
