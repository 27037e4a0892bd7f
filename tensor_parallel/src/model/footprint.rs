//! The memory of a rank, computed from the settings alone: no weights are read, and no memory is allocated.

use ryzanstein_process_group::DType;

use super::config::LlamaConfig;
use super::plan::{self, NamedTensors};
use super::stage::Stage;
use crate::attention::CacheSize;
use crate::compute::PAGE_SIZE;
use crate::compute::cuda::FIXED_BYTES;
use crate::error::{Error, Result};
use crate::gpu::class;
use crate::shard::{self, HeadShard, ShardError};
use crate::tensor::element_count;

/// The memory of one rank on a GPU, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Its shard of the weights, with the padding of the vocabulary: the memory that loading allocates.
    pub weights: u64,
    /// The KV cache: the memory that [`Llama::decoder`](super::Llama::decoder) allocates.
    pub kv_cache: u64,
    /// Additional memory for computation: the workspace of cuBLASLt, counters, and the tensors of a pass that are alive at the
    /// same time, in the blocks of the pool that hold them. It includes one pass of a prompt of all positions and one of a token
    /// for each sequence, because a CUDA graph keeps its memory. Partial results of products and
    /// attention are left out. Those of products take a few MB. Those of attention take, for each number of sequences, up to 2 % of
    /// the keys and values of one layer for each query head of a group.
    pub workspace: u64,
    /// Bytes read by a decode step of all sequences when all positions are in use: all weights, except the rows of an embedding
    /// that is not also the head, and the keys and values within the windows.
    pub read_per_step: u64,
}

/// Computes the memory of one of `world_size` ranks on GPUs, for `sequences` sequences of `positions` positions each, with
/// activations of this type. It is the same on all ranks.
///
/// # Errors
/// Returns the errors of [`Llama::from_loader`](super::Llama::from_loader) and [`Llama::decoder`](super::Llama::decoder): the model
/// cannot run on this number of ranks, or does not support sequences of that length.
pub fn footprint(
    config: &LlamaConfig,
    world_size: usize,
    dtype: DType,
    sequences: usize,
    positions: usize,
) -> Result<Footprint> {
    let weights =
        plan::weight_bytes(config, &mut NamedTensors::default(), world_size, dtype, Stage::default())?;
    config.check_positions(positions)?;
    let heads = &shard::split_heads(config.heads, config.kv_heads, world_size)?[0];
    let pages = CacheSize::full(sequences, positions).pages;
    let cache = [2, config.layers, pages, heads.kv.len(), PAGE_SIZE, config.head_dim];
    let kv_cache = (element_count(&cache, dtype)? * dtype.size()) as u64;
    let too_many = || Error::input("passes of more bytes than can be counted");
    let of_pass = |tokens, logits| {
        pass(config, world_size, heads, dtype, (tokens, logits, positions)).ok_or_else(too_many)
    };
    let passes = of_pass(positions, 1)?.checked_add(of_pass(sequences, sequences)?);
    let workspace = passes.and_then(|passes| passes.checked_add(FIXED_BYTES)).ok_or_else(too_many)?;
    let embedding = if config.tied_embeddings {
        0
    } else {
        (vocabulary_share(config, world_size)? * config.hidden * dtype.size()) as u64
    };
    let read_per_step = weights - embedding + kv_read(config, kv_cache, positions);
    Ok(Footprint { weights, kv_cache, workspace: workspace as u64, read_per_step })
}

/// Returns the bytes of the cache that are within the windows. The cache has whole pages.
fn kv_read(config: &LlamaConfig, kv_cache: u64, positions: usize) -> u64 {
    let layers = &config.sliding_windows;
    let seen = |window: &Option<usize>| window.unwrap_or(positions).min(positions) as f64;
    let held = layers.len() as f64 * positions.next_multiple_of(PAGE_SIZE).max(1) as f64;
    let share = layers.iter().map(seen).sum::<f64>() / held;
    (kv_cache as f64 * share) as u64
}

fn vocabulary_share(config: &LlamaConfig, world_size: usize) -> Result<usize, ShardError> {
    Ok(shard::padded_vocabulary(config.vocabulary, world_size)? / world_size)
}

/// Returns the maximum bytes of the tensors that are alive at the same time on one rank in a pass of `rows` tokens of `logits` sequences
/// of at most `positions` positions, which returns a row of logits for each: see `Block::forward` and `Llama::pass`. Returns `None` on
/// overflow.
fn pass(
    config: &LlamaConfig,
    world_size: usize,
    heads: &HeadShard,
    dtype: DType,
    (rows, logits, positions): (usize, usize, usize),
) -> Option<usize> {
    let block = |rows: usize, width: usize, size: usize| {
        rows.checked_mul(width)?.checked_mul(size).filter(|b| *b < 1 << 60).map(class)
    };
    let (f32, size) = (size_of::<f32>(), dtype.size());
    let of = |width| block(rows, width, size);
    let queries_width = heads.query.len() * config.head_dim;
    let qkv_width = queries_width + 2 * heads.kv.len() * config.head_dim;
    let intermediate = config.intermediate / world_size;
    // Positions, page tables and tokens, with the frequencies, which may differ by sequence; sines and cosines.
    let sets = if config.rotary.depends_on_length() { logits } else { 1 };
    let tables = logits.checked_mul(positions.div_ceil(PAGE_SIZE))?;
    let words = sets.checked_mul(config.head_dim / 2)?.checked_add(tables)?.checked_add(2 * rows)?;
    let batch = block(1, words, f32)? + block(rows, config.head_dim, f32)?;
    let (hidden, qkv, queries) = (of(config.hidden)?, of(qkv_width)?, of(queries_width)?);
    let (inner, gate_up) = (of(intermediate)?, of(2 * intermediate)?);
    // A bias is added in f32 before the result of several rows is rounded to its type.
    let wide = |bias: bool, width| {
        if bias && dtype != DType::F32 && rows > 1 { block(rows, width, f32) } else { Some(0) }
    };
    // In addition to the layer's input and its norm: the projections, then the attended heads, then the output.
    let attention = 2 * hidden + (qkv + wide(config.qkv_bias, qkv_width)?.max(queries)).max(queries + hidden);
    // In addition to those and the attention's output with its norm: gate and up, their product, then the output.
    let mlp =
        4 * hidden + (gate_up + wide(config.mlp_bias, 2 * intermediate)?.max(inner)).max(inner + hidden);
    // The last rows, this rank's logits, those of all ranks, and those without padding.
    let share = vocabulary_share(config, world_size).ok()?;
    let head = block(logits, config.hidden, size)?
        + block(logits, share, f32)?
        + block(logits, share * world_size, f32)?
        + block(logits, config.vocabulary, f32)?;
    Some(batch + attention.max(mlp).max(head))
}
