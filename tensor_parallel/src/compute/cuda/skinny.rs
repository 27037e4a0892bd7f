//! Products of few rows on tensor cores: `skinny.cu`.

#![expect(unsafe_code, reason = "the kernel is launched here, and the launch says what was checked")]

use super::gemm::{Product, Sizes};
use super::kernels::{Kernels, Source};
use super::launch::{MOST_BLOCKS_Y, to_u32};
#[cfg(test)]
use crate::checkpoint::LEAVES;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Rows of `x` of a block.
pub(super) const MOST_ROWS: usize = 8;
/// Bytes of a row in a stage.
const ROW_BYTES: u32 = 256;
/// The maximum number of warps of a block, and of stages of each warp's ring.
const MOST_WARPS: usize = 12;
const MOST_STAGES: u32 = 8;

/// Multiprocessors, and bytes of shared memory of a block, of H200, A100 and L4.
#[cfg(test)]
pub(super) const GPUS: [[u32; 2]; 3] = [[132, 227 << 10], [108, 163 << 10], [58, 99 << 10]];

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
    fn choose([m, n, leaves]: [usize; 3], is_gated: bool, [multiprocessors, shared]: [u32; 2]) -> Self {
        let most = (MOST_WARPS / leaves).max(1);
        let choices = [2, 1].into_iter().flat_map(|tiles| {
            let of_each = n.div_ceil(8 * tiles).div_ceil(multiprocessors as usize);
            // Fewer than half of the warps read slower than memory can.
            let groups = of_each.min(most.div_ceil(2))..=of_each.min(most);
            groups.rev().map(move |groups| {
                let tokens = if m == 1 { 1 } else { MOST_ROWS as u32 };
                let (tiles, leaves, groups) = (tiles as u32, leaves as u32, groups as u32);
                let strips = Self { tokens, tiles, stages: 0, leaves, groups, is_gated };
                let room = (shared / strips.warps()).saturating_sub(strips.sums_bytes());
                let stages = (room / strips.stage_bytes()).min(MOST_STAGES);
                (
                    of_each.div_ceil(groups as usize) * strips.rows() * groups as usize,
                    Self { stages, ..strips },
                )
            })
        });
        // Of equal ones the first: two tiles share the rows of x, and more warps read faster.
        let fitting = choices.filter(|(_, strips)| strips.stages >= 2);
        fitting.min_by_key(|(rows, _)| *rows).expect("a block has room for a group of warps").1
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
    pub(super) fn all(gpu: [u32; 2]) -> std::collections::HashSet<Self> {
        let mut all = std::collections::HashSet::new();
        for m in [1, MOST_ROWS] {
            for n in [64, 1024, 3072, 4096, 14_336, 1 << 20] {
                all.extend((1..=LEAVES).map(|leaves| Self::choose([m, n, leaves], false, gpu)));
                all.extend([1, 2, 4, 8].map(|leaves| Self::choose([m, n, leaves], true, gpu)));
            }
        }
        all
    }
}

impl Kernels {
    /// Computes a product with the sums of [`gemm`](Self::gemm). The weights are read once for every [`MOST_ROWS`] rows.
    ///
    /// # Errors
    /// Returns the errors of [`Product::sizes`], or an error if there are more rows than a grid has blocks for.
    pub(super) fn skinny(&self, product: Product<'_>, out: &mut Tensor) -> Result<()> {
        let info = self.gpu.device.info();
        self.skinny_on([info.multiprocessors, info.shared_bytes], product, out)
    }

    /// Computes it with the strips of a GPU with this number of multiprocessors and of bytes of shared memory for a block.
    fn skinny_on(&self, gpu: [u32; 2], product: Product<'_>, out: &mut Tensor) -> Result<()> {
        let Sizes { m, n, k, row, .. } = product.sizes(out)?;
        let Product { x, weight, bias, leaves, is_gated } = product;
        assert!(product.fits_tensor_cores(), "the product is one for tensor cores");
        if m == 0 || n == 0 {
            return Ok(());
        }
        let most = MOST_BLOCKS_Y as usize * MOST_ROWS;
        if m > most {
            return Err(Error::input(format!(
                "a product of {m} rows is more than the {most} that a GPU takes at once; pass fewer"
            )));
        }
        let strips = Strips::choose([m, n, leaves], is_gated, gpu);
        let groups = n.div_ceil(strips.rows() * strips.groups as usize);
        let grid = [groups.min(gpu[0] as usize) as u32, m.div_ceil(MOST_ROWS) as u32];
        let mut call = self.call(Source::Skinny(x.dtype(), out.dtype(), strips), "skinny");
        call.read(x)?.read(weight)?.read_optional(bias)?.write(out)?;
        let [m, n, k, row] =
            [to_u32("rows", m)?, to_u32("rows", n)?, to_u32("columns", k)?, to_u32("columns", row)?];
        call.value([m, n, k, row, u32::from(self.here(weight)?.is_settled())]);
        // SAFETY: warps read the `m` rows of `x`, and rows of the weights below `n`, up to the end of their leaf; all start at multiples of
        // 16 bytes. Copies from addresses behind these have size 0, and read nothing. Warps read as many floats of the bias as the
        // weight has rows, unless the bias is null, and write those of the `m × outputs` elements of `out` that exist: checked above. The
        // weight is read before earlier kernels have ended only if no kernel has written it. A warp uses the stages and sums of its own in
        // shared memory, and sums of its group.
        unsafe { call.launch_with_shared(grid, strips.warps() * 32, strips.shared_bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use ryzanstein_config::{DeviceConfig, Numerics};
    use ryzanstein_process_group::device::{Device, Libraries, LibrarySearch};
    use ryzanstein_process_group::{DType, LocalRank};

    use super::*;
    use crate::compute::{Compute as _, Cuda};

    #[test]
    fn the_strips_that_are_compiled_in_tests_are_of_every_kind() {
        let all = Strips::all(GPUS[0]);
        assert!((1..=LEAVES as u32).all(|n| all.iter().any(|strips| strips.leaves == n)));
        for tokens in [1, 8] {
            for tiles in [1, 2] {
                assert!(all.iter().any(|strips| (strips.tokens, strips.tiles) == (tokens, tiles)));
            }
        }
    }

    #[test]
    #[ignore = "needs a GPU of compute capability 9.0"]
    fn any_number_of_rows_has_the_bits_of_gemm() {
        let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
        let libraries = Arc::new(Libraries::find(&DeviceConfig::default(), &search));
        let device = Device::open(&libraries, LocalRank(0), &DeviceConfig::default()).unwrap();
        let cuda = Cuda::with_numerics(&device, 4, Numerics::Invariant).unwrap();
        let tensor = |rows: usize, columns: usize, seed: u32| {
            let values = (0..(rows * columns) as u32).map(|i| (i.wrapping_mul(seed) >> 8) as f32 / 8e6 - 1.0);
            cuda.upload(Tensor::new(&[rows, columns], values.collect(), DType::BF16).unwrap()).unwrap()
        };
        let bias = cuda.upload(Tensor::new(&[1000], vec![0.5; 1000], DType::F32).unwrap()).unwrap();
        for (m, leaves, is_gated) in
            [(1, 1, true), (9, 4, false), (20, 1, true), (21, 3, false), (64, 8, false)]
        {
            let (k, n) = (leaves * 264, 1000);
            let x = tensor(m, k, 2_654_435_761);
            // Rows with all leaves, and the rows of each leaf in turn.
            let weights = [tensor(n, k, 2_246_822_519), tensor(leaves * n, k / leaves, 2_246_822_519)];
            for (weight, bias) in weights.iter().flat_map(|weight| [(weight, None), (weight, Some(&bias))]) {
                let product = Product { x: &x, weight, bias, leaves, is_gated };
                let result = || cuda.scratch(&[m, if is_gated { n / 2 } else { n }], DType::F32).unwrap();
                let mut want = result();
                cuda.kernels.gemm(product, &mut want, &cuda.arrivals).unwrap();
                for gpu in GPUS {
                    let mut got = result();
                    cuda.kernels.skinny_on(gpu, product, &mut got).unwrap();
                    let what = format!("{m} rows, {leaves} leaves, {:?}, {gpu:?}", weight.shape());
                    assert!(got.values().unwrap() == want.values().unwrap(), "{what}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn strips_fit_a_multiprocessor(
            m in 1..=100usize, n in 1usize..200_000, leaves in 1..=LEAVES, is_gated in any::<bool>(), gpu in 0..GPUS.len(),
        ) {
            let strips = Strips::choose([m, n, leaves], is_gated, GPUS[gpu]);
            prop_assert!(strips.stages >= 2 && strips.shared_bytes() <= GPUS[gpu][1]);
            prop_assert!(strips.groups > 0 && strips.warps() as usize <= MOST_WARPS);
        }

        #[test]
        fn no_multiprocessor_has_many_more_rows_than_its_share(n in 1usize..200_000, leaves in 1..=LEAVES) {
            let strips = Strips::choose([1, n, leaves], false, GPUS[0]);
            let in_block = strips.groups as usize * strips.rows();
            let rows = n.div_ceil(132 * in_block) * in_block;
            let share = n.div_ceil(132);
            prop_assert!(rows <= share.next_multiple_of(8) + share / 8 + 8, "{rows} of {share}");
        }
    }
}
