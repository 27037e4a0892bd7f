//! Llama, and the models that differ from it only in settings.

use ryzanstein_process_group::{DType, ProcessGroup};

use super::config::LlamaConfig;
use super::plan::check_world_size;
use super::report::LoadReport;
use crate::attention::{KvCache, ParallelAttention};
use crate::checkpoint::Loader;
use crate::compute::{Batch, Compute, LayerCache, SlotMapping};
use crate::embedding::{ParallelLmHead, VocabParallelEmbedding, VocabularyWeight};
use crate::error::{RequestError, Result};
use crate::linear::{QkvParallelLinear, QkvShape, RowOptions, RowParallelLinear};
use crate::mlp::ParallelMlp;
use crate::norm::RmsNorm;
use crate::rotary::Rotary;
use crate::shard;
use crate::tensor::Tensor;

/// One rank's share of a model.
///
/// Every rank makes the same calls. A forward pass takes two all-reduces a layer, one for the embedding, and one
/// all-gather for the logits.
///
/// Threads may share it, each with a group and a cache or decoder of its own. On a GPU their calls share one stream, in which a
/// collective waits for the other ranks: all ranks' threads must make their calls in the same order, or the groups wait for each
/// other.
#[derive(Debug)]
pub struct Llama {
    pub(crate) config: LlamaConfig,
    pub(crate) compute: Box<dyn Compute>,
    dtype: DType,
    kv_heads: usize,
    pub(super) rotary: Rotary,
    embedding: VocabParallelEmbedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: ParallelLmHead,
    pub(crate) report: LoadReport,
}

#[derive(Debug)]
struct Block {
    attention_norm: RmsNorm,
    attention: ParallelAttention,
    mlp_norm: RmsNorm,
    mlp: ParallelMlp,
}

impl Block {
    fn load(loader: &mut Loader<'_>, config: &LlamaConfig, layer: usize) -> Result<Self> {
        let prefix = format!("model.layers.{layer}");
        let within = |name: &str| format!("{prefix}.{name}");
        let &LlamaConfig { hidden, heads, kv_heads, head_dim, norm_epsilon, .. } = config;
        let shape = QkvShape { hidden, heads, kv_heads, head_dim };
        let options = RowOptions { bias: config.output_bias, ..RowOptions::default() };
        Ok(Self {
            attention_norm: RmsNorm::load(loader, &within("input_layernorm"), hidden, norm_epsilon)?,
            attention: ParallelAttention {
                qkv: QkvParallelLinear::load(loader, &within("self_attn"), shape, config.qkv_bias)?,
                output: RowParallelLinear::load(
                    loader,
                    &within("self_attn.o_proj"),
                    (hidden, heads * head_dim),
                    options,
                )?,
                window: config.sliding_windows[layer],
            },
            mlp_norm: RmsNorm::load(loader, &within("post_attention_layernorm"), hidden, norm_epsilon)?,
            mlp: ParallelMlp::load(loader, &within("mlp"), hidden, config.intermediate, config.mlp_bias)?,
        })
    }

    fn forward(
        &self,
        x: &mut Tensor,
        batch: &Batch,
        cache: &mut LayerCache,
        compute: &dyn Compute,
        group: &mut ProcessGroup,
    ) -> Result<()> {
        let normed = self.attention_norm.forward(x, compute)?;
        let attended = self.attention.forward(&normed, batch, cache, compute, group)?;
        compute.add(x, &attended)?;
        let normed = self.mlp_norm.forward(x, compute)?;
        let fed = self.mlp.forward(&normed, compute, group)?;
        compute.add(x, &fed)
    }
}

impl Llama {
    /// Builds a model from the weights of `loader`, in the memory of `compute`. `dtype` is the type of activations.
    ///
    /// # Errors
    /// When the model cannot run on so many ranks, or the source fails.
    pub fn from_loader(
        config: LlamaConfig,
        dtype: DType,
        compute: Box<dyn Compute>,
        loader: &mut Loader<'_>,
    ) -> Result<Self> {
        check_world_size(&config, loader.world_size())?;
        let heads = shard::split_heads(config.heads, config.kv_heads, loader.world_size())?;
        let mut loader_on = loader.reborrow(&*compute, dtype);
        let loader = &mut loader_on;
        let (vocabulary, hidden) = (config.vocabulary, config.hidden);
        let tokens = VocabularyWeight::load(loader, "model.embed_tokens", vocabulary, hidden)?;
        let blocks = (0..config.layers)
            .map(|layer| Block::load(loader, &config, layer))
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::load(loader, "model.norm", hidden, config.norm_epsilon)?;
        let head = if config.tied_embeddings {
            tokens.clone()
        } else {
            VocabularyWeight::load(loader, "lm_head", vocabulary, hidden)?
        };
        let kv_heads = heads[loader.rank()].kv.len();
        Ok(Self {
            compute,
            dtype,
            kv_heads,
            rotary: config.rotary(),
            embedding: VocabParallelEmbedding::new(tokens),
            blocks,
            norm,
            head: ParallelLmHead::new(head),
            report: LoadReport::default(),
            config,
        })
    }

    /// The model's settings.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The type of activations and of the cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes read and time taken by loading.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// An empty cache with room for one sequence of `capacity` positions.
    ///
    /// # Errors
    /// When the model does not support sequences of that length, or memory runs out.
    pub fn cache(&self, capacity: usize) -> Result<KvCache> {
        self.caches(1, capacity)
    }

    /// As [`cache`](Self::cache), for several sequences of `capacity` positions each.
    pub(super) fn caches(&self, sequences: usize, capacity: usize) -> Result<KvCache> {
        let LlamaConfig { layers, head_dim, max_positions, .. } = self.config;
        if capacity > max_positions {
            return Err(RequestError::TooLong { positions: capacity, max_positions }.into());
        }
        let shape = [sequences, self.kv_heads, capacity, head_dim];
        KvCache::new(&*self.compute, layers, shape, self.dtype)
    }

    /// Appends `tokens` to the first sequence of the cache. Returns the logits `[tokens, vocabulary]` in `f32` after each of
    /// them, bit for bit the same on every rank.
    ///
    /// # Errors
    /// When there are no tokens, one is not in the vocabulary, they do not fit the cache, or the group fails.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, group: &mut ProcessGroup) -> Result<Tensor> {
        self.run(tokens, cache, group, Ok)
    }

    /// As [`forward`](Self::forward), but logits `[1, vocabulary]` after the last token only.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_last(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        group: &mut ProcessGroup,
    ) -> Result<Tensor> {
        self.run(tokens, cache, group, |x| select(x, &[tokens.len() - 1]))
    }

    /// Appends tokens to the first sequence. Returns the logits of those hidden states that `keep` keeps.
    fn run(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        group: &mut ProcessGroup,
        keep: impl FnOnce(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err(RequestError::NoTokens.into());
        }
        self.check(tokens)?;
        let position = cache.next_position(0, tokens.len())?;
        let slots = SlotMapping::from_position(position, tokens.len());
        let batch = self.compute.batch(tokens, &slots, &self.rotary)?;
        let x = self.hidden_states(&batch, cache, group)?;
        let logits = self.head.forward(&keep(x)?, &*self.compute, group)?;
        cache.advance(&slots);
        // A lost rank leaves values on a GPU that look like any others. Only the group can tell.
        group.synchronize()?;
        Ok(logits)
    }

    /// Refuses tokens that are not in the vocabulary.
    pub(super) fn check(&self, tokens: &[u32]) -> Result<()> {
        self.embedding.check(tokens)
    }

    /// Logits after every token of a batch. The caller advances the lengths of the cache.
    pub(super) fn logits(
        &self,
        batch: &Batch,
        cache: &mut KvCache,
        group: &mut ProcessGroup,
    ) -> Result<Tensor> {
        let x = self.hidden_states(batch, cache, group)?;
        self.head.forward(&x, &*self.compute, group)
    }

    /// Logits after some tokens of a batch, in this order. The caller advances the lengths of the cache.
    pub(super) fn logits_after(
        &self,
        rows: &[usize],
        batch: &Batch,
        cache: &mut KvCache,
        group: &mut ProcessGroup,
    ) -> Result<Tensor> {
        let x = self.hidden_states(batch, cache, group)?;
        self.head.forward(&select(x, rows)?, &*self.compute, group)
    }

    fn hidden_states(&self, batch: &Batch, cache: &mut KvCache, group: &mut ProcessGroup) -> Result<Tensor> {
        let compute = &*self.compute;
        let mut x = self.embedding.forward(batch, self.dtype, compute, group)?;
        for (block, cache) in self.blocks.iter().zip(&mut cache.layers) {
            block.forward(&mut x, batch, cache, compute, group)?;
        }
        self.norm.forward(&x, compute)
    }
}

/// These rows of `x`, in this order.
fn select(x: Tensor, rows: &[usize]) -> Result<Tensor> {
    if rows.iter().copied().eq(0..x.rows()) { Ok(x) } else { x.select_rows(rows) }
}
