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
#[cfg(target_arch = "x86_64")]
use std::mem::transmute_copy;

use pulp::Simd;

#[cfg(target_arch = "x86_64")]
const ORDER: [usize; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// The sum of the elements of each of the first `count` vectors, with the same bits however many there are.
#[inline(always)]
pub(super) fn totals<S: Simd>(simd: S, vectors: [S::f32s; 16], count: usize) -> [f32; 16] {
    #[cfg(target_arch = "x86_64")]
    if count > 4 && TypeId::of::<S>() == TypeId::of::<pulp::x86::V4>() {
        // SAFETY: vectors of V4 are 64 bytes of any content, and a value of type V4 exists only where the processor has AVX-512.
        return unsafe { avx512(&transmute_copy::<_, [__m512; 16]>(&vectors)) };
    }
    // No closure, which would be a function without the instruction set.
    let mut out = [0.0; 16];
    for (out, vector) in out.iter_mut().zip(vectors).take(count) {
        *out = simd.reduce_sum_f32s(vector);
    }
    out
}

/// All are added together, in the order of `_mm512_reduce_add_ps`, which for 16 vectors takes three times as many instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn avx512(vectors: &[__m512; 16]) -> [f32; 16] {
    // The second half of each vector is added to the first, and that of two vectors put side by side. `ORDER` is such that the last
    // step leaves the sums in theirs.
    let halves: [__m512; 8] = std::array::from_fn(|i| {
        let [a, b] = [vectors[ORDER[2 * i]], vectors[ORDER[2 * i + 1]]];
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b))
    });
    let quarters: [__m512; 4] = std::array::from_fn(|i| {
        let [a, b] = [halves[2 * i], halves[2 * i + 1]];
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b))
    });
    let eighths: [__m512; 2] = std::array::from_fn(|i| {
        let [a, b] = [quarters[2 * i], quarters[2 * i + 1]];
        _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
    });
    let [a, b] = eighths.map(|eighth| _mm512_castps_pd(eighth));
    let sums =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    // SAFETY: both are 64 bytes of any content.
    unsafe { std::mem::transmute(sums) }
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
                assert_eq!(together[i].to_bits(), simd.reduce_sum_f32s(vector).to_bits(), "vector {i}");
            }
        }
    }

    #[test]
    fn sums_have_the_same_bits_together_and_one_by_one() {
        let mut state = 1u32;
        for _ in 0..100 {
            let values = std::array::from_fn(|_| {
                state = state.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
                state as f32 / (state % 7 + 1) as f32
            });
            pulp::Arch::new().dispatch(Both(values));
        }
    }
}
