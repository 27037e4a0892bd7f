//! The properties of a model that `config.json` alone determines: its tensors, and its legal world sizes. Pure.

use std::cell::Cell;
use std::collections::HashSet;
use std::iter;

use ryzanstein_config::{InstructionSet, Numerics};
use ryzanstein_process_group::DType;

use super::config::LlamaConfig;
use super::llama::Llama;
use super::stage::Stage;
use crate::checkpoint::{LEAVES, Loader, TensorSlice, WeightSource};
use crate::compute::Host;
use crate::error::{ConfigurationError, Error, Result};
use crate::shard::{self, ShardError};
use crate::tensor::Tensor;

/// The embedding, and the head if it has a matrix of its own.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// One tensor of the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its whole shape.
    pub shape: Vec<usize>,
}

/// A source without weights, which lists the tensors that a model loads.
#[derive(Default)]
pub(super) struct NamedTensors(Vec<TensorSpec>);

impl WeightSource for NamedTensors {
    fn fill(&mut self, tensor: &TensorSlice<'_>, _: &mut Tensor, _: usize) -> Result<()> {
        self.0.push(TensorSpec { name: tensor.name.into(), shape: tensor.shape.into() });
        Ok(())
    }
}

/// Returns all tensors that the model needs, embedding first.
///
/// # Errors
/// Returns the errors of [`stage_tensors`].
pub fn tensors(config: &LlamaConfig) -> Result<Vec<TensorSpec>> {
    stage_tensors(config, Stage::default())
}

/// Returns all tensors that a stage needs. A tied embedding is also the head of the last stage.
///
/// # Errors
/// Returns an error if no model can have these settings.
pub fn stage_tensors(config: &LlamaConfig, stage: Stage) -> Result<Vec<TensorSpec>> {
    let mut source = NamedTensors::default();
    weight_bytes(config, &mut source, 1, DType::F32, stage)?;
    Ok(source.0)
}

/// Returns the bytes of the first rank's weights of a stage, and lists their tensors in `source`.
///
/// # Errors
/// Returns the errors of [`Llama::from_loader`].
pub(super) fn weight_bytes(
    config: &LlamaConfig,
    source: &mut NamedTensors,
    world_size: usize,
    dtype: DType,
    stage: Stage,
) -> Result<u64> {
    let bytes = Cell::default();
    let compute = Host::with_numerics(1, InstructionSet::Scalar, Numerics::Fast);
    let mut loader = Loader::new(source, 0, world_size, dtype)?.at_stage(stage).counting(&bytes);
    Llama::from_loader(config.clone(), dtype, Box::new(compute), &mut loader)?;
    Ok(bytes.get())
}

/// Returns the names that are not among the tensors of a model, except those that are always harmless.
pub(super) fn unused<'a>(
    config: &LlamaConfig,
    used: &[TensorSpec],
    names: impl Iterator<Item = &'a str>,
) -> Vec<&'a str> {
    let used: HashSet<&str> = used.iter().map(|spec| &*spec.name).collect();
    // Rotary frequencies are computed from `config.json`; some tools store a tied head a second time.
    let is_harmless = |name: &str| name.contains(".rotary_emb.") || (config.tied_embeddings && name == HEAD);
    names.filter(|name| !used.contains(name) && !is_harmless(name)).collect()
}

fn check(config: &LlamaConfig, world_size: usize, numerics: Numerics) -> Result<(), ShardError> {
    shard::split_heads(config.heads, config.kv_heads, world_size)?;
    shard::split_evenly("intermediate features", config.intermediate, world_size)?;
    if numerics == Numerics::Invariant {
        shard::split_leaves(leaves(config), world_size)?;
    }
    Ok(())
}

/// Returns the number of parts in which row-parallel layers add their inputs with invariant numerics, the same for every world
/// size: at most [`LEAVES`], the smallest legal world size above 1 times a power of two.
pub(super) fn leaves(config: &LlamaConfig) -> usize {
    let inputs = [config.heads.saturating_mul(config.head_dim), config.intermediate];
    let smallest = (2..=LEAVES).find(|n| check(config, *n, Numerics::Fast).is_ok()).unwrap_or(1);
    let doubled =
        iter::successors(Some(smallest), |leaves| Some(2 * leaves)).take_while(|leaves| *leaves <= LEAVES);
    let legal = doubled.filter(|leaves| inputs.iter().all(|inputs| inputs.is_multiple_of(*leaves)));
    if smallest == 1 { 1 } else { legal.max().unwrap_or(1) }
}

/// Returns the world sizes up to `most` that a model can run on.
pub fn legal_world_sizes(config: &LlamaConfig, most: usize, numerics: Numerics) -> Vec<usize> {
    (1..=most).filter(|n| check(config, *n, numerics).is_ok()).collect()
}

/// Returns the number of all-reduces of `[tokens, hidden]` in a forward pass with fast numerics: one for the embedding, and two per layer.
pub fn all_reduces(config: &LlamaConfig) -> usize {
    config.layers.saturating_mul(2).saturating_add(1)
}

/// Checks that a model can run on this number of ranks.
///
/// # Errors
/// Returns [`ConfigurationError::WorldSize`] with the reason and the legal sizes.
pub fn check_world_size(config: &LlamaConfig, world_size: usize, numerics: Numerics) -> Result<()> {
    check(config, world_size, numerics).map_err(|source| {
        // More ranks than query heads are never legal.
        let legal = legal_world_sizes(config, config.heads, numerics);
        Error::Configuration(ConfigurationError::WorldSize { source, legal })
    })
}

/// Checks that a model can be divided into this number of pipeline stages.
///
/// # Errors
/// Returns [`ConfigurationError::Stages`] if there are more stages than layers, or none.
pub fn check_stages(config: &LlamaConfig, stages: usize) -> Result<()> {
    if (1..=config.layers).contains(&stages) {
        return Ok(());
    }
    Err(ConfigurationError::Stages { stages, layers: config.layers }.into())
}
