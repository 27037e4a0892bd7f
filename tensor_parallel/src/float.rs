//! The three floating-point types that tensors may have.
//!
//! Sums within one rank are computed in `f32`. With a 16-bit type, every operation rounds its result once. So a sum over ranks
//! adds rounded terms. Between GPUs it is computed, with intermediate rounding, in that type.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ryzanstein_process_group::{DType, Element};

/// An element type of collectives that tensors do not support.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("element type {0} is not supported for weights and activations; expected f32, f16 or bf16")]
pub struct UnsupportedDType(pub DType);

/// Runs `$body` with `$T` bound to the Rust type of `$dtype`. Returns an error for unsupported types.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ryzanstein_process_group::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            ryzanstein_process_group::DType::F16 => {
                type $T = half::f16;
                Ok($body)
            }
            ryzanstein_process_group::DType::BF16 => {
                type $T = half::bf16;
                Ok($body)
            }
            other => Err($crate::float::UnsupportedDType(other)),
        }
    };
}
pub(crate) use with_float;

/// Returns an error for unsupported types.
pub(crate) fn check(dtype: DType) -> Result<(), UnsupportedDType> {
    if matches!(dtype, DType::F32 | DType::F16 | DType::BF16) { Ok(()) } else { Err(UnsupportedDType(dtype)) }
}

/// An element type of tensors. Arithmetic on it is done in `f32`.
pub(crate) trait Float: Element {
    /// Returns the exact value in `f32`.
    fn widen(self) -> f32;
    /// Rounds to the nearest value of this type, ties to even.
    fn narrow(value: f32) -> Self;

    /// Converts elements to their exact values in `f32`.
    #[inline(always)]
    fn widen_into(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = from.widen();
        }
    }

    /// Rounds values to the nearest values of this type.
    #[inline(always)]
    fn narrow_into(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Self::narrow(*from);
        }
    }
}

impl Float for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Float for f16 {
    #[inline]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline]
    fn widen_into(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline]
    fn narrow_into(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Float for bf16 {
    // A shift, which the compiler vectorises, in contrast to a call of `half`.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // Branchless, so that the compiler vectorises loops of it.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let nearest = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
        Self::from_bits(if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_three_float_types_are_accepted_and_others_refused_by_name() {
        for dtype in DType::ALL {
            let supported = [DType::F32, DType::F16, DType::BF16].contains(dtype);
            assert_eq!(check(*dtype).is_ok(), supported, "{dtype}");
        }
        let refusal = check(DType::F64).unwrap_err().to_string();
        assert!(refusal.contains("f64") && refusal.contains("f32, f16 or bf16"), "{refusal}");
    }

    #[test]
    fn narrowing_agrees_with_the_reference() {
        // All exponents, and the fractions around every tie.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(
                    <bf16 as Float>::narrow(value).to_bits(),
                    bf16::from_f32(value).to_bits(),
                    "{value}"
                );
            }
        }
    }

    #[test]
    fn widening_agrees_with_the_reference_for_every_bit_pattern() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut wide = vec![0.0; bits.len()];
        let all: Vec<bf16> = bits.iter().map(|b| bf16::from_bits(*b)).collect();
        bf16::widen_into(&all, &mut wide);
        assert!(all.iter().zip(&wide).all(|(x, w)| x.to_f32() == *w || (x.is_nan() && w.is_nan())));
        let all: Vec<f16> = bits.iter().map(|b| f16::from_bits(*b)).collect();
        f16::widen_into(&all, &mut wide);
        assert!(all.iter().zip(&wide).all(|(x, w)| x.to_f32() == *w || (x.is_nan() && w.is_nan())));
    }
}
