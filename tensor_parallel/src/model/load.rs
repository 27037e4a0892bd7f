//! Loading a model from a Hugging Face folder, by every rank or through one.

use std::path::Path;
use std::time::Instant;

use ryzanstein_process_group::{DType, ProcessGroup, Rank};
use serde::{Deserialize, Serialize};

use super::config::{LlamaConfig, read_folder};
use super::llama::Llama;
use super::plan::{check_world_size, tensors};
use super::report::LoadReport;
use crate::checkpoint::{Checkpoint, Loader, LocalSource, RootSource, ShardedTensor, WeightSource};
use crate::compute::{self, Compute, SlotMapping};
use crate::error::{ConfigurationError, Error, RemoteError, Result};
use crate::tensor::Tensor;

/// All that ranks must agree on, or learn from the root, before weights move.
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

/// Reads and checks everything but the weights' values.
fn prepare(
    directory: &Path,
    dtype: Option<DType>,
    world_size: usize,
) -> Result<(Plan, LlamaConfig, Checkpoint)> {
    let (config, generation) = read_folder(directory)?;
    let parsed = LlamaConfig::from_json(&directory.join("config.json"), &config, generation.as_deref())?;
    check_world_size(&parsed, world_size)?;
    let checkpoint = Checkpoint::open(directory)?;
    let specs = tensors(&parsed);
    for spec in &specs {
        checkpoint.check(&spec.name, &spec.shape)?;
    }
    let matrices = specs.iter().filter(|s| s.shape.len() == 2).map(|s| s.name.as_str());
    let stored = checkpoint.common_dtype(matrices)?;
    let activations = dtype.unwrap_or(stored);
    // Wide activations meet weights as they are stored: widening them is exact and is done on the way.
    let weights = if activations == DType::F32 { stored } else { activations };
    Ok((Plan { config, generation, weights, activations }, parsed, checkpoint))
}

impl Llama {
    /// Loads this rank's share of a model from a folder that every rank can read: `config.json` and safetensors.
    /// `dtype` is the type of activations; without one, that of the weights.
    ///
    /// Settings, shapes and world size are checked before any weight is read. When one rank fails, all do. On a GPU, a first
    /// pass comes with it, so that a first request finds the kernels that most requests use.
    ///
    /// # Errors
    /// This rank's own, else [`Error::Peer`] with that of another; those of the group, where the first pass fails.
    pub fn load(directory: &Path, dtype: Option<DType>, group: &mut ProcessGroup) -> Result<Self> {
        let started = Instant::now();
        let prepared = prepare(directory, dtype, group.world_size());
        let (plan, config, checkpoint) = agree(prepared, |(plan, ..)| plan.clone(), group)?;
        let mut source = LocalSource { checkpoint: &checkpoint, rank: group.rank().index() };
        let compute = compute::for_group(group);
        let model = compute
            .and_then(|compute| build(config, &plan, compute, &mut source, group.rank(), group.world_size()));
        let model = agree(model, |_| (), group)?;
        let model = model.reported(Some(&checkpoint), started);
        model.warm_up(group)?;
        Ok(model)
    }

    /// Loads this rank's share of a model from a folder that only `root` can read. `directory` and `dtype` count on
    /// the root only. The root reads each rank's share and sends it to that rank alone; what all hold it
    /// broadcasts. When one rank fails, all do.
    ///
    /// # Errors
    /// This rank's own, else [`Error::Peer`] with that of another.
    pub fn load_from_root(
        directory: Option<&Path>,
        dtype: Option<DType>,
        root: Rank,
        group: &mut ProcessGroup,
    ) -> Result<Self> {
        Self::load_from_root_on(directory, dtype, root, group, compute::for_group)
    }

    fn load_from_root_on(
        directory: Option<&Path>,
        dtype: Option<DType>,
        root: Rank,
        group: &mut ProcessGroup,
        compute: impl FnOnce(&ProcessGroup) -> Result<Box<dyn Compute>>,
    ) -> Result<Self> {
        let started = Instant::now();
        let (me, world_size) = (group.rank(), group.world_size());
        let prepared = match directory {
            Some(directory) if me == root => Some(prepare(directory, dtype, world_size)),
            None if me == root => Some(Err(ConfigurationError::NoFolder.into())),
            _ => None,
        };
        let told = prepared.as_ref().map(|p| match p {
            Ok((plan, ..)) => Ok(plan.clone()),
            Err(error) => Err(RemoteError::from(error)),
        });
        let told: Result<Plan, RemoteError> = group.broadcast_object(told.as_ref(), root)?;
        let checkpoint = prepared.transpose()?.map(|(_, _, checkpoint)| checkpoint);
        let plan = told.map_err(|source| Error::Peer { rank: group.members()[root.index()], source })?;
        let config = plan.parse(Path::new("config.json"))?;
        // The root sends to every rank and every rank waits for the root, so all must be able to go on.
        let compute = agree(compute(group), |_| (), group)?;
        let source = RootSource { checkpoint: checkpoint.as_ref(), root, group };
        let mut source = Announced { source, heard: false };
        let model = build(config, &plan, compute, &mut source, me, world_size);
        let model = if source.heard { model? } else { agree(model, |_| (), source.source.group)? };
        let model = model.reported(checkpoint.as_ref(), started);
        model.warm_up(source.source.group)?;
        Ok(model)
    }

    /// On a GPU, a prompt of two tokens and one behind it: what each rank sets up at first use would else hold up all the
    /// others in the middle of a request.
    fn warm_up(&self, group: &mut ProcessGroup) -> Result<()> {
        if group.device().is_none() {
            return Ok(());
        }
        // What a rank most likely lacks, memory or the compiler of kernels, is found before the others wait for it.
        let tokens = &[0; 2][..self.config().max_positions.min(3).saturating_sub(1)];
        let ready = self.cache(tokens.len() + 1).and_then(|cache| {
            self.compute.batch(&[0], &SlotMapping::from_position(0), &self.rotary)?;
            Ok(cache)
        });
        let mut cache = agree(ready, |_| (), group)?;
        group.unrecorded(|group| {
            if !tokens.is_empty() {
                self.forward_last(tokens, &mut cache, group)?;
            }
            self.forward_last(&[0], &mut cache, group)?;
            Ok(())
        })
    }

    fn reported(mut self, checkpoint: Option<&Checkpoint>, started: Instant) -> Self {
        self.report = LoadReport {
            checkpoint_bytes: checkpoint.map_or(0, Checkpoint::total_bytes),
            bytes_read: checkpoint.map_or(0, Checkpoint::bytes_read),
            elapsed: started.elapsed(),
        };
        tracing::debug!(
            bytes_read = self.report.bytes_read,
            checkpoint_bytes = self.report.checkpoint_bytes,
            seconds = self.report.elapsed.as_secs_f64(),
            dtype = %self.dtype(),
            "model loaded"
        );
        self
    }
}

/// Weights from a root, with a word from every rank before each tensor: a rank that has failed says so there, and nobody
/// waits for it.
struct Announced<'a> {
    source: RootSource<'a>,
    /// Every rank knows of a failure, and nothing more is to be said.
    heard: bool,
}

impl WeightSource for Announced<'_> {
    fn fill(&mut self, tensor: &ShardedTensor<'_>, target: &mut Tensor, at: usize) -> Result<()> {
        agree(Ok(()), |()| (), self.source.group).inspect_err(|_| self.heard = true)?;
        self.source.fill(tensor, target, at)
    }
}

fn build(
    config: LlamaConfig,
    plan: &Plan,
    compute: Box<dyn Compute>,
    source: &mut dyn WeightSource,
    rank: Rank,
    world_size: usize,
) -> Result<Llama> {
    let mut loader = Loader::new(source, rank.index(), world_size, plan.weights);
    Llama::from_loader(config, plan.activations, compute, &mut loader)
}

/// Makes a failure of one rank that of all, and refuses to go on with different plans.
fn agree<T, P>(mine: Result<T>, plan: impl FnOnce(&T) -> P, group: &mut ProcessGroup) -> Result<T>
where
    P: PartialEq + Serialize + serde::de::DeserializeOwned,
{
    let told = match &mine {
        Ok(value) => Ok(plan(value)),
        Err(error) => Err(RemoteError::from(error)),
    };
    let all: Vec<Result<P, RemoteError>> = group.all_gather_object(&told)?;
    let mine = mine?;
    for (rank, theirs) in Rank::all(all.len()).zip(all) {
        match theirs {
            Err(source) => return Err(Error::Peer { rank: group.members()[rank.index()], source }),
            Ok(theirs) if Ok(&theirs) != told.as_ref() => {
                return Err(ConfigurationError::DifferentModels { rank, other: group.rank() }.into());
            }
            Ok(_) => {}
        }
    }
    Ok(mine)
}

#[cfg(test)]
mod tests;
