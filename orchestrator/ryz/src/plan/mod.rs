//! `ryz plan`: the numbers of GPUs that a model can run on, the memory that each GPU needs, and the cost of communication. From
//! `config.json` alone: no weights are read, and no GPU is used.

mod report;

use ryzanstein_benches::suite::link::NCCL_CALL;
use ryzanstein_config::Numerics;
use ryzanstein_process_group::paths::gpu::shared_bytes;
use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{LinkModel, estimate};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{DType, Operation, ReduceOp};
use ryzanstein_tensor_parallel::model::{Footprint, all_reduces, footprint, tensors};
use ryzanstein_tensor_parallel::shard::padded_vocabulary;
use ryzanstein_tensor_parallel::{ConfigurationError, Error, LlamaConfig, check_world_size};
use serde::Serialize;

use crate::interconnect::Interconnect;

/// World sizes up to this one are in every plan.
const ALWAYS: usize = 8;

/// Memory bandwidth of a GPU in bytes per second, which bounds a decode step from below: that of an H100 SXM (3.35 TB/s in
/// NVIDIA's data sheet).
pub const MEMORY_BANDWIDTH: f64 = 3.35e12;

/// Memory that NCCL takes on a rank whose group has used every operation, in bytes.
const NCCL_BYTES: u64 = 2067 << 20;

/// A request for a plan.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model as the user named it.
    pub model: String,
    /// A further world size, in addition to those from 1 to 8.
    pub world_size: Option<usize>,
    /// Sequences that are decoded at the same time.
    pub batch: usize,
    /// Number of positions of each; the model's maximum, if not given.
    pub context: Option<usize>,
    /// The type of activations; that of the stored weights, if not given.
    pub dtype: Option<DType>,
    /// Bytes of one GPU's memory, if known.
    pub memory: Option<u64>,
    /// The fraction of that memory that a rank may allocate: `device.memory_fraction`.
    pub memory_fraction: f64,
    /// The interconnect of the GPUs.
    pub interconnect: Interconnect,
    /// The numerics, which determine the legal world sizes: `model.numerics`.
    pub numerics: Numerics,
}

/// The requirements of a model on each number of GPUs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Plan {
    /// The model as the user named it.
    pub model: String,
    /// World sizes, smallest first.
    pub sizes: Vec<Size>,
    /// Parameters of the whole model.
    pub parameters: u64,
    /// The type of activations, and of weights on GPUs.
    #[serde(serialize_with = "by_name")]
    pub dtype: DType,
    /// Sequences that are decoded at the same time.
    pub batch: usize,
    /// Number of positions of each.
    pub context: usize,
    /// Bytes of one GPU's memory, if known.
    pub memory_bytes: Option<u64>,
    /// Bytes that a rank may allocate of that memory.
    pub budget_bytes: Option<u64>,
    /// The interconnect of the GPUs.
    #[serde(serialize_with = "by_name")]
    pub interconnect: Interconnect,
}

/// One world size. If it is not legal, there are no figures.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Size {
    /// Number of ranks, each on a GPU of its own.
    pub world_size: usize,
    /// True if the model can be sharded over this number of ranks.
    pub legal: bool,
    /// The reason why it cannot.
    pub why: Option<String>,
    /// Bytes of weights on each rank.
    pub weights_bytes: Option<u64>,
    /// Bytes of the KV cache on each rank.
    pub kv_cache_bytes: Option<u64>,
    /// Bytes of the working memory for computation.
    pub workspace_bytes: Option<u64>,
    /// The sum of these, `nccl_bytes` and `shared_bytes`.
    pub total_bytes: Option<u64>,
    /// True if the sum fits; `None` if the memory is not known.
    pub fits: Option<bool>,
    /// Bytes per token in all all-reduces of a forward pass.
    pub all_reduce_bytes_per_token: Option<u64>,
    /// The predicted share of communication in a decode step, from 0 to 1.
    pub communication_share: Option<f64>,
    /// Number of ranks that hold each key/value head.
    pub kv_replication: Option<usize>,
    /// The longest context that fits, for the same number of sequences; 0 if none does, `None` if the memory is not known.
    pub max_context: Option<usize>,
    /// Estimated bytes of NCCL's own buffers.
    pub nccl_bytes: Option<u64>,
    /// Bytes that the rank shares with the other ranks, for our own kernels; 0 for one rank and for more than 8.
    pub shared_bytes: Option<u64>,
    /// Predicted seconds of a decode step in which all positions are in use.
    pub step_seconds: Option<f64>,
}

fn by_name<S: serde::Serializer>(value: &impl ToString, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

/// Plans for a model.
///
/// # Errors
/// Fails when the context is longer than the model's, or the type of the weights is not known.
pub fn plan(config: &LlamaConfig, request: &Request) -> Result<Plan, Error> {
    let most = config.max_positions;
    let context = request.context.unwrap_or(most);
    if context > most {
        return Err(Error::Input(format!(
            "--context {context}: {} has {most} positions (`max_position_embeddings` and rope scaling of its config.json); ask for \
             at most --context {most}",
            request.model
        )));
    }
    let dtype = request.dtype.or(config.stored_dtype).ok_or_else(|| {
        Error::Input(format!(
            "config.json of {} does not say in `torch_dtype` or `dtype` whether weights are float32, float16 or bfloat16; pass \
             --dtype f32, f16 or bf16",
            request.model
        ))
    })?;
    let planner = Planner {
        config,
        dtype,
        batch: request.batch,
        link: request.interconnect,
        numerics: request.numerics,
        memory: request.memory,
        budget: request.memory.map(|memory| (memory as f64 * request.memory_fraction) as u64),
    };
    let more = request.world_size.filter(|n| *n > ALWAYS);
    let sizes = (1..=ALWAYS).chain(more).map(|n| planner.size(n, context)).collect::<Result<_, _>>()?;
    let parameters =
        tensors(config)?.iter().map(|t| t.shape.iter().map(|n| *n as u64).product::<u64>()).sum();
    Ok(Plan {
        model: request.model.clone(),
        sizes,
        parameters,
        dtype,
        batch: request.batch,
        context,
        memory_bytes: request.memory,
        budget_bytes: planner.budget,
        interconnect: request.interconnect,
    })
}

struct Planner<'a> {
    config: &'a LlamaConfig,
    dtype: DType,
    batch: usize,
    link: Interconnect,
    numerics: Numerics,
    memory: Option<u64>,
    budget: Option<u64>,
}

impl Planner<'_> {
    fn size(&self, world_size: usize, context: usize) -> Result<Size, Error> {
        let checked = check_world_size(self.config, world_size, self.numerics);
        let footprint = match checked.and_then(|()| self.footprint(world_size, context)) {
            Ok(footprint) => footprint,
            Err(Error::Configuration(ConfigurationError::WorldSize { source, .. })) => {
                return Ok(Size { world_size, why: Some(source.to_string()), ..Size::default() });
            }
            Err(error) => return Err(error),
        };
        let own = own_bytes(world_size, &footprint);
        let communicating = self.communication_seconds(world_size)?;
        let step = communicating + footprint.read_per_step as f64 / MEMORY_BANDWIDTH;
        let per_token = if world_size > 1 { all_reduces(self.config) * self.token_bytes() } else { 0 };
        Ok(Size {
            world_size,
            legal: true,
            why: None,
            weights_bytes: Some(footprint.weights),
            kv_cache_bytes: Some(footprint.kv_cache),
            workspace_bytes: Some(footprint.workspace),
            total_bytes: Some(own + nccl_bytes(world_size)),
            fits: self.fits(world_size, &footprint),
            all_reduce_bytes_per_token: Some(per_token as u64),
            communication_share: Some(communicating / step),
            kv_replication: Some(world_size.div_ceil(self.config.kv_heads)),
            max_context: self.memory.map(|_| self.max_context(world_size)).transpose()?,
            nccl_bytes: Some(nccl_bytes(world_size)),
            shared_bytes: Some(shared_bytes(world_size) as u64),
            step_seconds: Some(step),
        })
    }

    fn footprint(&self, world_size: usize, context: usize) -> Result<Footprint, Error> {
        footprint(self.config, world_size, self.dtype, self.batch, context)
    }

    /// Returns true if a rank's own memory is within its budget, and that with NCCL's within the GPU's.
    fn fits(&self, world_size: usize, footprint: &Footprint) -> Option<bool> {
        let own = own_bytes(world_size, footprint);
        Some(own <= self.budget? && own + nccl_bytes(world_size) <= self.memory?)
    }

    /// Returns the longest context that fits: memory grows with the number of positions.
    fn max_context(&self, world_size: usize) -> Result<usize, Error> {
        let (mut fits, mut too_long) = (0, self.config.max_positions + 1);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if self.fits(world_size, &self.footprint(world_size, middle)?) == Some(true) {
                fits = middle;
            } else {
                too_long = middle;
            }
        }
        Ok(fits)
    }

    /// Returns the bytes of a token's activations between layers.
    fn token_bytes(&self) -> usize {
        self.config.hidden * self.dtype.size()
    }

    /// Returns the seconds of a decode step's all-reduces and of the all-gather of its logits.
    fn communication_seconds(&self, world_size: usize) -> Result<f64, Error> {
        if world_size < 2 {
            return Ok(0.0);
        }
        let model = LinkModel::bound(self.link.cost(), world_size);
        let call = |operation, count, dtype: DType| {
            let spec = CollectiveSpec { operation, algorithm: Algorithm::Ring, count, in_place: true };
            NCCL_CALL + estimate(spec, &Hosts::one(world_size), dtype.size(), &model).as_secs_f64()
        };
        let logits = self.batch * padded_vocabulary(self.config.vocabulary, world_size)?;
        let activations = self.batch * self.config.hidden;
        Ok(all_reduces(self.config) as f64
            * call(Operation::AllReduce(ReduceOp::Sum), activations, self.dtype)
            + call(Operation::AllGather, logits / world_size, DType::F32))
    }
}

/// Returns the bytes that a rank itself allocates.
fn own_bytes(world_size: usize, footprint: &Footprint) -> u64 {
    footprint.weights + footprint.kv_cache + footprint.workspace + shared_bytes(world_size) as u64
}

/// Returns the bytes of NCCL's own buffers on a rank.
fn nccl_bytes(world_size: usize) -> u64 {
    if world_size > 1 { NCCL_BYTES } else { 0 }
}

#[cfg(test)]
mod tests;
