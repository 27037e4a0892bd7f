//! Products of few rows on the tensor cores of Hopper: `skinny.cu`.

#![expect(unsafe_code, reason = "the kernel is launched here, and the launch says what was checked")]

use ryzanstein_process_group::DType;

use super::gemm::{ALL_SHARED, Product, Sizes};
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

/// How warps divide a launch of `skinny.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Strips {
    /// Rows of `x`: 1 or 8.
    tokens: u32,
    /// Rows of the weights that a warp takes at a time, divided by 8.
    tiles: u32,
    /// Stages of a warp's ring.
    stages: u32,
    /// Leaves of a sum, each of which a warp adds, and groups of such warps in a block.
    leaves: u32,
    groups: u32,
    /// True for gates and ups.
    is_gated: bool,
}

impl Strips {
    /// Returns the strips of a product of `m` rows with `n` rows of weights. The multiprocessor with the most rows has as few as possible,
    /// since all others wait for it.
    fn choose([m, n, leaves]: [usize; 3], is_gated: bool, multiprocessors: u32) -> Self {
        let most = (MOST_WARPS / leaves).max(1);
        let choices = [2, 1].into_iter().flat_map(|tiles| {
            let of_each = n.div_ceil(8 * tiles).div_ceil(multiprocessors as usize);
            // Fewer than half of the warps read slower than memory can.
            let groups = of_each.min(most.div_ceil(2))..=of_each.min(most);
            groups.rev().map(move |groups| (of_each.div_ceil(groups) * groups * tiles, tiles, groups))
        });
        // Of equal ones the first: two tiles share the rows of x, and more warps read faster.
        let (_, tiles, groups) = choices.min_by_key(|(rows, ..)| *rows).unwrap_or((0, 1, 1));
        let tokens = if m == 1 { 1 } else { MOST_ROWS as u32 };
        let strips = Self {
            tokens,
            tiles: tiles as u32,
            stages: 0,
            leaves: leaves as u32,
            groups: groups as u32,
            is_gated,
        };
        let room = ALL_SHARED / strips.warps() - strips.sums_bytes();
        Self { stages: (room / strips.stage_bytes()).min(MOST_STAGES), ..strips }
    }

    fn warps(self) -> u32 {
        self.groups * self.leaves
    }

    /// Returns the rows of the weights of a tile.
    fn rows(self) -> usize {
        8 * self.tiles as usize
    }

    fn stage_bytes(self) -> u32 {
        (self.rows() as u32 + self.tokens) * ROW_BYTES
    }

    /// Returns the bytes of a warp's sums for two turns, which another warp adds.
    fn sums_bytes(self) -> u32 {
        if self.leaves > 1 { 2 * self.tokens * self.rows() as u32 * 4 } else { 0 }
    }

    /// Returns the bytes of dynamic shared memory.
    fn shared_bytes(self) -> u32 {
        self.warps() * (self.stages * self.stage_bytes() + self.sums_bytes())
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
            number("GROUPS", self.groups),
            number("GATED", u32::from(self.is_gated)),
        ]
    }

    /// Returns what [`choose`](Self::choose) returns for a range of sizes.
    #[cfg(test)]
    pub(super) fn all() -> std::collections::HashSet<Self> {
        let mut all = std::collections::HashSet::new();
        for m in [1, MOST_ROWS] {
            for n in [64, 1024, 3072, 4096, 14_336, 1 << 20] {
                all.extend((1..=LEAVES).map(|leaves| Self::choose([m, n, leaves], false, 132)));
                all.extend([1, 2, 4, 8].map(|leaves| Self::choose([m, n, leaves], true, 132)));
            }
        }
        all
    }
}

impl Kernels {
    /// Computes a product of at most [`MOST_ROWS`] rows, with the sums of [`gemm`](Self::gemm).
    ///
    /// # Errors
    /// Returns the errors of [`Product::sizes`].
    pub(super) fn skinny(&self, product: Product<'_>, out: &mut Tensor) -> Result<()> {
        let Sizes { m, n, k, row, .. } = product.sizes(out)?;
        let Product { x, weight, bias, leaves, is_gated } = product;
        assert!(m <= MOST_ROWS && leaves <= LEAVES, "the product is a skinny one");
        assert!(x.dtype() != DType::F32 && k.is_multiple_of(8), "`has_gemm` holds");
        if m == 0 || n == 0 {
            return Ok(());
        }
        let multiprocessors = self.gpu.device.info().multiprocessors;
        let strips = Strips::choose([m, n, leaves], is_gated, multiprocessors);
        let blocks = n.div_ceil(strips.rows() * strips.groups as usize).min(multiprocessors as usize) as u32;
        let mut call = self.call(Source::Skinny(x.dtype(), out.dtype(), strips), "skinny");
        call.read(x)?.read(weight)?.read_optional(bias)?.write(out)?;
        let [m, n, k, row] =
            [to_u32("rows", m)?, to_u32("rows", n)?, to_u32("columns", k)?, to_u32("columns", row)?];
        call.value([m, n, k, row, u32::from(self.here(weight)?.is_settled())]);
        // SAFETY: warps read the `m` rows of `x`, and rows of the weights below `n`, up to the end of their leaf; all start at multiples of
        // 16 bytes. They read as many floats of the bias as the weight has rows, unless the bias is null, and write those of the
        // `m × outputs` elements of `out` that exist: checked above. The weight is read before the previous kernel has ended only if no
        // kernel has written it. A warp uses the stages and sums of its own in shared memory, and sums of its group.
        unsafe { call.launch_with_shared([blocks, 1], strips.warps() * 32, strips.shared_bytes()) }
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
            let strips = Strips::choose([m, n, leaves], is_gated, 132);
            prop_assert!(strips.stages >= 2 && strips.shared_bytes() <= ALL_SHARED);
            prop_assert!(strips.groups > 0 && strips.warps() as usize <= MOST_WARPS);
        }

        #[test]
        fn no_multiprocessor_has_many_more_rows_than_its_share(n in 1usize..200_000, leaves in 1..=LEAVES) {
            let strips = Strips::choose([1, n, leaves], false, 132);
            let in_block = strips.groups as usize * strips.rows();
            let rows = n.div_ceil(132 * in_block) * in_block;
            let share = n.div_ceil(132);
            prop_assert!(rows <= share.next_multiple_of(8) + share / 8 + 8, "{rows} of {share}");
        }
    }
}
