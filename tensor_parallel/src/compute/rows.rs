//! Arithmetic on rows of elements, compiled for each instruction set.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::borrow::Cow;
use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::exponential::exp;
use crate::float::Float;
use crate::rotary::RotaryTable;
use crate::storage::{Storage, with_elements};

/// Defines functions whose first parameter is the instruction set. Their bodies are inlined into code that is compiled for it. A closure
/// that the compiler does not inline is compiled for the least processor.
macro_rules! vectorized {
    ($($(#[$doc:meta])* $visible:vis fn $name:ident<$life:lifetime $(, $T:ident)?>($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $($(#[$doc])*
        $visible fn $name<$life $(, $T: Float)?>(arch: Arch, $($argument: $type),*) {
            struct Work<$life $(, $T)?> { $($argument: $type),* }
            impl<$life $(, $T: Float)?> WithSimd for Work<$life $(, $T)?> {
                type Output = ();

                #[inline(always)]
                fn with_simd<S: Simd>(self, _: S) {
                    let Self { $($argument),* } = self;
                    $body
                }
            }
            arch.dispatch(Work { $($argument),* });
        })*
    };
}
pub(super) use vectorized;

/// Elements that are widened at a time.
const PIECE: usize = 256;

vectorized! {
    /// The exact values.
    pub(super) fn widen<'a, T>(from: &'a [T], to: &'a mut [f32]) {
        T::widen_into(from, to);
    }

    /// The nearest values of the type.
    pub(super) fn narrow<'a, T>(from: &'a [f32], to: &'a mut [T]) {
        T::narrow_into(from, to);
    }

    pub(super) fn add<'a>(to: &'a mut [f32], from: &'a [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    }

    pub(super) fn rms_norm<'a>(row: &'a [f32], weight: &'a [f32], epsilon: f32, to: &'a mut [f32]) {
        let scale = 1.0 / (sum_of_squares(row) / row.len() as f32 + epsilon).sqrt();
        for ((to, x), w) in to.iter_mut().zip(row).zip(weight) {
            *to = x * scale * w;
        }
    }

    pub(super) fn swiglu<'a, T>(gate: &'a [T], up: &'a [T], to: &'a mut [f32]) {
        let (mut wide_gate, mut wide_up) = ([0.0; PIECE], [0.0; PIECE]);
        for ((gate, up), to) in gate.chunks(PIECE).zip(up.chunks(PIECE)).zip(to.chunks_mut(PIECE)) {
            let (wide_gate, wide_up) = (&mut wide_gate[..gate.len()], &mut wide_up[..up.len()]);
            T::widen_into(gate, wide_gate);
            T::widen_into(up, wide_up);
            for ((to, gate), up) in to.iter_mut().zip(wide_gate).zip(wide_up) {
                *to = *gate / (1.0 + exp(-*gate)) * *up;
            }
        }
    }

    /// Rotates heads, which are `head_dim` long, at the `index`th position.
    pub(super) fn rotate<'a>(rotary: &'a RotaryTable, index: usize, head_dim: usize, heads: &'a mut [f32]) {
        for head in heads.chunks_exact_mut(head_dim) {
            rotary.rotate(index, head);
        }
    }
}

/// The exact values of some elements.
pub(super) fn values(arch: Arch, stored: &Storage, range: Range<usize>) -> Cow<'_, [f32]> {
    if let Storage::F32(stored) = stored {
        return Cow::Borrowed(&stored[range]);
    }
    let mut wide = vec![0.0; range.len()];
    with_elements!(stored, stored => widen(arch, &stored[range], &mut wide));
    Cow::Owned(wide)
}

/// Uses 16 partial sums, since each addition to one sum waits for the last.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (vectors, rest) = x.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for vector in vectors {
        for (sum, x) in sums.iter_mut().zip(vector) {
            *sum += x * x;
        }
    }
    sums.into_iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}
