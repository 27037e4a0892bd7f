//! Llama, and the models that differ from it only in settings.

use ryzanstein_process_group::{Buffer, DType, ProcessGroup, Rank};

use super::config::LlamaConfig;
use super::groups::{ModelGroups, stage_of, synchronize};
use super::plan::{check_stages, check_world_size};
use super::report::LoadReport;
use super::stage::Stage;
use crate::attention::{KvCache, ParallelAttention};
use crate::checkpoint::Loader;
use crate::compute::{Batch, Compute, LayerCache, SlotMapping};
use crate::embedding::{ParallelLmHead, VocabParallelEmbedding, VocabularyWeight, check_tokens};
use crate::error::{ConfigurationError, Error, RequestError, Result};
use crate::linear::{QkvParallelLinear, QkvShape, RowOptions, RowParallelLinear};
use crate::mlp::ParallelMlp;
use crate::norm::RmsNorm;
use crate::rotary::Rotary;
use crate::shard;
use crate::tensor::Tensor;

/// One rank's share of a model.
///
/// Every rank makes the same calls. A forward pass takes two all-reduces a layer, one for the embedding, and one all-gather for the
/// logits. The last of the all-reduces sends only rows whose logits are wanted. Stages of a pipeline send hidden states to the next
/// stage, and the last broadcasts the logits.
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
    stage: Stage,
    /// On the first stage.
    embedding: Option<VocabParallelEmbedding>,
    /// The layers of this stage.
    blocks: Vec<Block>,
    /// On the last stage.
    head: Option<Head>,
    pub(crate) report: LoadReport,
}

/// The final norm and the LM head.
#[derive(Debug)]
struct Head {
    norm: RmsNorm,
    output: ParallelLmHead,
}

/// Tokens that go through the stages together, and the rows whose logits are wanted.
#[derive(Debug)]
pub(super) struct MicroBatch {
    pub(super) batch: Batch,
    pub(super) rows: Vec<usize>,
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

    /// Adds the block's results to `x`, whose rows are normalised in `normed`. Returns those of the result, if there is a norm
    /// that comes next. With `rows`, only these rows go on after the attention, and `x` has only them.
    fn forward(
        &self,
        (x, normed): (&mut Tensor, &Tensor),
        (batch, cache): (&Batch, &mut LayerCache),
        (next, rows): (Option<&RmsNorm>, Option<&[usize]>),
        compute: &dyn Compute,
        group: &mut ProcessGroup,
    ) -> Result<Option<Tensor>> {
        let mut attended = self.attention.attend(normed, batch, cache, compute)?;
        if let Some(rows) = rows {
            select(&mut attended, rows)?;
            select(x, rows)?;
        }
        let output = &self.attention.output;
        let normed = output.forward_add_norm(&attended, (&mut *x, &self.mlp_norm), compute, group)?;
        if let Some(norm) = next {
            return self.mlp.forward_add_norm(&normed, (x, norm), compute, group).map(Some);
        }
        let fed = self.mlp.forward(&normed, compute, group)?;
        compute.add(x, &fed)?;
        Ok(None)
    }
}

impl Llama {
    /// Builds the loader's stage of a model from its weights, in the memory of `compute`. `dtype` is the type of activations.
    ///
    /// # Errors
    /// When the model cannot run on so many ranks or stages, or the source fails.
    pub fn from_loader(
        config: LlamaConfig,
        dtype: DType,
        compute: Box<dyn Compute>,
        loader: &mut Loader<'_>,
    ) -> Result<Self> {
        check_world_size(&config, loader.world_size())?;
        let stage = loader.stage();
        check_stages(&config, stage.count)?;
        let heads = shard::split_heads(config.heads, config.kv_heads, loader.world_size())?;
        let mut loader_on = loader.reborrow(&*compute, dtype);
        let loader = &mut loader_on;
        let (vocabulary, hidden) = (config.vocabulary, config.hidden);
        let is_tied_head = stage.is_last() && config.tied_embeddings;
        let tokens = (stage.is_first() || is_tied_head)
            .then(|| VocabularyWeight::load(loader, "model.embed_tokens", vocabulary, hidden))
            .transpose()?;
        let blocks = stage
            .layers(config.layers)
            .map(|layer| Block::load(loader, &config, layer))
            .collect::<Result<Vec<_>>>()?;
        let head = stage.is_last().then(|| {
            let norm = RmsNorm::load(loader, "model.norm", hidden, config.norm_epsilon)?;
            let weight = match tokens.clone().filter(|_| is_tied_head) {
                Some(tied) => tied,
                None => VocabularyWeight::load(loader, "lm_head", vocabulary, hidden)?,
            };
            Ok::<_, Error>(Head { norm, output: ParallelLmHead::new(weight) })
        });
        let head = head.transpose()?;
        let kv_heads = heads[loader.rank()].kv.len();
        Ok(Self {
            compute,
            dtype,
            kv_heads,
            rotary: config.rotary(),
            stage,
            embedding: tokens.filter(|_| stage.is_first()).map(VocabParallelEmbedding::new),
            blocks,
            head,
            report: LoadReport::default(),
            config,
        })
    }

    /// The model's settings.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The stage that this rank holds.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The type of activations and of the cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes read and time taken by loading.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// An empty cache for this rank's layers, with room for one sequence of `capacity` positions.
    ///
    /// # Errors
    /// When the model does not support sequences of that length, or memory runs out.
    pub fn cache(&self, capacity: usize) -> Result<KvCache> {
        self.caches(1, capacity)
    }

    /// As [`cache`](Self::cache), for several sequences of `capacity` positions each.
    pub(super) fn caches(&self, sequences: usize, capacity: usize) -> Result<KvCache> {
        let LlamaConfig { head_dim, max_positions, .. } = self.config;
        if capacity > max_positions {
            return Err(RequestError::TooLong { positions: capacity, max_positions }.into());
        }
        let shape = [sequences, self.kv_heads, capacity, head_dim];
        KvCache::new(&*self.compute, self.blocks.len(), shape, self.dtype)
    }

    /// Appends `tokens` to the first sequence of the cache. Returns the logits `[tokens, vocabulary]` in `f32` after each of
    /// them, bit for bit the same on every rank.
    ///
    /// # Errors
    /// When there are no tokens, one is not in the vocabulary, they do not fit the cache, or a group fails.
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        self.run(tokens, 0, cache, groups)
    }

    /// As [`forward`](Self::forward), but logits `[1, vocabulary]` after the last token only.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_last(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        self.run(tokens, tokens.len().saturating_sub(1), cache, groups)
    }

    /// Appends tokens to the first sequence. Returns the logits after token `first` and those behind it.
    fn run(
        &self,
        tokens: &[u32],
        first: usize,
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err(RequestError::NoTokens.into());
        }
        self.check(tokens)?;
        let position = cache.next_position(0, tokens.len())?;
        let slots = SlotMapping::from_position(position, tokens.len());
        let batch = self.compute.batch(tokens, &slots, &self.rotary)?;
        let logits =
            self.logits(&[MicroBatch { batch, rows: (first..tokens.len()).collect() }], cache, groups)?;
        cache.advance(&slots);
        synchronize(groups)?;
        Ok(logits)
    }

    /// Refuses tokens that are not in the vocabulary.
    pub(super) fn check(&self, tokens: &[u32]) -> Result<()> {
        check_tokens(tokens, self.config.vocabulary)
    }

    /// The wanted logits of some micro-batches, one below the other, on every rank. The caller advances the lengths of the cache.
    ///
    /// Every stage takes the micro-batches in order, so that one computes while the next does an earlier micro-batch. The logits
    /// follow when all are through: a broadcast in between would have the stages wait for each other.
    pub(super) fn logits(
        &self,
        parts: &[MicroBatch],
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        let (loaded, called) = (self.stage, stage_of(groups));
        if loaded != called {
            return Err(ConfigurationError::OtherStage { loaded, called }.into());
        }
        let mut mine = Vec::new();
        for part in parts {
            mine.extend(self.pass(part, cache, groups)?);
        }
        let Some(stages) = groups.stages() else {
            return mine.pop().ok_or_else(|| RequestError::NoSequences.into());
        };
        let last = Rank((stages.world_size() - 1) as u32);
        let wanted = parts.iter().map(|part| part.rows.len()).sum();
        let mut all = self.compute.scratch(&[wanted, self.config.vocabulary], DType::F32)?;
        let (mut mine, mut at) = (mine.iter(), 0);
        for part in parts {
            let rows = at..at + part.rows.len();
            at = rows.end;
            let logits = mine.next().map(|logits| logits as &dyn Buffer);
            stages.broadcast_into(logits, &mut all.rows_mut(rows), last)?;
        }
        Ok(all)
    }

    /// Takes a micro-batch through this stage. Returns its logits on the last stage.
    fn pass(
        &self,
        part: &MicroBatch,
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Option<Tensor>> {
        let MicroBatch { batch, rows } = part;
        let compute = &*self.compute;
        let mut x = if let Some(embedding) = &self.embedding {
            embedding.forward(batch, self.dtype, compute, groups.tensor())?
        } else {
            let mut x = compute.scratch(&[batch.tokens().len(), self.config.hidden], self.dtype)?;
            self.pipeline(groups)?.recv(&mut x, Rank(self.stage.index as u32 - 1))?;
            x
        };
        // Each block ends with the norm that comes next.
        let norms = self.blocks.iter().map(|block| &block.attention_norm);
        let mut norms = norms.chain(self.head.iter().map(|head| &head.norm));
        let first = norms.next().map(|norm| norm.forward(&x, compute));
        let mut normed = first.transpose()?;
        for (i, (block, cache)) in self.blocks.iter().zip(&mut cache.layers).enumerate() {
            if let Some(input) = normed {
                let (x, group) = ((&mut x, &input), groups.tensor());
                // Behind the last attention, only rows whose logits are wanted matter.
                let rows = (i + 1 == self.blocks.len() && self.head.is_some()).then_some(&rows[..]);
                normed = block.forward(x, (batch, cache), (norms.next(), rows), compute, group)?;
            }
        }
        let (Some(head), Some(normed)) = (&self.head, normed) else {
            self.pipeline(groups)?.send(&x, Rank(self.stage.index as u32 + 1))?;
            return Ok(None);
        };
        head.output.forward(&normed, compute, groups.tensor()).map(Some)
    }

    /// The group of the stages, of which there are several.
    fn pipeline<'a>(&self, groups: &'a mut dyn ModelGroups) -> Result<&'a mut ProcessGroup> {
        let (loaded, called) = (self.stage, Stage::default());
        groups.stages().ok_or_else(|| ConfigurationError::OtherStage { loaded, called }.into())
    }
}

/// Leaves these rows of `x`, in this order.
fn select(x: &mut Tensor, rows: &[usize]) -> Result<()> {
    if !rows.iter().copied().eq(0..x.rows()) {
        *x = x.select_rows(rows)?;
    }
    Ok(())
}
