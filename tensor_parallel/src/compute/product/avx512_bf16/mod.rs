//! Products of bf16 with AVX-512's dot products of pairs. Weights are read as they are stored.

#![expect(unsafe_code, reason = "a prefetch is an intrinsic")]

mod dot;
mod tile;

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

use half::bf16;

use super::instruction_set;
use crate::threads::Threads;
use ryzanstein_config::InstructionSet;
use ryzanstein_process_group::{Processor, ProcessorMaker, processor};

/// Activation rows from which tiles are at least as fast as one dot product at a time on all processors measured.
pub(super) const FEWEST_ROWS: usize = 5;
/// How many elements ahead weights are fetched in their rows. They come from memory, and rows are too short for the processor to follow by itself.
const AHEAD: usize = 512;

/// Elements of a line of the cache.
const LINE: usize = 32;

/// How a processor reads weights fastest.
#[derive(Clone, Copy)]
struct Reading {
    /// Up to so many activation rows, weight rows are read one after another and not fetched: the processor follows one stream by itself.
    row_by_row: usize,
    /// Weights are fetched in the order of memory, and not ahead in each of the rows side by side.
    in_order: bool,
}

impl Reading {
    /// What was measured on a Zen 4, a Zen 5 and a Xeon.
    fn of_this_processor() -> Self {
        match processor() {
            Processor { maker: ProcessorMaker::Amd, family: 25 } => Self { row_by_row: 2, in_order: true },
            Processor { maker: ProcessorMaker::Amd, .. } => Self { row_by_row: 1, in_order: false },
            _ => Self { row_by_row: 0, in_order: false },
        }
    }

    /// Fetches a line for each of `N` weight rows of `k`, while element `at` of each is used: what comes [`AHEAD`] in the rows, and behind
    /// their ends in the next; or as much of the next rows.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "it is part of an inner loop")]
    fn fetch<const N: usize>(self, w: &[bf16], at: usize, k: usize) {
        for r in 0..N {
            // SAFETY: every x86-64 processor has the instruction, and it takes any address.
            unsafe {
                if self.in_order {
                    _mm_prefetch::<_MM_HINT_T1>(w.as_ptr().wrapping_add(N * (k + at) + r * LINE).cast());
                } else {
                    let ahead = if at + AHEAD < k { at + AHEAD } else { at + AHEAD + (N - 1) * k };
                    _mm_prefetch::<_MM_HINT_T0>(w.as_ptr().wrapping_add(r * k + ahead).cast());
                }
            }
        }
    }
}

/// Activations as a kernel wants them.
pub(super) enum Prepared<'a> {
    Dot { x: &'a [bf16], k: usize },
    Tile(tile::Packed),
}

impl<'a> Prepared<'a> {
    /// `x` is rows of `k`, of which there is at least one.
    pub(super) fn new(threads: &Threads, x: &'a [bf16], k: usize) -> Self {
        if x.len() < FEWEST_ROWS * k {
            Self::Dot { x, k }
        } else {
            Self::Tile(tile::Packed::new(threads, x, k))
        }
    }

    /// `out[r * n + i] = w[i] · x[r]`, as [`Products::block`](super::Products).
    pub(super) fn multiply(&self, w: &[bf16], out: &mut [f32]) {
        assert!(instruction_set::is_supported(InstructionSet::Avx512Bf16), "checked when it was chosen");
        match self {
            Self::Dot { x, k } => dot::multiply(x, w, out, *k),
            Self::Tile(x) => tile::multiply(x, w, out),
        }
    }
}
