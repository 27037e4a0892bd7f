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
/// Distance of the prefetches in each weight row, in elements. No processor measured prefetches several short rows on its own.
const AHEAD: usize = 512;

/// Elements of a line of the cache.
const LINE: usize = 32;

/// How a processor reads weights fastest.
#[derive(Clone, Copy)]
struct Reading {
    /// Up to this many activation rows, the kernel reads one weight row after another and does not prefetch: hardware prefetches a single
    /// stream.
    row_by_row: usize,
    /// Prefetches follow the order of memory. Otherwise each weight row is fetched ahead.
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

    /// Fetches `N` lines while element `at` of each of `N` weight rows of `k` is used. In order, they are the next lines of the `N` rows behind
    /// these. Otherwise each is [`AHEAD`] in its row; past its end, it belongs to the rows behind.
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
        let reading = Reading::of_this_processor();
        match self {
            Self::Dot { x, k } => dot::multiply(reading, x, w, out, *k),
            Self::Tile(x) => tile::multiply(reading, x, w, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_same_bits_however_weights_are_read() {
        if !instruction_set::is_supported(InstructionSet::Avx512Bf16) {
            return;
        }
        let value = |i: usize| bf16::from_f32(((i * 7919 + i / 31) % 1009) as f32 / 400.0 - 1.25);
        let (k, n) = (1100, 21);
        let w: Vec<bf16> = (0..n * k).map(value).collect();
        for m in 1..=2 * FEWEST_ROWS {
            let x: Vec<bf16> = (0..m * k).map(|i| value(i + 5)).collect();
            let packed = tile::Packed::new(&Threads::new(1, "test"), &x, k);
            let results = [(0, false), (0, true), (m, false), (m, true)].map(|(row_by_row, in_order)| {
                let (reading, mut out) = (Reading { row_by_row, in_order }, vec![f32::NAN; m * n]);
                if m < FEWEST_ROWS {
                    dot::multiply(reading, &x, &w, &mut out, k);
                } else {
                    tile::multiply(reading, &packed, &w, &mut out);
                }
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            for (at, result) in results.iter().enumerate() {
                assert_eq!(*result, results[0], "{m} rows, way {at}");
            }
            for (i, bits) in results[0].iter().enumerate() {
                let terms = x[i / n * k..][..k].iter().zip(&w[i % n * k..]);
                let want: f64 = terms.map(|(x, w)| x.to_f64() * w.to_f64()).sum();
                let got = f64::from(f32::from_bits(*bits));
                assert!((got - want).abs() <= 1e-2, "{m} rows, result {i}: {got}, not {want}");
            }
        }
    }
}
