//! Steps of a model's layers, sharded over the ranks and unsharded on one of them: scaling efficiency, and the share of
//! communication in a step.

mod report;
mod shape;

use std::sync::Arc;
use std::time::Instant;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::{BackendKind, DType, Error as GroupError, Memory, ProcessGroup, Rank};
use ryzanstein_tensor_parallel::checkpoint::{Loader, NoiseSource};
use ryzanstein_tensor_parallel::{
    CacheSize, Decoder, Error, Llama, LlamaConfig, Passes, check_world_size, compute,
};
use serde::{Deserialize, Serialize};

use crate::communication::{Communication, JobContext};
use crate::measure::{slowest, summary};
use ryzanstein_orchestrator::Orchestrator;

pub use report::{json, text, verdicts};
pub use shape::ModelShape;

/// Scaling efficiency must be above this: t₁ / (n · tₙ).
pub(super) const ABOVE_EFFICIENCY: f64 = 0.95;
/// Type of weights and activations.
const DTYPE: DType = DType::BF16;
/// The largest allowed difference, as a share of the largest logit: sums over shards are rounded to 16 bits in transit, once a
/// call.
pub const LIMIT: f64 = 0.05;
/// Untimed steps on GPUs: the first is eager, the second is recorded. On CPUs the first touches the memory.
const WARM_UP: usize = 3;
const WARM_UP_ON_CPUS: usize = 1;

/// A request for measurements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepRequest {
    /// Shapes of the layers.
    pub shapes: Vec<ModelShape>,
    /// Number of layers of each shape.
    pub layers: usize,
    /// Numbers of sequences of decode steps, a row for each.
    pub batches: Vec<usize>,
    /// Tokens of the prompt: those of a prefill step, and those that a decode step attends to.
    pub prompt: usize,
    /// Number of timed steps.
    pub steps: usize,
}

impl StepRequest {
    /// Returns a request that fits the time and the memory where a group computes: on processors one layer of an
    /// 8-billion-parameter model, on GPUs four layers of that and of a larger one.
    pub fn usual(memory: Memory) -> Self {
        if memory == Memory::Host {
            Self {
                shapes: vec![ModelShape::llama_8b()],
                layers: 1,
                batches: vec![1, 8],
                prompt: 16,
                steps: 5,
            }
        } else {
            let shapes = vec![ModelShape::llama_8b(), ModelShape::llama_70b()];
            Self { shapes, layers: 4, batches: vec![1, 8, 64], prompt: 512, steps: 20 }
        }
    }

    /// Refuses a shape that cannot run on `world_size` ranks, and more steps than a sequence has positions.
    ///
    /// # Errors
    /// [`Error::Configuration`] with the valid sizes, and [`Error::Input`] for an invalid shape.
    pub fn check(&self, world_size: usize) -> Result<(), Error> {
        self.shapes.iter().try_for_each(|shape| {
            let config = shape.config(self.layers)?;
            let (positions, most) = (self.positions(), config.max_positions);
            if positions > most {
                return Err(GroupError::Configuration(format!(
                    "--iters {}: with a prompt of {} and {WARM_UP} untimed steps these are {positions} positions, and {} has at \
                     most {most}; expected at most {}",
                    self.steps,
                    self.prompt,
                    shape.name,
                    most.saturating_sub(self.prompt + WARM_UP),
                ))
                .into());
            }
            check_world_size(&config, world_size, Numerics::Fast)
        })
    }

    /// Returns the number of positions of a decoded sequence.
    const fn positions(&self) -> usize {
        self.prompt + WARM_UP + self.steps
    }
}

/// One kind of step.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepRow {
    /// `decode` or `prefill`.
    pub step: &'static str,
    /// Name of the shape.
    pub shape: String,
    /// Number of layers.
    pub layers: usize,
    /// Type of weights and activations.
    pub dtype: DType,
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: BackendKind,
    /// Median time of the unsharded step on one rank, in microseconds.
    pub one_us: f64,
    /// Median time of the sharded step on its slowest rank, in microseconds.
    pub median_us: f64,
    /// `one_us` / `median_us`.
    pub speed_up: f64,
    /// `speed_up` / `world_size`.
    pub efficiency: f64,
    /// True if the efficiency is above the documented target, and all logits were right.
    pub meets_target: bool,
    /// The largest difference of a logit between both models, in all steps, as a share of the largest logit.
    pub difference: f64,
    /// True if the difference is within the limit.
    pub correct: bool,
    /// Number of timed steps.
    pub steps: usize,
    /// The share of communication in a step, without waits for late ranks; `null` if no call was timed.
    pub communication_share: Option<f64>,
    /// The communication by operation.
    pub communication: Communication,
}

/// The measurements of one rank.
#[derive(Serialize, Deserialize)]
struct Measured {
    /// Seconds of the sharded steps.
    seconds: Vec<f64>,
    /// The unsharded model, on the rank that runs it too.
    alone: Option<Alone>,
    communication: Communication,
}

#[derive(Default, Serialize, Deserialize)]
struct Alone {
    seconds: Vec<f64>,
    difference: f64,
}

/// Measures all steps of all shapes. Every rank calls this with the same request and gets the same rows; `on_row` gets each as
/// soon as it is measured. The unsharded model runs on rank 0, with all CPUs that it may use if there is no GPU, while the
/// others wait.
///
/// # Errors
/// Returns the errors of [`StepRequest::check`] and of the groups, and an error when the memory does not suffice.
pub fn run(
    orchestrator: &mut Orchestrator,
    request: &StepRequest,
    mut on_row: impl FnMut(&StepRow),
) -> Result<Vec<StepRow>, Error> {
    let manager = orchestrator.manager();
    request.check(manager.roster().world_size())?;
    let is_first = manager.rank() == Rank(0);
    let mut alone = if is_first { manager.new_group(&[Rank(0)])? } else { None };
    let group = manager.world();
    // Any number of ranks can add with these.
    for group in alone.iter_mut().chain([&mut *group]) {
        group.set_numerics(Numerics::Fast);
    }
    let mut rows = Vec::new();
    for shape in &request.shapes {
        let config = shape.config(request.layers)?;
        let whole = alone.as_mut().map(|one| load(&config, DTYPE, one)).transpose()?;
        let sharded = load(&config, DTYPE, group)?;
        let decodes = request.batches.iter().map(|batch| Step::Decode(*batch));
        for step in decodes.chain([Step::Prefill]) {
            let whole = whole.as_ref().zip(alone.as_mut());
            let row = step.measure(shape, request, &sharded, group, whole)?;
            on_row(&row);
            rows.push(row);
        }
    }
    Ok(rows)
}

/// Returns the context of the ranks of the world group, for advice.
pub fn job_context(orchestrator: &mut Orchestrator, link_gbs: Option<f64>) -> JobContext {
    let manager = orchestrator.manager();
    let rows = manager.world().profile().rows();
    JobContext::of(manager, |manager| manager.world(), &rows, link_gbs)
}

/// Returns a model with random weights, held in type `dtype`, on the device of the group.
///
/// # Errors
/// Returns the errors of the model's layers.
pub fn load(config: &LlamaConfig, dtype: DType, group: &ProcessGroup) -> Result<Arc<Llama>, Error> {
    let (rank, ranks) = (group.rank().index(), group.world_size());
    let mut source = NoiseSource;
    let mut loader = Loader::new(&mut source, rank, ranks, dtype)?;
    Ok(Arc::new(Llama::from_loader(config.clone(), dtype, compute::for_group(group)?, &mut loader)?))
}

#[derive(Clone, Copy)]
enum Step {
    /// A token for each of this many sequences.
    Decode(usize),
    /// A prompt.
    Prefill,
}

/// A model, its cache and its group.
struct Side<'a> {
    decoder: Decoder,
    config: LlamaConfig,
    group: &'a mut ProcessGroup,
}

/// Returns `count` tokens, different ones for each `start`.
fn tokens(count: usize, start: usize, config: &LlamaConfig) -> Vec<u32> {
    (start..start + count).map(|at| (at * 37 % config.vocabulary) as u32).collect()
}

impl Step {
    fn measure(
        self,
        shape: &ModelShape,
        request: &StepRequest,
        model: &Arc<Llama>,
        group: &mut ProcessGroup,
        whole: Option<(&Arc<Llama>, &mut ProcessGroup)>,
    ) -> Result<StepRow, Error> {
        let mut whole = whole.map(|(model, one)| self.side(model, request, one)).transpose()?;
        let mut sharded = self.side(model, request, group)?;
        let mut alone = whole.as_ref().map(|_| Alone::default());
        let mut seconds = Vec::new();
        let profile = sharded.group.profile();
        let warm_up = if sharded.group.device().is_some() { WARM_UP } else { WARM_UP_ON_CPUS };
        // In turn, so that other activity of the machine affects both alike.
        for at in 0..warm_up + request.steps {
            if at == warm_up {
                profile.clear();
            }
            let want = whole.as_mut().map(|whole| self.run(whole, request, at)).transpose()?;
            sharded.group.without_profiling(|group| group.barrier().and_then(|()| group.synchronize()))?;
            let (took, got) = self.run(&mut sharded, request, at)?;
            if let (Some(alone), Some((of_one, want))) = (&mut alone, want) {
                alone.difference = alone.difference.max(difference(&got, &want));
                alone.seconds.extend((at >= warm_up).then_some(of_one));
            }
            seconds.extend((at >= warm_up).then_some(took));
        }
        let mut total = seconds.iter().sum();
        if sharded.group.device().is_some() && matches!(self, Self::Decode(_)) {
            // Once more, with events around calls, which make a pass longer.
            let before = sharded.group.set_graph_timing(true);
            sharded = self.side(model, request, sharded.group)?;
            total = 0.0;
            for at in 0..warm_up + request.steps {
                if at == warm_up {
                    profile.clear();
                }
                let (took, _) = self.run(&mut sharded, request, at)?;
                total += if at < warm_up { 0.0 } else { took };
            }
            sharded.group.set_graph_timing(before);
        }
        let communication = Communication::new(&profile.rows(), total, seconds.len());
        let all = sharded.group.all_gather_object(&Measured { seconds, alone, communication })?;
        Ok(self.row(shape, request, sharded.group, all))
    }

    fn side<'a>(
        self,
        model: &Arc<Llama>,
        request: &StepRequest,
        group: &'a mut ProcessGroup,
    ) -> Result<Side<'a>, Error> {
        let config = model.config().clone();
        let Self::Decode(batch) = self else {
            return Ok(Side {
                decoder: model.decoder(CacheSize::full(1, request.prompt), Passes::Graph)?,
                config,
                group,
            });
        };
        let mut decoder = model.decoder(CacheSize::full(batch, request.positions()), Passes::Graph)?;
        decoder.prefill(0, &tokens(request.prompt, 0, &config), group)?;
        for sequence in 1..batch {
            decoder.fork(0, sequence, request.prompt)?;
        }
        Ok(Side { decoder, config, group })
    }

    /// Runs one step, and returns its seconds and its logits.
    fn run(self, side: &mut Side<'_>, request: &StepRequest, at: usize) -> Result<(f64, Vec<f32>), Error> {
        let Side { decoder, group, config } = side;
        let started;
        let logits = match self {
            Self::Decode(batch) => {
                let pairs: Vec<_> = tokens(batch, at, config).into_iter().enumerate().collect();
                started = Instant::now();
                decoder.decode(&pairs, *group)?
            }
            Self::Prefill => {
                let prompt = tokens(request.prompt, 0, config);
                decoder.clear(0);
                started = Instant::now();
                decoder.prefill(0, &prompt, *group)?
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        Ok((seconds, logits.values()?.into_owned()))
    }

    fn row(
        self,
        shape: &ModelShape,
        request: &StepRequest,
        group: &ProcessGroup,
        all: Vec<Measured>,
    ) -> StepRow {
        let world_size = group.world_size();
        let of_ranks: Vec<&[f64]> = all.iter().map(|rank| &rank.seconds[..]).collect();
        let median_us = summary(slowest(&of_ranks)).median_us * 1e6;
        let of_each: Vec<Communication> = all.iter().map(|rank| rank.communication.clone()).collect();
        let communication = Communication::of_ranks(&of_each);
        let of_one = all.into_iter().find_map(|rank| rank.alone).unwrap_or_default();
        let one_us = summary(of_one.seconds).median_us * 1e6;
        let speed_up = one_us / median_us;
        let (efficiency, correct) = (speed_up / world_size as f64, of_one.difference <= LIMIT);
        let (step, sequences, tokens) = match self {
            Self::Decode(batch) => ("decode", batch, 1),
            Self::Prefill => ("prefill", 1, request.prompt),
        };
        StepRow {
            step,
            shape: shape.name.clone(),
            layers: request.layers,
            dtype: DTYPE,
            sequences,
            tokens,
            world_size,
            backend: group.backend(),
            one_us,
            median_us,
            speed_up,
            efficiency,
            meets_target: correct && efficiency > ABOVE_EFFICIENCY,
            difference: of_one.difference,
            correct,
            steps: request.steps,
            communication_share: communication.share(),
            communication,
        }
    }
}

/// Returns the largest difference of two arrays of logits, relative to the largest value of `want`. Infinite if it cannot be computed.
pub fn difference(got: &[f32], want: &[f32]) -> f64 {
    let largest = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    if got.len() != want.len() || !largest.is_normal() {
        return f64::INFINITY;
    }
    let far = got.iter().zip(want).fold(0.0f32, |most, (a, b)| {
        // A NaN must not count as no difference.
        let apart = (a - b).abs();
        if apart.is_nan() { f32::INFINITY } else { most.max(apart) }
    });
    f64::from(far) / f64::from(largest)
}

#[cfg(test)]
mod tests;
