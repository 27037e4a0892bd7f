//! Loading of a model from a Hugging Face folder, by every rank or through one.

use std::collections::HashSet;
use std::path::Path;
use std::time::Instant;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::{DType, ProcessGroup, Rank};
use serde::{Deserialize, Serialize};

use super::config::{LlamaConfig, read_folder};
use super::decoder::{Decoder, NextTokens, Passes};
use super::groups::{self, ModelGroups, stage_of, synchronize};
use super::llama::Llama;
use super::plan::{EMBEDDING, HEAD, check_stages, check_world_size, stage_tensors, tensors, unused};
use super::report::LoadReport;
use super::stage::Stage;
use crate::attention::CacheSize;
use crate::checkpoint::{Checkpoint, Loader, RootSource, TensorSlice, WeightSource};
use crate::compute::{self, Compute, SlotMapping};
use crate::error::{ConfigurationError, Error, RemoteError, Result};
use crate::shard;
use crate::tensor::Tensor;

/// Data that ranks must agree on, or receive from the root, before they load weights.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Plan {
    config: String,
    generation: Option<String>,
    weights: DType,
    activations: DType,
}

impl Plan {
    fn parse(&self, file: &Path) -> Result<LlamaConfig> {
        LlamaConfig::from_json(file, &self.config, self.generation.as_deref())
    }
}

/// The shard of a model that a rank holds: of the layers, and of each layer.
#[derive(Clone, Copy)]
struct ShardLocation {
    stage: Stage,
    rank: usize,
    world_size: usize,
    numerics: Numerics,
}

impl ShardLocation {
    fn of(groups: &mut dyn ModelGroups) -> Self {
        let stage = stage_of(groups);
        let tensor = groups.tensor();
        Self {
            stage,
            rank: tensor.rank().index(),
            world_size: tensor.world_size(),
            numerics: tensor.numerics(),
        }
    }
}

/// Who reads a folder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    /// The first of all ranks, which logs on behalf of all.
    First,
    Other,
    /// The only rank, on behalf of all.
    Root,
}

/// Reads and checks everything except the values of the weights.
fn prepare(
    directory: &Path,
    dtype: Option<DType>,
    place: ShardLocation,
    reader: Reader,
) -> Result<(Plan, LlamaConfig, Checkpoint)> {
    let (config, generation) = read_folder(directory)?;
    let mut parsed = LlamaConfig::from_json(&directory.join("config.json"), &config, generation.as_deref())?;
    check_world_size(&parsed, place.world_size, place.numerics)?;
    check_stages(&parsed, place.stage.count)?;
    let mut checkpoint = Checkpoint::open(directory)?;
    rename_tensors(&mut checkpoint, &parsed)?;
    parsed.tied_embeddings = is_tied(&checkpoint, &parsed, place, reader)?;
    let specs = tensors(&parsed)?;
    for spec in &specs {
        checkpoint.check(&spec.name, &spec.shape)?;
    }
    if reader != Reader::Other {
        for remark in &parsed.remarks {
            tracing::warn!(folder = %directory.display(), "{remark}");
        }
        warn_of_unused(&checkpoint, &unused(&parsed, &specs, checkpoint.names()));
    }
    let matrices = specs.iter().filter(|s| s.shape.len() == 2).map(|s| s.name.as_str());
    let stored = checkpoint.common_dtype(matrices)?;
    let activations = dtype.unwrap_or(stored);
    // With f32 activations, weights keep their stored type: a product widens them on the fly, exactly.
    let weights = if activations == DType::F32 { stored } else { activations };
    Ok((Plan { config, generation, weights, activations }, parsed, checkpoint))
}

/// Gives tensors the names that the model has for them, as transformers does: with one `model.` more, as in base models, or
/// less, and that of the embedding for the one of a tied pair that is stored.
///
/// # Errors
/// Returns an error if two different tensors get one name.
fn rename_tensors(checkpoint: &mut Checkpoint, config: &LlamaConfig) -> Result<()> {
    let all = tensors(&LlamaConfig { tied_embeddings: false, ..config.clone() })?;
    let all: HashSet<&str> = all.iter().map(|spec| spec.name.as_str()).collect();
    let renamed = |name: &str| {
        let shorter = name.strip_prefix("model.").filter(|shorter| all.contains(shorter));
        let longer = || Some(format!("model.{name}")).filter(|longer| all.contains(longer.as_str()));
        Some((name.to_owned(), shorter.map(str::to_owned).or_else(longer)?))
    };
    let renamed: Vec<_> = checkpoint.names().filter_map(renamed).collect();
    for (from, to) in renamed {
        checkpoint.rename(&from, &to)?;
    }
    if config.tied_embeddings && !checkpoint.contains(EMBEDDING) {
        checkpoint.rename(HEAD, EMBEDDING)?;
    }
    Ok(())
}

/// Returns true if embedding and head share one matrix. As in transformers, they do not if the checkpoint has both and they differ.
///
/// A rank compares only the rows that it loads, so ranks may decide differently, with the same results.
fn is_tied(
    checkpoint: &Checkpoint,
    config: &LlamaConfig,
    place: ShardLocation,
    reader: Reader,
) -> Result<bool> {
    if !config.tied_embeddings || !checkpoint.contains(HEAD) || !checkpoint.contains(EMBEDDING) {
        return Ok(config.tied_embeddings);
    }
    let shape = [config.vocabulary, config.hidden];
    let mut shards = shard::split_vocabulary(config.vocabulary, place.world_size)?;
    let rows =
        if reader == Reader::Root { 0..config.vocabulary } else { shards.swap_remove(place.rank).real };
    let are_equal = checkpoint.has_equal_rows([EMBEDDING, HEAD], &shape, rows)?;
    if !are_equal {
        tracing::warn!(
            folder = %checkpoint.directory().display(),
            "`tie_word_embeddings` is true, but `{HEAD}` differs from `{EMBEDDING}`, so they are not tied; set it to false in \
             config.json, or remove `{HEAD}` from the checkpoint"
        );
    }
    Ok(are_equal)
}

impl Llama {
    /// Loads this rank's shard of a model from a folder that every rank can read: `config.json` and safetensors. `dtype` is the
    /// type of activations; if `None`, that of the weights.
    ///
    /// `groups` is a group that shares each layer, or a [manager](ryzanstein_process_group::ProcessGroupManager), whose layout
    /// may also divide the layers into pipeline stages. Pass the same to every call of the model.
    ///
    /// All ranks must have the same [numerics](ProcessGroup::numerics) and the same
    /// [instruction set](crate::compute::instruction_set) or, on GPUs, compute capability. Settings, shapes, world size and these are
    /// checked before any weight is read. If one rank fails, all do. On a GPU, loading ends with a first pass, so that the kernels of a
    /// short prompt and of one sequence are compiled before the first request; others are compiled, and cached, at their first use.
    ///
    /// # Errors
    /// Returns this rank's own error; otherwise [`Error::Peer`] with that of another rank;
    /// [`ConfigurationError::DifferentArithmetic`]; those of the group if the first pass fails.
    pub fn load(directory: &Path, dtype: Option<DType>, groups: &mut dyn ModelGroups) -> Result<Self> {
        Self::load_with(directory, dtype, groups, |_, _| {})
    }

    /// Loads as [`load`](Self::load) does. After each tensor, calls `on_tensor` with the number of tensors read so far and the
    /// total number of tensors of this rank.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn load_with(
        directory: &Path,
        dtype: Option<DType>,
        groups: &mut dyn ModelGroups,
        on_tensor: impl FnMut(usize, usize),
    ) -> Result<Self> {
        Ok(Self::load_and(directory, dtype, groups, on_tensor, || Ok(((), 0)))?.0)
    }

    /// Loads as [`load_with`](Self::load_with) does, and also returns the result of `more`. `more` must return the same digest on
    /// all ranks; if it fails on one rank, loading fails on all.
    pub(crate) fn load_and<T>(
        directory: &Path,
        dtype: Option<DType>,
        groups: &mut dyn ModelGroups,
        on_tensor: impl FnMut(usize, usize),
        more: impl FnOnce() -> Result<(T, u64)>,
    ) -> Result<(Self, T)> {
        let _span = tracing::info_span!("load_model").entered();
        let started = Instant::now();
        let place = ShardLocation::of(groups);
        let reader = if is_first(groups) { Reader::First } else { Reader::Other };
        let prepared = prepare(directory, dtype, place, reader).and_then(|model| Ok((model, more()?)));
        let ((plan, config, checkpoint), (more, _)) =
            check_all_ranks_of(prepared, |((plan, ..), (_, digest))| (plan.clone(), *digest), groups)?;
        check_arithmetic(place.numerics, groups)?;
        let all = stage_tensors(&config, place.stage)?.len();
        let mut source = ObservedSource { source: &checkpoint, last: String::new(), read: 0, all, on_tensor };
        let compute = compute::for_ranks(groups.world(), place.numerics);
        let model = compute.and_then(|compute| build(config, &plan, compute, &mut source, place));
        let model = check_all_ranks(model, groups)?;
        let model = model.reported(Some(&checkpoint), started);
        model.warm_up(groups)?;
        Ok((model, more))
    }

    /// Loads this rank's shard of a model from a folder that only `root` can read, a rank in the world of `groups`. The
    /// `directory` and `dtype` of other ranks are ignored. The root reads the shard of each rank and sends it only to that rank.
    /// All ranks must have the same [numerics](ProcessGroup::numerics) and the same
    /// [instruction set](crate::compute::instruction_set) or, on GPUs, compute capability. If one rank fails, all do.
    ///
    /// # Errors
    /// Returns this rank's own error; otherwise [`Error::Peer`] with that of another rank;
    /// [`ConfigurationError::DifferentArithmetic`].
    pub fn load_from_root(
        directory: Option<&Path>,
        dtype: Option<DType>,
        root: Rank,
        groups: &mut dyn ModelGroups,
    ) -> Result<Self> {
        Self::load_from_root_on(directory, dtype, root, groups, compute::for_ranks)
    }

    fn load_from_root_on(
        directory: Option<&Path>,
        dtype: Option<DType>,
        root: Rank,
        groups: &mut dyn ModelGroups,
        compute: impl FnOnce(&ProcessGroup, Numerics) -> Result<Box<dyn Compute>>,
    ) -> Result<Self> {
        let _span = tracing::info_span!("load_model").entered();
        let started = Instant::now();
        let place = ShardLocation::of(groups);
        let world = groups.world();
        let prepared = match directory {
            _ if world.rank() != root => None,
            Some(directory) => Some(prepare(directory, dtype, place, Reader::Root)),
            None => Some(Err(ConfigurationError::NoFolder.into())),
        };
        let told = prepared.as_ref().map(|p| match p {
            Ok((plan, config, _)) => Ok((plan.clone(), config.tied_embeddings)),
            Err(error) => Err(RemoteError::from(error)),
        });
        check_arithmetic(place.numerics, world)?;
        let told: Result<(Plan, bool), RemoteError> = world.broadcast_object(told.as_ref(), root)?;
        let checkpoint = prepared.transpose()?.map(|(_, _, checkpoint)| checkpoint);
        let (plan, tied_embeddings) =
            told.map_err(|source| Error::Peer { rank: world.members()[root.index()], source })?;
        let config = LlamaConfig { tied_embeddings, ..plan.parse(Path::new("config.json"))? };
        // The root sends to every rank and every rank waits for the root, so all must be ready.
        let compute = check_all_ranks(compute(world, place.numerics), world)?;
        let mut source = RootSource::new(checkpoint.as_ref(), root, world);
        let model = build(config, &plan, compute, &mut source, place);
        let model = source.finish(model)?;
        let model = model.reported(checkpoint.as_ref(), started);
        model.warm_up(groups)?;
        Ok(model)
    }

    /// On a GPU, runs a prompt of two tokens and then two of one token. Otherwise a rank would do its set-up in the middle of the
    /// first request, while all others wait.
    fn warm_up(&self, groups: &mut dyn ModelGroups) -> Result<()> {
        if groups.tensor().device().is_none() {
            return Ok(());
        }
        let _span = tracing::info_span!("warm_up").entered();
        // Detects the most likely failures of a rank, lack of memory or of the kernel compiler, before the others wait for it.
        let tokens = &[0; 2][..self.config().max_positions.min(3).saturating_sub(1)];
        let size = CacheSize::full(1, tokens.len() + 1);
        let ready = Decoder::new(self, size, Passes::Eager).and_then(|decoder| {
            self.compute.batch(&[0], &SlotMapping::from_position(0, 1), &self.config.rotary)?;
            Ok(decoder)
        });
        let mut decoder = check_all_ranks(ready, groups)?;
        let mut passes = |groups: &mut dyn ModelGroups| {
            if !tokens.is_empty() {
                decoder.prefill(0, tokens, groups)?;
            }
            // Nobody waits for the tokens: weights without values may give NaN.
            drop(decoder.start_greedy(&[(0, NextTokens::Known(&[0]))], groups)?);
            if decoder.is_asynchronous() {
                decoder.truncate(0, tokens.len());
                drop(decoder.start_greedy(&[(0, NextTokens::Chosen)], groups)?);
            }
            synchronize(groups)
        };
        if self.stage().count > 1 {
            return passes(groups);
        }
        groups.tensor().without_profiling(|group| passes(group))
    }

    fn reported(mut self, checkpoint: Option<&Checkpoint>, started: Instant) -> Self {
        self.report = LoadReport {
            checkpoint_bytes: checkpoint.map_or(0, Checkpoint::total_bytes),
            bytes_read: checkpoint.map_or(0, Checkpoint::bytes_read),
            seconds: started.elapsed().as_secs_f64(),
        };
        tracing::debug!(
            bytes_read = self.report.bytes_read,
            checkpoint_bytes = self.report.checkpoint_bytes,
            seconds = self.report.seconds,
            dtype = %self.dtype(),
            "model loaded"
        );
        self
    }
}

/// Reports each tensor that has been read.
struct ObservedSource<'a, F> {
    source: &'a Checkpoint,
    /// The tensor that was read last, of which there may be several slices.
    last: String,
    read: usize,
    all: usize,
    on_tensor: F,
}

impl<F: FnMut(usize, usize)> WeightSource for ObservedSource<'_, F> {
    fn fill(&mut self, tensor: &TensorSlice<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        self.source.fill(tensor, target, at)?;
        if self.last != tensor.name {
            tensor.name.clone_into(&mut self.last);
            self.read += 1;
            (self.on_tensor)(self.read, self.all);
        }
        Ok(())
    }
}

/// Warns of tensors that the model does not use: if they are needed, its results are wrong.
fn warn_of_unused(checkpoint: &Checkpoint, unused: &[&str]) {
    if !unused.is_empty() {
        tracing::warn!(
            folder = %checkpoint.directory().display(),
            count = unused.len(),
            first = unused[..unused.len().min(3)].join(", "),
            "the checkpoint has tensors that this model does not use; if results are not what they should be, compare \
             config.json with the checkpoint"
        );
    }
}

fn build(
    config: LlamaConfig,
    plan: &Plan,
    compute: Box<dyn Compute>,
    source: &mut dyn WeightSource,
    ShardLocation { stage, rank, world_size, .. }: ShardLocation,
) -> Result<Llama> {
    let mut loader = Loader::new(source, rank, world_size, plan.weights)?.at_stage(stage);
    Llama::from_loader(config, plan.activations, compute, &mut loader)
}

/// Returns true if this rank is the first of its job, which logs on behalf of all.
fn is_first(groups: &mut dyn ModelGroups) -> bool {
    let group = groups.tensor();
    group.members()[group.rank().index()] == Rank(0)
}

/// Fails on all ranks if one has failed.
pub(crate) fn check_all_ranks<T>(mine: Result<T>, groups: &mut dyn ModelGroups) -> Result<T> {
    check_all_ranks_of(mine, |_| (), groups)
}

/// Fails on all ranks if they would add in different orders.
fn check_arithmetic(numerics: Numerics, groups: &mut dyn ModelGroups) -> Result<()> {
    let arithmetic = compute::arithmetic(groups.tensor());
    compare_arithmetic(format!("{numerics} numerics and {arithmetic}"), groups)
}

fn compare_arithmetic(mine: String, groups: &mut dyn ModelGroups) -> Result<()> {
    let group = groups.tensor();
    let other = group.members()[group.rank().index()];
    let different = groups::all_gather(&mine, groups)?.into_iter().find(|(_, theirs)| *theirs != mine);
    different.map_or(Ok(()), |(rank, theirs)| {
        Err(ConfigurationError::DifferentArithmetic { rank, theirs, other, mine }.into())
    })
}

/// Fails on all ranks if one has failed, or if their plans differ.
fn check_all_ranks_of<T, P>(
    mine: Result<T>,
    plan: impl FnOnce(&T) -> P,
    groups: &mut dyn ModelGroups,
) -> Result<T>
where
    P: PartialEq + Serialize + serde::de::DeserializeOwned,
{
    let told = match &mine {
        Ok(value) => Ok(plan(value)),
        Err(error) => Err(RemoteError::from(error)),
    };
    let all: Vec<(Rank, Result<P, RemoteError>)> = groups::all_gather(&told, groups)?;
    let mine = mine?;
    for (rank, theirs) in all {
        match theirs {
            Err(source) => return Err(Error::Peer { rank, source }),
            Ok(theirs) if Ok(&theirs) != told.as_ref() => {
                return Err(
                    ConfigurationError::DifferentModels { rank, other: groups.tensor().rank() }.into()
                );
            }
            Ok(_) => {}
        }
    }
    Ok(mine)
}

#[cfg(test)]
mod folder_tests;
#[cfg(test)]
mod tests;
