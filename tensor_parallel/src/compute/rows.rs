//! Arithmetic on rows of elements, compiled for each instruction set.

#![expect(
    clippy::inline_always,
    reason = "an instruction set chosen at run time applies only to what is inlined"
)]

use std::array;

use pulp::{Arch, Simd, WithSimd};

use super::exponential::exp;
use crate::float::Float;
use crate::rotary::RotaryTable;

/// Defines functions whose first parameter is the instruction set. Their bodies are inlined into code that is compiled for it. A
/// closure that the compiler does not inline is compiled for the baseline processor.
macro_rules! vectorized {
    ($($(#[$doc:meta])* $visible:vis fn $name:ident<$life:lifetime $(, $T:ident)*>($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $($(#[$doc])*
        $visible fn $name<$life $(, $T: Float)*>(arch: Arch, $($argument: $type),*) {
            struct Work<$life $(, $T)*> { $($argument: $type),* }
            impl<$life $(, $T: Float)*> WithSimd for Work<$life $(, $T)*> {
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
    /// Converts elements to their exact values in `f32`.
    pub(super) fn widen<'a, T>(from: &'a [T], to: &'a mut [f32]) {
        T::widen_into(from, to);
    }

    /// Rounds values to the nearest values of the type.
    pub(super) fn narrow<'a, T>(from: &'a [f32], to: &'a mut [T]) {
        T::narrow_into(from, to);
    }

    /// Adds elements and rounds the sums.
    pub(super) fn add<'a, T, U>(to: &'a mut [T], from: &'a [U]) {
        let (mut wide_to, mut wide_from) = ([0.0; PIECE], [0.0; PIECE]);
        for (to, from) in to.chunks_mut(PIECE).zip(from.chunks(PIECE)) {
            let (wide_to, wide_from) = (&mut wide_to[..to.len()], &mut wide_from[..from.len()]);
            T::widen_into(to, wide_to);
            U::widen_into(from, wide_from);
            for (to, from) in wide_to.iter_mut().zip(wide_from) {
                *to += *from;
            }
            T::narrow_into(wide_to, to);
        }
    }

    pub(super) fn rms_norm<'a, T>(row: &'a [T], weight: &'a [f32], epsilon: f32, to: &'a mut [f32]) {
        T::widen_into(row, to);
        normalize(to, weight, epsilon);
    }

    /// Normalises heads, which are as long as the weight.
    pub(super) fn normalize_heads<'a>(heads: &'a mut [f32], weight: &'a [f32], epsilon: f32) {
        for head in heads.chunks_exact_mut(weight.len()) {
            normalize(head, weight, epsilon);
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

/// Computes `x / sqrt(mean(x²) + epsilon) × weight`.
#[inline(always)]
fn normalize(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = 1.0 / (sum_of_squares(x) / x.len() as f32 + epsilon).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// Returns the sum of squares. It uses 16 partial sums, because each addition to the same sum waits for the one before.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (vectors, rest) = x.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for vector in vectors {
        for (sum, x) in sums.iter_mut().zip(vector) {
            *sum += x * x;
        }
    }
    fold(sums, |a, b| a + b) + rest.iter().map(|x| x * x).sum::<f32>()
}

/// Combines all lanes by halves: four dependent steps instead of fifteen.
#[inline(always)]
pub(super) fn fold(lanes: [f32; 16], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let four: [f32; 4] = array::from_fn(|i| combine(eight[i], eight[i + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}
