//! Load, combination and storage of one element type.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::types::dtype::Element;

use super::BLOCK;

/// A binary operation on accumulators.
pub(super) trait Combine<A> {
    /// Combines two accumulators, the left operand first.
    fn combine(left: A, right: A) -> A;
}

/// Division of a sum by the number of ranks.
pub(super) trait Average: Lane {
    /// Divides all accumulators.
    fn divide(wide: &mut [Self::Wide], divisor: usize);
}

/// An element type with the type of its accumulators.
pub(super) trait Lane: Element {
    /// The accumulator.
    type Wide: Copy + Default;

    /// Accumulators := bytes.
    fn load(bytes: &[u8], wide: &mut [Self::Wide]);
    /// Accumulators := accumulators ∘ bytes.
    fn combine<O: Combine<Self::Wide>>(bytes: &[u8], wide: &mut [Self::Wide]);
    /// Elements := accumulators, rounded once.
    fn store(wide: &[Self::Wide], elements: &mut [Self]);
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;

macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Wide = Self;

            #[inline(always)]
            fn load(bytes: &[u8], wide: &mut [Self]) {
                bytemuck::cast_slice_mut::<Self, u8>(wide).copy_from_slice(bytes);
            }

            #[inline(always)]
            fn combine<O: Combine<Self>>(bytes: &[u8], wide: &mut [Self]) {
                for (w, b) in wide.iter_mut().zip(bytes.chunks_exact(size_of::<Self>())) {
                    *w = O::combine(*w, bytemuck::pod_read_unaligned(b));
                }
            }

            #[inline(always)]
            fn store(wide: &[Self], elements: &mut [Self]) {
                elements.copy_from_slice(wide);
            }
        }
    )*};
}
plain!(f32, f64, i8, u8, i32, u32, i64, u64);

/// Conversions between a 16-bit type and `f32`.
trait Half: Element {
    fn widen(from: &[Self], to: &mut [f32]);
    fn narrow(from: &[f32], to: &mut [Self]);
}

// The crate converts whole slices with processor instructions.
impl Half for f16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

// The crate converts these one by one. Loops without branches become vectors.
impl Half for bf16 {
    #[inline(always)]
    fn widen(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            let nearest = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16) as u16;
            *to = Self::from_bits(if from.is_nan() { (bits >> 16) as u16 | 0x40 } else { nearest });
        }
    }
}

macro_rules! half {
    ($($type:ty),*) => {$(
        impl Lane for $type {
            type Wide = f32;

            #[inline(always)]
            fn load(bytes: &[u8], wide: &mut [f32]) {
                let mut aligned = [<$type>::ZERO; BLOCK];
                let aligned = &mut aligned[..wide.len()];
                bytemuck::cast_slice_mut::<Self, u8>(aligned).copy_from_slice(bytes);
                Half::widen(aligned, wide);
            }

            #[inline(always)]
            fn combine<O: Combine<f32>>(bytes: &[u8], wide: &mut [f32]) {
                let mut other = [0.0; BLOCK];
                let other = &mut other[..wide.len()];
                Self::load(bytes, other);
                for (w, o) in wide.iter_mut().zip(other) {
                    *w = O::combine(*w, *o);
                }
            }

            #[inline(always)]
            fn store(wide: &[f32], elements: &mut [Self]) {
                Half::narrow(wide, elements);
            }
        }

        impl Average for $type {
            #[inline(always)]
            fn divide(wide: &mut [f32], divisor: usize) {
                f32::divide(wide, divisor);
            }
        }
    )*};
}
half!(f16, bf16);

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Average for $type {
            #[inline(always)]
            fn divide(wide: &mut [Self], divisor: usize) {
                for w in wide {
                    *w /= divisor as Self;
                }
            }
        }
        impl Combine<$type> for Sum {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left + right }
        }
        impl Combine<$type> for Product {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left * right }
        }
        impl Combine<$type> for Min {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type {
                if left < right || left.is_nan() { left } else { right }
            }
        }
        impl Combine<$type> for Max {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type {
                if left > right || left.is_nan() { left } else { right }
            }
        }
    )*};
}
float!(f32, f64);

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Average for $type {
            #[inline(always)]
            fn divide(wide: &mut [Self], divisor: usize) {
                // Through i128: a world of 200 ranks does not fit an i8.
                for w in wide {
                    *w = (i128::from(*w) / divisor as i128) as Self;
                }
            }
        }
        impl Combine<$type> for Sum {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left.wrapping_add(right) }
        }
        impl Combine<$type> for Product {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left.wrapping_mul(right) }
        }
        impl Combine<$type> for Min {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left.min(right) }
        }
        impl Combine<$type> for Max {
            #[inline(always)]
            fn combine(left: $type, right: $type) -> $type { left.max(right) }
        }
    )*};
}
integer!(i8, u8, i32, u32, i64, u64);
