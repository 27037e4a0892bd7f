//! The three element types that weights and activations may have.

use std::fmt;
use std::str::FromStr;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ryzanstein_process_group::{DType, Element};
use serde::{Deserialize, Serialize};

/// Element type of weights and activations.
///
/// What one rank computes is summed in `f32`. With a 16-bit type, every operation rounds its result once; so a sum over ranks
/// is one of rounded terms, and between GPUs it is taken, and rounded on the way, in that type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// 16-bit float with the exponent of `f32`.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::F32, Self::F16, Self::Bf16]
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| format!("unknown element type `{text}`; expected f32, f16 or bf16"))
    }
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::BF16,
        }
    }
}

/// An element that computes in `f32`.
pub(crate) trait Float: Element {
    /// The exact value.
    fn widen(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn narrow(value: f32) -> Self;
    /// Widens many.
    fn widen_into(from: &[Self], to: &mut [f32]);
    /// One element from the start of little-endian bytes.
    fn read(bytes: &[u8]) -> Self;
}

impl Float for f32 {
    #[inline]
    fn widen(self) -> f32 {
        self
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline]
    fn widen_into(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline]
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
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
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1]])
    }
}

impl Float for bf16 {
    // Widening is a shift, which the compiler vectorises where a call into `half` would stand in its way.
    #[inline]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline]
    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }

    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "an instruction set chosen at run time applies only to what is inlined"
    )]
    fn widen_into(from: &[Self], to: &mut [f32]) {
        let bits: &[u16] = bytemuck::cast_slice(from);
        for (to, bits) in to.iter_mut().zip(bits) {
            *to = f32::from_bits(u32::from(*bits) << 16);
        }
    }

    #[inline]
    fn read(bytes: &[u8]) -> Self {
        Self::from_le_bytes([bytes[0], bytes[1]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back_and_others_refused() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(DType::from(dtype).size(), dtype.size());
        }
        assert!("f64".parse::<Dtype>().unwrap_err().contains("f32, f16 or bf16"));
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
