//! Products of few rows on the tensor cores of Hopper: `skinny.cu`.

#![expect(unsafe_code, reason = "the kernel is launched here, and the launch says what was checked")]

use ryzanstein_process_group::DType;

use super::gemm::{ALL_SHARED, Sizes};
use super::kernels::{Kernels, Source};
use super::launch::to_u32;
use crate::checkpoint::LEAVES;
use crate::error::Result;
use crate::tensor::Tensor;

/// The maximum number of rows.
pub(super) const MOST_ROWS: usize = 8;
/// Bytes of a row in a stage.
const ROW_BYTES: u32 = 256;
/// The maximum number of warps of a block, and of stages of each warp's ring.
const MOST_WARPS: usize = 12;
const MOST_STAGES: u32 = 8;

/// What a launch of `skinny.cu` is compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Strips {
    /// Rows of `x`: 1 or 8.
    tokens: u32,
    /// Eights of rows of the weights that a warp takes at a time.
    tiles: u32,
    stages: u32,
    /// Leaves of a sum, each of which a warp adds.
    leaves: u32,
    /// True for gates and ups.
    is_gated: bool,
}

impl Strips {
    /// Returns the strips of a product of `m` rows with `n` rows of weights, and the groups of warps of a block. The multiprocessor with
    /// the most rows has as few as possible, since all others wait for it.
    fn choose([m, n, leaves]: [usize; 3], is_gated: bool, multiprocessors: u32) -> (Self, u32) {
        let most = (MOST_WARPS / leaves).max(1);
        let choices = [2, 1].into_iter().flat_map(|tiles| {
            let strips = n.div_ceil(8 * tiles).div_ceil(multiprocessors as usize);
            // Fewer than half of the warps do not read at the speed of memory.
            let groups = strips.min(most.div_ceil(2))..=strips.min(most);
            groups.rev().map(move |groups| (strips.div_ceil(groups) * groups * tiles, tiles, groups))
        });
        // Of equal ones the first, as two tiles share the rows of x.
        let (_, tiles, groups) = choices.min_by_key(|(rows, ..)| *rows).unwrap_or((0, 1, 1));
        let tokens = if m == 1 { 1 } else { MOST_ROWS as u32 };
        let strips = Self { tokens, tiles: tiles as u32, stages: 0, leaves: leaves as u32, is_gated };
        let groups = groups as u32;
        let room = ALL_SHARED / strips.warps(groups) - strips.sums_bytes();
        (Self { stages: (room / strips.stage_bytes()).min(MOST_STAGES), ..strips }, groups)
    }

    fn warps(self, groups: u32) -> u32 {
        groups * self.leaves
    }

    fn stage_bytes(self) -> u32 {
        (8 * self.tiles + self.tokens) * ROW_BYTES
    }

    /// Returns the bytes of a warp's sums for two turns, which another warp adds.
    fn sums_bytes(self) -> u32 {
        let lanes = if self.tokens == 1 { 4 } else { 32 };
        if self.leaves > 1 { 2 * lanes * self.tiles * 2 * 4 } else { 0 }
    }

    /// Returns the bytes of dynamic shared memory.
    fn shared_bytes(self, groups: u32) -> u32 {
        self.warps(groups) * (self.stages * self.stage_bytes() + self.sums_bytes())
    }

    /// Returns the macros that compile it.
    pub(super) fn macros(self) -> Vec<(&'static str, String)> {
        let number = |name, value: u32| (name, value.to_string());
        vec![
            ("MMA", String::new()),
            number("TOKENS", self.tokens),
            number("TILES", self.tiles),
            number("STAGES", self.stages),
            number("LEAVES", self.leaves),
            number("GATED", u32::from(self.is_gated)),
        ]
    }

    /// Returns what [`choose`](Self::choose) returns for a range of sizes.
    #[cfg(test)]
    pub(super) fn all() -> std::collections::HashSet<Self> {
        let sizes = [64, 1024, 3072, 4096, 14_336, 1 << 20];
        let products = [1, MOST_ROWS].into_iter().flat_map(|m| sizes.map(|n| (m, n)));
        let with_leaves = products.flat_map(|(m, n)| (1..=LEAVES).map(move |leaves| [m, n, leaves]));
        let all =
            with_leaves.flat_map(|sizes| [false, true].map(|is_gated| Self::choose(sizes, is_gated, 132).0));
        all.collect()
    }
}

impl Kernels {
    /// Computes what [`gemm`](Self::gemm) does, with the same sums, for at most [`MOST_ROWS`] rows.
    ///
    /// # Errors
    /// Returns the errors of [`gemm`](Self::gemm).
    pub(super) fn skinny(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (leaves, is_gated): (usize, bool),
        out: &mut Tensor,
    ) -> Result<()> {
        let Sizes { m, n, k, row, .. } = Sizes::of(x, weight, bias, (leaves, is_gated), out)?;
        assert!(m <= MOST_ROWS && leaves <= LEAVES, "the product is a skinny one");
        debug_assert_ne!(x.dtype(), DType::F32, "tensor cores round f32");
        let multiprocessors = self.gpu.device.info().multiprocessors;
        let (strips, groups) = Strips::choose([m, n, leaves], is_gated, multiprocessors);
        let blocks =
            n.div_ceil(8 * strips.tiles as usize).div_ceil(groups as usize).min(multiprocessors as usize);
        let mut call = self.call(Source::Skinny(x.dtype(), out.dtype(), strips), "skinny");
        call.read(x)?.read(weight)?.read_optional(bias)?.write(out)?;
        let [m, n, k, row] =
            [to_u32("rows", m)?, to_u32("rows", n)?, to_u32("columns", k)?, to_u32("columns", row)?];
        call.value([m, n, k, row, u32::from(self.here(weight)?.is_settled())]);
        // SAFETY: warps read the `m` rows of `x`, and rows of the weights below `n`, up to the end of their leaf; all start at multiples of
        // 16 bytes. They read as many floats of the bias as the weight has rows, unless the bias is null, and write those of the
        // `m × outputs` elements of `out` that exist: checked above. The weight is read before the previous kernel has ended only if no
        // kernel has written it. A warp uses the stages and sums of its own in shared memory, and sums of its group.
        unsafe {
            call.launch_with_shared(
                [blocks as u32, 1],
                strips.warps(groups) * 32,
                strips.shared_bytes(groups),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_strips_that_are_compiled_in_tests_are_of_every_kind() {
        let all = Strips::all();
        assert!((1..=LEAVES as u32).all(|n| all.iter().any(|strips| strips.leaves == n)));
        for tokens in [1, 8] {
            for tiles in [1, 2] {
                assert!(all.iter().any(|strips| (strips.tokens, strips.tiles) == (tokens, tiles)));
            }
        }
    }

    proptest! {
        #[test]
        fn strips_fit_a_multiprocessor(
            m in 1..=MOST_ROWS, n in 1usize..200_000, leaves in 1..=LEAVES, is_gated in any::<bool>(),
        ) {
            let (strips, groups) = Strips::choose([m, n, leaves], is_gated, 132);
            prop_assert!(strips.stages >= 2 && strips.shared_bytes(groups) <= ALL_SHARED);
            prop_assert!(groups > 0 && strips.warps(groups) as usize <= MOST_WARPS);
        }

        #[test]
        fn no_multiprocessor_has_many_more_rows_than_its_share(n in 1usize..200_000, leaves in 1..=LEAVES) {
            let (strips, groups) = Strips::choose([1, n, leaves], false, 132);
            let tiles = n.div_ceil(8 * strips.tiles as usize);
            let rounds = tiles.div_ceil(132 * groups as usize);
            let rows = rounds * groups as usize * 8 * strips.tiles as usize;
            let share = n.div_ceil(132);
            prop_assert!(rows <= share.next_multiple_of(8) + share / 8 + 8, "{rows} of {share}");
        }
    }
}
