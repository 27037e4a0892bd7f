//! Reduction of host memory: `((s₀ ∘ s₁) ∘ s₂) ∘ …`, in the order of the sources.
//!
//! The order is part of the contract: it gives every rank the same bits. The 16-bit floats are widened to `f32`, combined, and
//! rounded once at the end. The loops are simple so that the compiler vectorises them. They are compiled for each vector width of
//! processors. No element depends on another, so every width gives the same bits.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

mod lane;

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::types::dtype::{DType, with_element};
use crate::types::operation::ReduceOp;
use lane::{Average, Combine, Lane, Max, Min, Product, Sum};

/// One operand, as long as the destination.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'a> {
    /// The present contents of the destination.
    Destination,
    /// Bytes of elements in machine order, of any alignment.
    Bytes(&'a [u8]),
}

/// Number of elements reduced at a time: operands and accumulators of one block stay in the first-level cache.
const BLOCK: usize = 512;

/// Reduces `sources` into `destination`, and divides by `divisor` where one is given (at the end of an average).
///
/// `destination` contains whole, aligned elements; every `Bytes` source has its length; there is at least one source.
pub(crate) fn reduce(
    dtype: DType,
    op: ReduceOp,
    destination: &mut [u8],
    sources: &[Source<'_>],
    divisor: Option<usize>,
) {
    with_element!(dtype, T => match op {
        ReduceOp::Sum | ReduceOp::Avg => Typed::<T, Sum>::reduce(destination, sources, divisor),
        ReduceOp::Product => Typed::<T, Product>::reduce(destination, sources, divisor),
        ReduceOp::Min => Typed::<T, Min>::reduce(destination, sources, divisor),
        ReduceOp::Max => Typed::<T, Max>::reduce(destination, sources, divisor),
    });
}

/// Returns the fastest vectors for elements of this type. Messages have any alignment, so vectors of 512 bits cross cache lines.
/// 16-bit types gain from them all the same, because their conversions take most of the time.
fn vectors<T>() -> Arch {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() > 2
        && let Some(vectors) = pulp::x86::V3::try_new()
    {
        return Arch::V3(vectors);
    }
    Arch::new()
}

/// A reduction of elements of one type by one operation.
struct Typed<'a, T, O> {
    destination: &'a mut [T],
    sources: &'a [Source<'a>],
    divisor: Option<usize>,
    operation: PhantomData<O>,
}

impl<'a, T: Lane + Average, O: Combine<T::Wide>> Typed<'a, T, O> {
    fn reduce(destination: &'a mut [u8], sources: &'a [Source<'a>], divisor: Option<usize>) {
        let destination = bytemuck::cast_slice_mut(destination);
        vectors::<T>().dispatch(Self { destination, sources, divisor, operation: PhantomData });
    }
}

impl<T: Lane + Average, O: Combine<T::Wide>> WithSimd for Typed<'_, T, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { destination, sources, divisor, .. } = self;
        let mut wide = [T::Wide::default(); BLOCK];
        for (index, block) in destination.chunks_mut(BLOCK).enumerate() {
            let start = index * BLOCK * size_of::<T>();
            let bytes = start..start + size_of_val(block);
            let wide = &mut wide[..block.len()];
            for (position, source) in sources.iter().enumerate() {
                let from = match source {
                    Source::Destination => bytemuck::cast_slice(&*block),
                    Source::Bytes(all) => &all[bytes.clone()],
                };
                if position == 0 {
                    T::load(from, wide);
                } else {
                    T::combine::<O>(from, wide);
                }
            }
            if let Some(divisor) = divisor {
                T::divide(wide, divisor);
            }
            T::store(wide, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn reduce<T: crate::Element>(op: ReduceOp, inputs: &[Vec<T>], divisor: Option<usize>) -> Vec<T> {
        let mut out = inputs[0].clone();
        let sources: Vec<_> =
            inputs.iter().map(|v| Source::Bytes(bytemuck::cast_slice(v.as_slice()))).collect();
        super::reduce(T::DTYPE, op, bytemuck::cast_slice_mut(&mut out), &sources, divisor);
        out
    }

    #[test]
    fn halves_accumulate_in_f32_and_round_once() {
        // 2048 + 1 is not a f16: rounding after each step would lose both ones.
        let inputs = [vec![f16::from_f32(2048.0)], vec![f16::from_f32(1.0)], vec![f16::from_f32(1.0)]];
        assert_eq!(reduce(ReduceOp::Sum, &inputs, None)[0].to_f32(), 2050.0);
        let inputs = [vec![bf16::from_f32(256.0)], vec![bf16::from_f32(1.0)], vec![bf16::from_f32(1.0)]];
        assert_eq!(reduce(ReduceOp::Sum, &inputs, None)[0].to_f32(), 258.0);
    }

    #[test]
    fn bf16_is_rounded_as_the_crate_rounds_it() {
        // All exponents, and the fractions around every tie.
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| (u32::from(high) << 16) | low))
            .map(f32::from_bits)
            .collect();
        let mut rounded = vec![bf16::ZERO; values.len()];
        bf16::store(&values, &mut rounded);
        let mut wide = vec![0.0; BLOCK];
        for (values, rounded) in values.chunks(BLOCK).zip(rounded.chunks(BLOCK)) {
            let wide = &mut wide[..rounded.len()];
            bf16::load(bytemuck::cast_slice(rounded), wide);
            for ((value, rounded), wide) in values.iter().zip(rounded).zip(wide) {
                assert_eq!(rounded.to_bits(), bf16::from_f32(*value).to_bits(), "{value}");
                assert_eq!(wide.to_bits(), rounded.to_f32().to_bits(), "{value}");
            }
        }
    }

    #[test]
    fn a_nan_wins_minimum_and_maximum_from_either_side() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            assert!(reduce(op, &[vec![f32::NAN], vec![1.0]], None)[0].is_nan());
            assert!(reduce(op, &[vec![1.0], vec![f32::NAN]], None)[0].is_nan());
            assert!(reduce(op, &[vec![bf16::NAN], vec![bf16::ONE]], None)[0].is_nan());
        }
    }

    #[test]
    fn integers_wrap_and_their_average_truncates_towards_zero() {
        assert_eq!(reduce(ReduceOp::Sum, &[vec![200u8], vec![100]], None), [44]);
        assert_eq!(reduce(ReduceOp::Product, &[vec![i32::MAX], vec![2]], None), [-2]);
        assert_eq!(reduce(ReduceOp::Avg, &[vec![-3i64], vec![-4]], Some(2)), [-3]);
        assert_eq!(reduce(ReduceOp::Avg, &[vec![1.0f32], vec![2.0]], Some(2)), [1.5]);
    }

    #[test]
    fn sources_may_be_unaligned_and_the_destination_one_of_them() {
        let values: Vec<u32> = (0..2000).collect();
        let mut shifted = vec![0u8];
        shifted.extend_from_slice(bytemuck::cast_slice(&values));
        let mut out = vec![1u32; 2000];
        let sources = [Source::Bytes(&shifted[1..]), Source::Destination];
        super::reduce(DType::U32, ReduceOp::Sum, bytemuck::cast_slice_mut(&mut out), &sources, None);
        assert!(out.iter().zip(&values).all(|(o, v)| *o == v + 1));
    }
}
