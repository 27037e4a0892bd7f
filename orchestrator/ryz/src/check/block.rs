//! A small Llama with generated weights, sharded and unsharded.

use ryzanstein_benches::suite::steps::{self, ModelShape};
use ryzanstein_config::Numerics;
use ryzanstein_process_group::{DType, ProcessGroup, ReduceOp};
use ryzanstein_tensor_parallel::{CacheSize, Error, LlamaConfig, Passes};

/// The largest relative difference allowed: sums over shards are associated differently, so f32 rounds them differently.
pub(super) const LIMIT: f64 = 1e-5;

const HEAD_DIM: usize = 16;
const TOKENS: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 5];

/// The comparison of the sharded with the unsharded model.
pub(super) struct Comparison {
    pub(super) ranks: usize,
    /// Largest difference of a logit, over all ranks, divided by the largest logit.
    pub(super) difference: f64,
    pub(super) correct: bool,
}

/// Runs one layer with embedding and head on `group`, and again unsharded on this rank.
pub(super) fn compare(group: &mut ProcessGroup) -> Result<Comparison, Error> {
    let ranks = group.world_size();
    let config = config(ranks)?;
    // Any number of ranks can add with these.
    let numerics = group.numerics();
    group.set_numerics(Numerics::Fast);
    let sharded = logits(&config, group);
    group.set_numerics(numerics);
    let sharded = sharded?;
    let whole = logits(&config, &mut ProcessGroup::loopback(1).remove(0))?;
    let mut differences = group.upload(&[steps::difference(&sharded, &whole)])?;
    group.all_reduce(&mut differences, ReduceOp::Max)?;
    let difference = group.download(&differences)?[0];
    Ok(Comparison { ranks, difference, correct: difference <= LIMIT })
}

/// Returns the configuration of a model for any number of ranks: the number of heads is a multiple of it.
fn config(ranks: usize) -> Result<LlamaConfig, Error> {
    let heads = ranks * 8usize.div_ceil(ranks);
    ModelShape::new("check", [heads * HEAD_DIM, heads * 40, heads, heads], 250).config(1)
}

fn logits(config: &LlamaConfig, group: &mut ProcessGroup) -> Result<Vec<f32>, Error> {
    let model = steps::load(config, DType::F32, group)?;
    let mut decoder = model.decoder(CacheSize::full(1, TOKENS.len()), Passes::Eager)?;
    Ok(decoder.logits(0, &TOKENS, group)?.values()?.into_owned())
}
