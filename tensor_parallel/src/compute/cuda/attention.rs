//! Attention on a GPU. `attention.cu` has what all kernels share, and `append`. New positions take one of `prefill.cu`,
//! `prefill_mma.cu` and `prefill_wgmma.cu`; on Hopper a single one takes `decode_wgmma.cu`. Blocks share the positions that a single one
//! sees.

#![expect(unsafe_code, reason = "each kernel is launched here, and each launch says what was checked")]

use bytemuck::{Pod, Zeroable};
use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;

use super::Cuda;
use super::kernels::Source;
use super::launch::{KernelCall, MOST_BLOCKS_Y, to_u32};
use crate::compute::batch::{PAGE_SIZE, Part};
use crate::compute::operations::{AttentionCall, Compute as _, LayerCache};
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Number of counters for the blocks of one launch that wait for each other's results.
pub(super) const ARRIVALS: usize = MOST_BLOCKS_Y as usize;

/// The maximum length of a head whose tiles fit the shared memory of a block.
const LONGEST: usize = 256;

/// `Shape` of `attention.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Shape {
    rows: u32,
    run: u32,
    kv_heads: u32,
    pages: u32,
    window: u32,
    scale: f32,
    splits: u32,
    results: u32,
}

/// The kernels of attention.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Variant {
    /// `prefill.cu`, which computes in `f32`.
    Vectors,
    /// `prefill_mma.cu`, with tensor cores.
    Mma,
    /// `prefill_wgmma.cu` and `decode_wgmma.cu`, with the tensor cores of Hopper.
    Wgmma,
}

impl Variant {
    /// Returns the fastest kernels that support these arguments.
    pub(super) fn choose(dtype: DType, head_dim: usize, capability: (u32, u32)) -> Self {
        match capability {
            _ if dtype == DType::F32 => Self::Vectors,
            // Only this architecture has the instructions.
            (9, _) if [64, 128].contains(&head_dim) => Self::Wgmma,
            (8.., _) if head_dim.is_multiple_of(16) && head_dim <= 128 => Self::Mma,
            _ => Self::Vectors,
        }
    }

    /// Returns the macro that compiles them.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vectors => "VECTORS",
            Self::Mma => "MMA",
            Self::Wgmma => "WGMMA",
        }
    }

    /// Returns the kernel for single positions or for prompts.
    fn kernel(self, is_single: bool) -> &'static str {
        if is_single && self != Self::Mma { "decode" } else { "prefill" }
    }

    /// Returns the number of queries in a tile of this kernel.
    fn queries(self, is_single: bool, head_dim: usize) -> usize {
        match self {
            Self::Vectors if is_single => 8,
            Self::Vectors => self.keys(head_dim),
            Self::Wgmma if !is_single => 128,
            Self::Mma | Self::Wgmma => 64,
        }
    }

    /// Returns the number of threads of its blocks.
    fn threads(self, is_single: bool) -> u32 {
        if self == Self::Wgmma && !is_single { 256 } else { 128 }
    }

    /// Returns the bytes of dynamic shared memory for this number of queries and of tiles of keys and values.
    fn shared_bytes(self, queries: usize, tiles: usize, head_dim: usize) -> u32 {
        match self {
            Self::Vectors | Self::Mma => 0,
            // A tile has as many keys or values as a head has elements. The first one is at a multiple of 1024.
            Self::Wgmma => ((queries + tiles * head_dim) * head_dim * 2 + 1023) as u32,
        }
    }

    /// Returns the number of positions in a tile of keys.
    fn keys(self, head_dim: usize) -> usize {
        match self {
            Self::Vectors if head_dim <= 128 => 32,
            Self::Vectors => 16,
            Self::Mma => 64,
            // A tile is square.
            Self::Wgmma => head_dim,
        }
    }

    /// Returns the blocks that share a multiprocessor when single positions see many others.
    fn blocks(self) -> usize {
        match self {
            Self::Vectors | Self::Mma => 4,
            Self::Wgmma => 2,
        }
    }
}

impl Cuda {
    pub(super) fn attend(
        &self,
        mut qkv: Tensor,
        call: &AttentionCall<'_>,
        cache: &mut LayerCache,
    ) -> Result<Tensor> {
        // Heads, rows and slots match the input and are within the cache; keys and values have the same shape.
        cache.check(&qkv, call)?;
        let &AttentionCall { heads, kv_heads, head_dim, batch, window, norms } = call;
        let (rows, dtype) = (qkv.rows(), qkv.dtype());
        if [cache.keys.dtype(), cache.values.dtype()] != [dtype; 2] {
            return Err(Error::input(format!(
                "attention on a GPU needs a cache of the activations' type {dtype}, and this one is {}",
                cache.keys.dtype()
            )));
        }
        if head_dim > LONGEST || !head_dim.is_multiple_of(2) {
            return Err(Error::input(format!(
                "attention on a GPU takes heads of an even length up to {LONGEST}, not {head_dim}; run this model with \
                 the backend tcp"
            )));
        }
        let mut y = self.scratch(&[rows, heads * head_dim], dtype)?;
        if rows == 0 {
            return Ok(y);
        }
        // Kernels also number the queries of a key/value head.
        to_u32("queries", rows.saturating_mul(heads / kv_heads))?;
        let shape = Shape {
            rows: to_u32("positions", rows)?,
            run: 0,
            kv_heads: to_u32("heads", kv_heads)?,
            pages: to_u32("pages", batch.slots().table_length())?,
            window: window.map_or(0, |w| u32::try_from(w.max(1)).unwrap_or(0)),
            scale: 1.0 / (head_dim as f32).sqrt(),
            splits: 1,
            results: 0,
        };
        if let Some(norms) = norms {
            self.kernels.head_norms(&mut qkv, &norms, [heads, kv_heads, head_dim])?;
        }
        for part in batch.slots().parts() {
            self.attend_part(&qkv, call, cache, &mut y, &part, shape)?;
        }
        Ok(y)
    }

    /// Computes the attention of one part of the batch, whose rows are some of the rows of the input and of `y`. The call has
    /// been checked, and `shape` is that of the whole batch.
    fn attend_part(
        &self,
        qkv: &Tensor,
        &AttentionCall { heads, kv_heads, head_dim, batch, .. }: &AttentionCall<'_>,
        cache: &mut LayerCache,
        y: &mut Tensor,
        part: &Part,
        shape: Shape,
    ) -> Result<()> {
        let (start, rows) = (part.rows.start, part.rows.len());
        let (dtype, group) = (qkv.dtype(), heads / kv_heads);
        let variant = Variant::choose(dtype, head_dim, self.gpu.device.info().capability);
        let source = Source::Attention(dtype, head_dim, group, variant);
        let device = batch.device()?;
        let (slots, rotations) = (batch.slots(), head_dim * size_of::<f32>());
        assert!(
            device.state.bytes() >= slots.state_words() * size_of::<u32>(),
            "a batch has the slots of all its tokens"
        );
        assert!(
            device.rotations.bytes() >= part.rows.end * rotations,
            "a batch has the rotations of all its tokens"
        );
        let is_single = part.is_single();
        let run = if is_single { 1 } else { rows };
        let queries = variant.queries(is_single, head_dim);
        let (tiles, runs) = ((run * group).div_ceil(queries), rows / run * kv_heads);
        if is_single && tiles * runs > ARRIVALS {
            return Err(Error::input(format!(
                "{heads} heads of {rows} sequences on one GPU are more than {ARRIVALS} blocks; decode fewer at once"
            )));
        }
        // Without tensor cores, tiles of keys do not have sums of their own, which could be added in the order of a prompt's.
        let can_share = is_single && (self.numerics == Numerics::Fast || variant != Variant::Vectors);
        let blocks = variant.blocks() * self.gpu.device.info().multiprocessors as usize;
        let tiles_of_keys = (slots.table_length() * PAGE_SIZE).div_ceil(variant.keys(head_dim));
        let splits = if can_share { (blocks / (tiles * runs)).clamp(1, tiles_of_keys.max(1)) } else { 1 };
        let results = match self.numerics {
            _ if splits == 1 => 0,
            Numerics::Fast => splits,
            // Each tile leaves a result, so that the bits are those of a prompt.
            Numerics::Invariant => tiles_of_keys,
        };
        let shape = Shape {
            rows: to_u32("positions", rows)?,
            run: run as u32,
            splits: splits as u32,
            results: results as u32,
            ..shape
        };
        // The first arguments of all three kernels.
        let begin = |name| -> Result<KernelCall<'_>> {
            let mut kernel = self.kernels.call(source, name);
            kernel.read_from(qkv, start)?;
            kernel
                .block(&device.rotations, start * rotations)?
                .block(&device.state, slots.state_offset(part) * size_of::<u32>())?;
            Ok(kernel)
        };
        let appends = is_single && variant == Variant::Wgmma;
        if !appends {
            let mut append = begin("append")?;
            append.write(&mut cache.keys)?.write(&mut cache.values)?.value(shape);
            // SAFETY: a block reads the position, page table and rotations of one row, and one key and value head of the input, and
            // writes them to that slot of the cache. The slots on the device are those that were checked: see `Batch::update_device`.
            unsafe { append.launch([shape.rows, shape.kv_heads], 64) }?;
        }
        // The block returns to the pool at the end of this function: its next user comes later in the stream.
        let partial = self.gpu.scratch(rows * heads * results * (head_dim + 2) * size_of::<f32>())?;
        let mut attend = begin(variant.kernel(is_single))?;
        attend.write(&mut cache.keys)?.write(&mut cache.values)?.write_from(y, start)?;
        attend.block(&partial, 0)?.block(&self.arrivals, 0)?.value(shape);
        let shared = variant.shared_bytes(queries, if is_single { 2 } else { 4 }, head_dim);
        let grid = [to_u32("queries", tiles * splits)?, to_u32("heads", runs)?];
        // SAFETY: a block reads rows of one run of the part with their rotations, positions and page tables, and keys and values of its
        // pages up to the last row's position, as rows of a run follow each other; it writes its rows and heads of `y`. If there are
        // several splits, a row is a run, and a block writes `head_dim` + 2 floats of `partial` for each of its heads and results, and the
        // counter of its tile of queries, below ARRIVALS. Counters are used in the order of the stream, and zero after. A kernel that
        // appends writes the slots of its rows in the cache, which were checked as above. It reads positions, tables and earlier keys and
        // values before earlier kernels have ended: only copies write the former, and the latter are complete if the batch was made as
        // `Compute::attention` and `SlotMapping::push` say, and otherwise have any value.
        unsafe { attend.launch_with_shared(grid, variant.threads(is_single), shared) }
    }
}
