//! The properties of a model that `config.json` alone determines: its tensors, and its legal world sizes. Pure.

use std::collections::HashSet;

use super::config::LlamaConfig;
use super::stage::Stage;
use crate::error::{ConfigurationError, Error, Result};
use crate::shard::{self, ShardError};

/// One tensor of the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its whole shape.
    pub shape: Vec<usize>,
}

/// Returns all tensors that the model needs, embedding first.
pub fn tensors(config: &LlamaConfig) -> Vec<TensorSpec> {
    stage_tensors(config, Stage::default())
}

/// Returns all tensors that a stage needs. A tied embedding is also the head of the last stage.
pub fn stage_tensors(config: &LlamaConfig, stage: Stage) -> Vec<TensorSpec> {
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize]| all.push(TensorSpec { name, shape: shape.into() });
    let (hidden, intermediate) = (config.hidden, config.intermediate);
    let (queries, kvs) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    if stage.is_first() || (stage.is_last() && config.tied_embeddings) {
        add("model.embed_tokens.weight".into(), &[config.vocabulary, hidden]);
    }
    for layer in stage.layers(config.layers) {
        let projections = [
            ("self_attn.q_proj", queries, hidden, config.qkv_bias),
            ("self_attn.k_proj", kvs, hidden, config.qkv_bias),
            ("self_attn.v_proj", kvs, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, config.mlp_bias),
        ];
        for (name, outputs, inputs, bias) in projections {
            add(format!("model.layers.{layer}.{name}.weight"), &[outputs, inputs]);
            if bias {
                add(format!("model.layers.{layer}.{name}.bias"), &[outputs]);
            }
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{layer}.{name}.weight"), &[hidden]);
        }
    }
    if stage.is_last() {
        add("model.norm.weight".into(), &[hidden]);
        if !config.tied_embeddings {
            add("lm_head.weight".into(), &[config.vocabulary, hidden]);
        }
    }
    all
}

/// Returns the named tensors that the model does not use, except those that are always harmless.
pub(super) fn unused<'a>(config: &LlamaConfig, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let used: HashSet<String> = tensors(config).into_iter().map(|spec| spec.name).collect();
    // Rotary frequencies are computed from `config.json`; some tools store a tied head a second time.
    let is_harmless =
        |name: &str| name.contains(".rotary_emb.") || (config.tied_embeddings && name == "lm_head.weight");
    names.filter(|name| !used.contains(*name) && !is_harmless(name)).collect()
}

fn check(config: &LlamaConfig, world_size: usize) -> Result<(), ShardError> {
    shard::split_heads(config.heads, config.kv_heads, world_size)?;
    shard::split_evenly("intermediate features", config.intermediate, world_size)?;
    Ok(())
}

/// Returns the world sizes up to `most` that a model can run on.
pub fn legal_world_sizes(config: &LlamaConfig, most: usize) -> Vec<usize> {
    (1..=most).filter(|n| check(config, *n).is_ok()).collect()
}

/// Returns the number of all-reduces of `[tokens, hidden]` in a forward pass: one for the embedding, and two per layer.
pub fn all_reduces(config: &LlamaConfig) -> usize {
    2 * config.layers + 1
}

/// Checks that a model can run on this number of ranks.
///
/// # Errors
/// Returns [`ConfigurationError::WorldSize`] with the reason and the legal sizes.
pub fn check_world_size(config: &LlamaConfig, world_size: usize) -> Result<()> {
    check(config, world_size).map_err(|source| {
        // More ranks than query heads are never legal.
        let legal = legal_world_sizes(config, config.heads);
        Error::Configuration(ConfigurationError::WorldSize { source, legal })
    })
}

/// Checks that a model can be divided into this number of pipeline stages.
///
/// # Errors
/// Returns [`ConfigurationError::Stages`] if there are more stages than layers.
pub fn check_stages(config: &LlamaConfig, stages: usize) -> Result<()> {
    if stages <= config.layers {
        return Ok(());
    }
    Err(ConfigurationError::Stages { stages, layers: config.layers }.into())
}
