//! Products of bf16 with AVX-512's dot products of pairs. Weights are read as they are stored.

mod dot;
mod tile;

use half::bf16;

use super::instruction_set;
use crate::threads::Threads;
use ryzanstein_config::InstructionSet;

/// Activation rows from which tiles are faster than one dot product at a time: tiles of one row took 1.2 times as long.
pub(super) const FEWEST_ROWS: usize = 3;

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
