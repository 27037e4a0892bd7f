//! Llama, and models that differ from it only in settings.

use ryzanstein_process_group::{Buffer, DType, ProcessGroup, Rank};

use super::config::LlamaConfig;
use super::groups::{ModelGroups, stage_of};
use super::plan::{check_stages, check_world_size, leaves};
use super::report::LoadReport;
use super::stage::Stage;
use crate::attention::{CacheSize, KvCache, ParallelAttention};
use crate::checkpoint::Loader;
use crate::communicator::Shard;
use crate::compute::{Batch, Compute, LayerCache};
use crate::embedding::{ParallelLmHead, VocabParallelEmbedding, VocabularyWeight, check_tokens};
use crate::error::{ConfigurationError, Error, RequestError, Result};
use crate::linear::{QkvParallelLinear, QkvShape, RowOptions, RowParallelLinear};
use crate::mlp::ParallelMlp;
use crate::norm::RmsNorm;
use crate::shard;
use crate::tensor::Tensor;

/// One rank's shard of a model.
///
/// Every rank makes the same calls. A forward pass takes two all-reduces per layer, one for the embedding, and one all-gather for
/// the logits. The last of the all-reduces sends only rows whose logits are requested. Stages of a pipeline send hidden states to
/// the next stage, and the last stage broadcasts the logits.
///
/// Threads may share it, each with its own group and its own decoder. On a GPU their calls share one stream, in which a
/// collective waits for the other ranks: the threads of all ranks must make their calls in the same order, or the groups
/// deadlock.
#[derive(Debug)]
pub struct Llama {
    pub(crate) config: LlamaConfig,
    pub(crate) compute: Box<dyn Compute>,
    dtype: DType,
    kv_heads: usize,
    stage: Stage,
    shard: Shard,
    /// The embedding, on the first stage.
    embedding: Option<VocabParallelEmbedding>,
    /// The layers of this stage.
    blocks: Vec<Block>,
    /// The final norm and the LM head, on the last stage.
    head: Option<Head>,
    pub(crate) report: LoadReport,
}

/// The final norm and the LM head.
#[derive(Debug)]
struct Head {
    norm: RmsNorm,
    output: ParallelLmHead,
}

/// What a pass computes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Output {
    /// The logits of the whole vocabulary in `f32`, after every token.
    AllLogits,
    /// The same after the last token of each sequence.
    Logits,
    /// [Candidates](ParallelLmHead::argmax) for the most likely token after the last one of each sequence. Not through several stages.
    Candidates,
}

/// Tokens that pass the stages together, and the rows whose logits are requested.
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
        let mut head_norm = |name| RmsNorm::load(loader, &within(name), head_dim, norm_epsilon);
        let norms = config
            .head_norms
            .then(|| Ok::<_, Error>([head_norm("self_attn.q_norm")?, head_norm("self_attn.k_norm")?]))
            .transpose()?;
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
                norms,
            },
            mlp_norm: RmsNorm::load(loader, &within("post_attention_layernorm"), hidden, norm_epsilon)?,
            mlp: ParallelMlp::load(loader, &within("mlp"), hidden, config.intermediate, config.mlp_bias)?,
        })
    }

    /// Adds the results of the block to `x`, whose normalised rows are in `normed`. Returns the normalised rows of the sum, if
    /// there is a following norm. With `rows`, only these rows continue after the attention, and `x` has only them.
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
    /// Returns an error if the model cannot run on this number of ranks or stages, or if the source fails.
    pub fn from_loader(
        config: LlamaConfig,
        dtype: DType,
        compute: Box<dyn Compute>,
        loader: &mut Loader<'_>,
    ) -> Result<Self> {
        check_world_size(&config, loader.world_size(), compute.numerics())?;
        let stage = loader.stage();
        check_stages(&config, stage.count)?;
        if stage.index >= stage.count {
            return Err(Error::input(format!(
                "there is no {stage}: stages count from 0; give the loader one of the pipeline"
            )));
        }
        if config.sliding_windows.len() != config.layers {
            return Err(Error::input(format!(
                "`sliding_windows` of the model has {} elements for {} layers; give each layer one, `None` if it has no window",
                config.sliding_windows.len(),
                config.layers
            )));
        }
        let heads = shard::split_heads(config.heads, config.kv_heads, loader.world_size())?;
        let mut loader_on = loader.reborrow(&*compute, dtype).with_leaves(leaves(&config));
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
        let (kv_heads, shard) = (heads[loader.rank()].kv.len(), loader.shard());
        Ok(Self {
            compute,
            dtype,
            kv_heads,
            stage,
            shard,
            embedding: tokens.filter(|_| stage.is_first()).map(VocabParallelEmbedding::new),
            blocks,
            head,
            report: LoadReport::default(),
            config,
        })
    }

    /// Returns the settings of the model.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Returns the stage that this rank holds.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the type of activations and of the cache.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the bytes read and the time taken by loading.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Allocates an empty KV cache for this rank's layers.
    ///
    /// # Errors
    /// Returns an error if the model does not support sequences of that length, or memory runs out.
    pub(super) fn cache(&self, size: CacheSize) -> Result<KvCache> {
        self.config.check_positions(size.capacity)?;
        let heads = [self.kv_heads, self.config.head_dim];
        KvCache::new(&*self.compute, self.blocks.len(), size, heads, self.dtype)
    }

    /// Returns an error if a token is not in the vocabulary.
    pub(super) fn check(&self, tokens: &[u32]) -> Result<()> {
        check_tokens(tokens, self.config.vocabulary)
    }

    /// Returns the output of the requested rows of several micro-batches, concatenated, on every rank. The caller advances the
    /// lengths of the cache.
    ///
    /// Every stage processes the micro-batches in order, so that one computes while the next processes an earlier micro-batch.
    /// The logits follow after all micro-batches: a broadcast in between would make the stages wait for each other.
    pub(super) fn output(
        &self,
        parts: &[MicroBatch],
        output: Output,
        cache: &mut KvCache,
        groups: &mut dyn ModelGroups,
    ) -> Result<Tensor> {
        let (loaded, called) = (self.stage, stage_of(groups));
        if loaded != called {
            return Err(ConfigurationError::OtherStage { loaded, called }.into());
        }
        // Before a stage sends anything to another.
        self.shard.check(groups.tensor())?;
        let mut mine = Vec::new();
        for part in parts {
            mine.extend(self.pass(part, output, cache, groups)?);
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

    /// Runs this stage on a micro-batch. Returns its output on the last stage.
    fn pass(
        &self,
        part: &MicroBatch,
        output: Output,
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
        // Each block ends with the norm that follows it.
        let norms = self.blocks.iter().map(|block| &block.attention_norm);
        let mut norms = norms.chain(self.head.iter().map(|head| &head.norm));
        let first = norms.next().map(|norm| norm.forward(&x, compute));
        let mut normed = first.transpose()?;
        for (i, (block, cache)) in self.blocks.iter().zip(&mut cache.layers).enumerate() {
            if let Some(input) = normed {
                let (x, group) = ((&mut x, &input), groups.tensor());
                // After the last attention, only rows whose logits are requested are needed.
                let rows = (i + 1 == self.blocks.len() && self.head.is_some()).then_some(&rows[..]);
                normed = block.forward(x, (batch, cache), (norms.next(), rows), compute, group)?;
            }
        }
        let (Some(head), Some(normed)) = (&self.head, normed) else {
            self.pipeline(groups)?.send(&x, Rank(self.stage.index as u32 + 1))?;
            return Ok(None);
        };
        let group = groups.tensor();
        match output {
            Output::AllLogits | Output::Logits => head.output.forward(&normed, compute, group).map(Some),
            Output::Candidates => head.output.argmax(&normed, compute, group).map(Some),
        }
    }

    /// Returns the group of the stages. There must be several.
    fn pipeline<'a>(&self, groups: &'a mut dyn ModelGroups) -> Result<&'a mut ProcessGroup> {
        let (loaded, called) = (self.stage, Stage::default());
        groups.stages().ok_or_else(|| ConfigurationError::OtherStage { loaded, called }.into())
    }
}

/// Keeps only these rows of `x`, in this order.
fn select(x: &mut Tensor, rows: &[usize]) -> Result<()> {
    if !rows.iter().copied().eq(0..x.rows()) {
        *x = x.select_rows(rows)?;
    }
    Ok(())
}
