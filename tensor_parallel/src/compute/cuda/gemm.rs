//! Products of several rows on the tensor cores of Hopper: `gemm.cu`.

#![expect(unsafe_code, reason = "the kernel is launched here, and the launch says what was checked")]

#[cfg(test)]
use std::collections::HashSet;

use ryzanstein_process_group::DType;
use ryzanstein_process_group::device::TensorMap;

use super::Cuda;
use super::attention::ARRIVALS;
use super::kernels::{Kernels, Source};
use super::launch::to_u32;
use crate::checkpoint::LEAVES;
use crate::error::{Error, Result};
use crate::gpu::Block;
use crate::tensor::Tensor;

/// Elements of a row in shared memory, and their bytes.
const DEPTH: u32 = 64;
const ROW_BYTES: u32 = DEPTH * 2;
/// Shared memory of a block that has a multiprocessor to itself, and of one of two.
const ALL_SHARED: u32 = 231_168;
const HALF_SHARED: u32 = 112_640;
/// The times of a round of half and of large tiles, in one unit: a large tile has twice the work, and reads fewer operands for it.
const HALF_ROUND: usize = 21;
const LARGE_ROUND: usize = 40;
/// The maximum number of rows that always take small tiles. With more, cuBLASLt is faster.
pub(super) const FEW_ROWS: usize = 64;
/// The minimum number of elements in a leaf of a sum that is divided for speed.
const SHORTEST_LEAF: usize = 512;

/// The tiles of a launch of `gemm.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tiles {
    /// Rows of `x`: a power of two from 16 to 128.
    tokens: u32,
    /// Warp groups for a tile, and the tiles of 64 rows of the weights of each.
    groups: u32,
    each: u32,
    /// Leaves of a sum that a block adds, and blocks that share a tile of the result.
    leaves: u32,
    blocks: u32,
    /// True for gates and ups.
    is_gated: bool,
    /// True if a block has a multiprocessor to itself, false if it is one of two.
    is_alone: bool,
}

impl Tiles {
    /// Returns the tiles of a product `[m, outputs]` with which the multiprocessors are busy for the shortest time.
    fn choose([m, outputs, leaves]: [usize; 3], is_gated: bool, multiprocessors: u32) -> Self {
        let fill = multiprocessors as usize;
        let parts = |tiles: &Self| tiles.parts(m, outputs);
        // Small tiles cost more than leaving a third of the multiprocessors idle.
        let is_enough = |tiles: &Self| 3 * parts(tiles) >= 2 * fill;
        let tokens = m.next_power_of_two().clamp(16, 128) as u32;
        if m > FEW_ROWS && leaves.is_power_of_two() {
            let leaves = leaves as u32;
            let halves = |blocks| Self {
                tokens,
                groups: 2,
                each: 1,
                leaves: leaves / blocks,
                blocks,
                is_gated,
                is_alone: true,
            };
            // Blocks that share tiles have one part each.
            let is_possible = |tiles: &Self| tiles.blocks == 1 || parts(tiles) <= fill;
            let blocks = [1, 2, 4, 8].into_iter().filter(|blocks| *blocks <= leaves);
            if let Some(halves) = blocks.map(halves).find(|tiles| is_enough(tiles) && is_possible(tiles)) {
                let large = Self { each: 2, ..halves };
                let rounds = |tiles: Self| parts(&tiles).div_ceil(fill);
                let is_shorter = HALF_ROUND * rounds(halves) < LARGE_ROUND * rounds(large);
                return if leaves > 1 || is_shorter { halves } else { large };
            }
        }
        let small = |each| Self {
            tokens,
            groups: 1,
            each,
            leaves: 1,
            blocks: leaves as u32,
            is_gated,
            is_alone: false,
        };
        // Gates and ups get a tile each where that still fills the multiprocessors.
        let small = if is_gated && parts(&small(2)) >= fill { small(2) } else { small(1) };
        // Sums that wait are in registers.
        let most = match tokens * small.each {
            ..=64 => 8,
            65..=128 => 2,
            _ => 1,
        };
        let each = |each: &u32| leaves.is_multiple_of(*each as usize) && *each <= most;
        let with = |each| Self { leaves: each, blocks: leaves as u32 / each, ..small };
        let mut tiles = [1, 2, 4, 8].into_iter().filter(each).map(with);
        // All shared memory for the weights of one block hides more of the memory's latency than two blocks do.
        let alone = tiles.clone().find(|tiles| is_enough(tiles) && parts(tiles) <= fill);
        let tiles = alone.or_else(|| tiles.rfind(|tiles| parts(tiles) >= fill)).unwrap_or(small);
        Self { is_alone: parts(&tiles) <= fill, ..tiles }
    }

    /// Returns the bytes of the sums of blocks that share tiles.
    fn partial_bytes(self, parts: usize) -> usize {
        if self.blocks > 1 { parts * (self.tokens * self.rows()) as usize * size_of::<f32>() } else { 0 }
    }

    /// Returns the number of rows of the result that a block writes.
    fn outputs(self) -> u32 {
        self.rows() / if self.is_gated { 2 } else { 1 }
    }

    /// Returns the number of parts of all tiles of a product `[m, outputs]`.
    fn parts(self, m: usize, outputs: usize) -> usize {
        m.div_ceil(self.tokens as usize) * outputs.div_ceil(self.outputs() as usize) * self.blocks as usize
    }

    /// Returns the rows of the weights of a tile.
    fn rows(self) -> u32 {
        self.groups * self.each * 64
    }

    /// Returns the rows of the weights that are copied at a time: `BOX`.
    fn box_rows(self) -> u32 {
        self.outputs().min(64)
    }

    /// Returns true if a block takes one part after the other, or one part if it shares its tile.
    fn is_persistent(self) -> bool {
        self.groups > 1
    }

    fn stage_bytes(self) -> u32 {
        (self.rows() + self.tokens) * ROW_BYTES
    }

    /// Returns the bytes of shared memory behind the stages of a persistent block: sums of four leaves that wait for those of the next
    /// four, and 16 rows of sums on their way to the result, each longer by 16 bytes.
    fn behind_stages(self) -> u32 {
        let waiting = if self.leaves == 8 { self.tokens * self.rows() * 4 } else { 0 };
        if self.is_persistent() { waiting + 16 * (self.rows() + 4) * 4 } else { 0 }
    }

    /// Returns the number of pairs of tiles in shared memory.
    fn stages(self) -> u32 {
        let room = if self.is_alone { ALL_SHARED } else { HALF_SHARED };
        (room - self.behind_stages()) / self.stage_bytes()
    }

    /// Returns the threads of the warp groups and of the producer: a warp or, where registers move between them, a warp group.
    fn threads(self) -> u32 {
        self.groups * 128 + if self.is_persistent() { 128 } else { 32 }
    }

    /// Returns the bytes of dynamic shared memory: the tiles, from a multiple of 1024 on.
    fn shared_bytes(self) -> u32 {
        self.stages() * self.stage_bytes() + self.behind_stages() + 1023
    }

    /// Returns the macros that compile it.
    pub(super) fn macros(self) -> Vec<(&'static str, String)> {
        let number = |name, value: u32| (name, value.to_string());
        vec![
            ("WGMMA", String::new()),
            number("WGMMA_N", self.tokens),
            number("TOKENS", self.tokens),
            number("GROUPS", self.groups),
            number("TILES", self.each),
            number("STAGES", self.stages()),
            number("LEAVES", self.leaves),
            number("BLOCKS", self.blocks),
            number("GATED", u32::from(self.is_gated)),
        ]
    }

    /// Returns what [`choose`](Self::choose) returns for a range of sizes.
    #[cfg(test)]
    pub(super) fn all() -> HashSet<Self> {
        let mut all = HashSet::new();
        for m in [9, 17, 33, 65, 512, 1 << 20] {
            for outputs in [64, 1024, 4096, 8192, 16_384, 1 << 20] {
                for leaves in 1..=LEAVES {
                    all.insert(Self::choose([m, outputs, leaves], false, 132));
                }
                for leaves in [1, 2, 4, 8] {
                    all.insert(Self::choose([m, outputs, leaves], true, 132));
                }
            }
        }
        all
    }
}

impl Cuda {
    /// Returns the number of leaves of the sums of `x · weightᵀ` with which each multiprocessor has a tile.
    pub(super) fn leaves_for_speed(&self, x: &Tensor, weight: &Tensor) -> usize {
        let (tiles, multiprocessors) = (weight.rows().div_ceil(64), self.gpu.device.info().multiprocessors);
        let leaves = legal_leaves(x.columns());
        let enough = |leaves: &usize| leaves * tiles >= multiprocessors as usize;
        leaves.clone().find(enough).or_else(|| leaves.last()).unwrap_or(1)
    }
}

/// Returns the numbers of leaves in which a sum of `k` products may be divided for speed.
fn legal_leaves(k: usize) -> impl Iterator<Item = usize> + Clone {
    let legal = move |leaves: &usize| k.is_multiple_of(8 * leaves) && k / leaves >= SHORTEST_LEAF;
    [1, 2, 4, 8].into_iter().take_while(legal)
}

/// Returns the number of leaves of a sum of `k` products, for any number of rows and outputs. Four help a rank with few outputs, and cost
/// prompts little.
pub(super) fn leaves_of_any_size(k: usize) -> usize {
    legal_leaves(k).take_while(|leaves| *leaves <= 4).last().unwrap_or(1)
}

/// The product `out[m, n] = x[m, k] · weight[n, k]ᵀ + bias[n]`. The leaves of a sum are added as a [tree](crate::shard::split_leaves). The
/// weight may be `[leaves × n, k / leaves]`: the rows for each leaf in turn. If gated, the first half of the rows are gates, and
/// `out[m, n / 2] = silu(gate) × up`.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) x: &'a Tensor,
    pub(super) weight: &'a Tensor,
    pub(super) bias: Option<&'a Tensor>,
    pub(super) leaves: usize,
    pub(super) is_gated: bool,
}

/// The sizes of a product.
pub(super) struct Sizes {
    /// Rows of `x` and of the weight, and length of a leaf.
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Columns of the result.
    outputs: usize,
    /// Elements from a row of the weight to the next, and from a leaf to the next.
    pub(super) row: usize,
    leaf: usize,
}

impl Product<'_> {
    /// Returns its sizes, with a result in `out`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, the bias is not `f32`, or a sum has more than [`LEAVES`] leaves.
    pub(super) fn sizes(self, out: &Tensor) -> Result<Sizes> {
        let Self { x, weight, bias, leaves, is_gated } = self;
        let (m, k) = (x.rows(), x.columns() / leaves);
        let n = weight.count() / x.columns();
        let outputs = if is_gated { n / 2 } else { n };
        let (row, leaf) = if weight.rows() == n { (x.columns(), k) } else { (k, n * k) };
        let fits = [k * leaves, row] == [x.columns(), weight.columns()]
            && weight.count() == n * x.columns()
            && out.count() == m * outputs
            && (!is_gated || 2 * outputs == n);
        if !fits {
            return Err(Error::shape_mismatch("product", weight, x));
        }
        if leaves > LEAVES {
            return Err(Error::input(format!(
                "a sum of {leaves} leaves is more than the {LEAVES} that a GPU adds"
            )));
        }
        if let Some(bias) = bias.filter(|b| b.count() != n || b.dtype() != DType::F32) {
            return Err(Error::shape_mismatch("bias", weight, bias));
        }
        Ok(Sizes { m, n, k, outputs, row, leaf })
    }

    /// Returns true if the tensor cores multiply these types, and copies, which start at multiples of 16 bytes, can start at each leaf.
    pub(super) fn fits_tensor_cores(self) -> bool {
        let types = [self.x.dtype(), self.weight.dtype()];
        types[0] == types[1] && types[0] != DType::F32 && self.x.columns().is_multiple_of(8 * self.leaves)
    }
}

impl Kernels {
    /// Computes a product with the kernel of `gemm.cu`.
    ///
    /// # Errors
    /// Returns the errors of [`Product::sizes`].
    pub(super) fn gemm(&self, product: Product<'_>, out: &mut Tensor, arrivals: &Block) -> Result<()> {
        let Sizes { m, n, k, outputs, row, leaf } = product.sizes(out)?;
        let Product { x, weight, bias, leaves, is_gated } = product;
        assert!(product.fits_tensor_cores(), "the product is one for tensor cores");
        let multiprocessors = self.gpu.device.info().multiprocessors;
        let tiles = Tiles::choose([m, outputs, leaves], is_gated, multiprocessors);
        let map = |tensor: &Tensor, rows: usize, strides: [usize; 2], height| {
            let (address, lengths) = (self.row_of(tensor, 0)?, [k, rows, leaves].map(|n| n as u64));
            let (strides, area) = (strides.map(|stride| stride as u64), [DEPTH, height]);
            Ok::<_, Error>(TensorMap::new(&self.gpu.device, address, tensor.dtype(), lengths, strides, area)?)
        };
        let parts = tiles.parts(m, outputs);
        if tiles.blocks > 1 && parts / tiles.blocks as usize > ARRIVALS {
            return Err(Error::input(format!(
                "a product of {m} rows and {outputs} outputs has more than {ARRIVALS} tiles that blocks share; pass fewer rows"
            )));
        }
        let blocks = if tiles.is_persistent() { parts.min(multiprocessors as usize) } else { parts };
        let blocks = to_u32("tiles", blocks)?;
        debug_assert!(
            tiles.blocks == 1 || blocks as usize == parts,
            "a block that shares a tile has one part"
        );
        let partial = self.gpu.scratch(tiles.partial_bytes(parts))?;
        let mut call = self.call(Source::Gemm(x.dtype(), out.dtype(), tiles), "gemm");
        call.value(map(weight, n, [row, leaf], tiles.box_rows())?);
        call.value(map(x, m, [x.columns(), k], tiles.tokens)?);
        call.read_optional(bias)?.write(out)?.block(&partial, 0)?.block(arrivals, 0)?;
        let sizes = [to_u32("rows", m)?, to_u32("rows", n)?, to_u32("columns", k)?];
        let [m, n, k] = sizes;
        call.value([m, n, k, u32::from(self.here(weight)?.is_settled())]);
        // SAFETY: copies stay within the tensors that the maps describe, which are those of `x` and the weight: checked above. A
        // block reads as many floats of the bias as it has rows of the weight, unless the bias is null, and writes tiles of the
        // [m, outputs] elements of `out`, whose edges it checks. `partial` has a place for the sums of each block that shares a tile, and
        // such blocks count at their tile's counter. The weight is read before earlier kernels have ended only if no kernel has
        // written it.
        unsafe { call.launch_with_shared([blocks, 1], tiles.threads(), tiles.shared_bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The most shared memory of a block of Hopper, and of one of two: they share 228 KiB, and each needs 1 KiB more than it asks for.
    const MOST: u32 = 227 << 10;
    const MOST_OF_TWO: u32 = (228 << 10) / 2 - (1 << 10);

    #[test]
    fn the_tiles_that_are_compiled_in_tests_are_of_every_kind() {
        let all = Tiles::all();
        assert!(
            [1, 2, 4, 8].iter().all(|n| all.iter().any(|tiles| tiles.is_persistent() && tiles.leaves == *n))
        );
        assert!(all.iter().any(|tiles| tiles.is_persistent() && tiles.each == 2));
        assert!(all.iter().any(|tiles| tiles.leaves == 8) && all.iter().any(|tiles| tiles.blocks == 8));
        assert!(all.iter().any(|tiles| tiles.is_persistent() && tiles.blocks == 4));
        assert!(all.iter().any(|tiles| tiles.is_gated && tiles.rows() == 64));
    }

    proptest! {
        #[test]
        fn tiles_fit_a_multiprocessor_and_have_every_leaf(
            m in 1usize..5000, outputs in 1usize..40_000, leaves in 1usize..=LEAVES, is_gated in any::<bool>(),
        ) {
            let tiles = Tiles::choose([m, outputs, leaves], is_gated, 132);
            prop_assert_eq!((tiles.leaves * tiles.blocks) as usize, leaves);
            prop_assert!(tiles.leaves.is_power_of_two() && tiles.stages() >= 2);
            // The barriers of the stages.
            let bytes = tiles.shared_bytes() + 16 * tiles.stages() + 16;
            let most = if tiles.is_alone { MOST } else { MOST_OF_TWO };
            prop_assert!(bytes <= most, "{bytes} of {most}");
            // Sums that take the place of the stages.
            let sums = tiles.tokens * (tiles.rows() + 4) * 4;
            prop_assert!(tiles.is_persistent() || sums <= tiles.stages() * tiles.stage_bytes());
            prop_assert!(tiles.blocks == 1 || !tiles.is_persistent() || tiles.parts(m, outputs) <= 132);
        }
    }
}
