//! Stub for architectures other than x86-64.

use half::bf16;

use crate::threads::Threads;

/// Elements of a row of a tile.
pub(super) const DEPTH: usize = 32;
pub(super) const FEWEST_ROWS: usize = 8;

/// There are none.
pub(super) enum Packed {}

impl Packed {
    pub(super) fn new(_: &Threads, _: &[bf16], _: usize) -> Self {
        unreachable!("no processor of this architecture has the tiles")
    }
}

pub(super) fn is_allowed() -> bool {
    false
}

pub(super) fn multiply(x: &Packed, _: &[bf16], _: &mut [f32]) {
    match *x {}
}
