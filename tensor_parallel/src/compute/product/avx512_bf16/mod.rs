//! Products of bf16 with AVX-512's dot products of pairs. Weights are read in place.

#![expect(unsafe_code, reason = "a prefetch is an intrinsic")]

mod dot;
mod tile;

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use half::bf16;

use super::instruction_set;
use crate::threads::Threads;
use ryzanstein_config::InstructionSet;

/// The minimum number of activation rows for which tiles are at least as fast as one dot product at a time.
pub(super) const FEWEST_ROWS: usize = 5;
/// Prefetch distance in each weight row, in elements: processors do not prefetch several short rows on their own.
const AHEAD: usize = 512;

/// Prefetches the line that is [`AHEAD`] of element `at` in each of `N` weight rows of length `k`; past the row's end, that of
/// the rows that follow.
#[inline(always)]
#[expect(clippy::inline_always, reason = "it is part of an inner loop")]
fn fetch<const N: usize>(w: &[bf16], at: usize, k: usize) {
    let ahead = if at + AHEAD < k { at + AHEAD } else { at + AHEAD + (N - 1) * k };
    for r in 0..N {
        // SAFETY: every x86-64 processor has the instruction, and it takes any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(r * k + ahead).cast()) };
    }
}

/// Activations in the layout that a kernel requires.
pub(super) enum Prepared<'a> {
    Dot { x: &'a [bf16], k: usize },
    Tile(tile::Packed),
}

impl<'a> Prepared<'a> {
    /// Prepares `x`, which is at least one row of length `k`.
    pub(super) fn new(threads: &Threads, x: &'a [bf16], k: usize) -> Self {
        if x.len() < FEWEST_ROWS * k {
            Self::Dot { x, k }
        } else {
            Self::Tile(tile::Packed::new(threads, x, k))
        }
    }

    /// Computes `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products) does.
    pub(super) fn multiply(&self, w: &[bf16], out: &mut [f32]) {
        assert!(instruction_set::is_supported(InstructionSet::Avx512Bf16), "checked when it was chosen");
        match self {
            Self::Dot { x, k } => dot::multiply(x, w, out, *k),
            Self::Tile(x) => tile::multiply(x, w, out),
        }
    }
}
