//! The share of gradient reduction that a backward pass hides, by size of the buckets.
//!
//! A step is a synthetic backward pass: some compute for each parameter, from the last to the first, then its gradient is written.
//! On GPUs that compute is products of matrices; on CPUs the host waits, as it does for an accelerator.
//! The compute of a step takes as long as the reduction of its gradients, one by one, does alone.

mod compute;
mod report;

use std::time::Instant;

use ryzanstein_process_group::{
    BucketOptions, BucketedReducer, GroupBuffer, Memory, Parameter, ProcessGroup, ReduceOp,
};
use ryzanstein_tensor_parallel::Error;

use self::compute::Compute;
pub use self::report::{OverlapReport, OverlapRow};
use super::limits;
use crate::measure::{slowest, summary};
use ryzanstein_orchestrator::Orchestrator;

/// Sizes of buckets.
const BUCKETS: [usize; 4] = [1_000_000, 5_000_000, 25_000_000, 100_000_000];
/// Number of arrays of a rank, each as large as all gradients: the results of its pass, and the gradients of each reduction
/// strategy.
const ARRAYS: u64 = 2 + BUCKETS.len() as u64;
/// Period of the gradients in elements, so that their sums are exact.
const PERIOD: usize = 61;

/// A request for measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OverlapRequest {
    /// Bytes of all gradients, in f32.
    pub bytes: u64,
    /// Number of parameters, all of one size.
    pub parameters: usize,
    /// Number of timed steps.
    pub steps: usize,
}

impl OverlapRequest {
    /// Returns a request that suits the memory where a group computes.
    pub fn usual(memory: Memory) -> Self {
        let bytes = if memory == Memory::Host { 64_000_000 } else { 1_000_000_000 };
        Self { bytes, parameters: 64, steps: 10 }
    }

    /// Refuses more gradients than can be measured.
    ///
    /// # Errors
    /// [`Error::Configuration`](ryzanstein_process_group::Error::Configuration) names the limit and its reason.
    pub fn check(&self) -> Result<(), Error> {
        Ok(limits::check_sizes(&[self.bytes])?)
    }

    /// Refuses gradients that do not fit the memory of a host for all its ranks.
    fn check_memory(&self, ranks: usize, memory: u64) -> Result<(), Error> {
        Ok(limits::check_fit(&[self.bytes], ARRAYS, ranks, memory)?)
    }
}

/// Measures every reduction strategy. Every rank calls this with the same request, and gets the same report.
///
/// # Errors
/// Returns the errors of the groups and of a GPU.
pub fn run(orchestrator: &mut Orchestrator, request: &OverlapRequest) -> Result<OverlapReport, Error> {
    request.check()?;
    let manager = orchestrator.manager();
    let me = manager.rank();
    if manager.world().memory() == Memory::Host {
        request.check_memory(manager.roster().local_world_size(me), limits::host_memory())?;
    }
    let own = manager.new_group(&[me])?;
    let own = own.ok_or_else(|| Error::Input("this rank is no member of its own group".into()))?;
    let count = usize::try_from(request.bytes).unwrap_or(usize::MAX) / size_of::<f32>() / request.parameters;
    let mut pass = Pass::new(manager.world(), own, count.max(1), request.parameters)?;
    let mut ways = vec![ReductionStrategy::one_by_one(&pass)?];
    for bytes in BUCKETS {
        ways.push(ReductionStrategy::in_buckets(&pass, bytes)?);
    }
    let reducing = (0..=request.steps).map(|_| pass.time(|pass| ways[0].step(pass, false)));
    let reducing = reducing.collect::<Result<Vec<f64>, Error>>()?;
    let reducing = median_us(pass.group, &reducing)?;
    pass.compute = Compute::calibrated(reducing / request.parameters as f64, pass.group)?;

    // All in turn, so that other activity of the machine affects all alike.
    let mut computing = Vec::new();
    let mut times = vec![(Vec::new(), Vec::new()); ways.len()];
    for _ in 0..=request.steps {
        computing.push(pass.time(|pass| (0..pass.sources.len()).try_for_each(|_| pass.compute.run()))?);
        for (way, (alone, step)) in ways.iter_mut().zip(&mut times) {
            alone.push(pass.time(|pass| way.step(pass, false))?);
            step.push(pass.time(|pass| way.step(pass, true))?);
        }
    }
    let compute_us = median_us(pass.group, &computing)?;
    let (mut rows, mut errors): (Vec<OverlapRow>, u64) = (Vec::new(), 0);
    for (way, (alone, step)) in ways.iter_mut().zip(times) {
        let (alone_us, step_us) = (median_us(pass.group, &alone)?, median_us(pass.group, &step)?);
        let unhidden = rows.first().map_or(step_us, |first| first.step_us);
        rows.push(OverlapRow::new(
            way.bucket_bytes(),
            way.calls(),
            [alone_us, step_us, compute_us],
            unhidden,
        ));
        errors += way.wrong(&mut pass)?;
    }
    let group = pass.group;
    let errors = group.all_gather_object(&errors)?.into_iter().sum();
    Ok(OverlapReport {
        world_size: group.world_size(),
        backend: group.backend(),
        bytes: (count.max(1) * request.parameters * size_of::<f32>()) as u64,
        parameters: request.parameters,
        compute_us,
        rows,
        errors,
    })
}

/// A synthetic backward pass.
struct Pass<'a> {
    group: &'a mut ProcessGroup,
    /// A group of this rank alone: its calls copy within the memory of the group, in the order of the compute stream.
    own: ProcessGroup,
    /// The values that this rank's pass writes into the gradient of each parameter.
    sources: Vec<GroupBuffer<f32>>,
    /// Number of elements of a gradient.
    count: usize,
    compute: Compute,
}

impl<'a> Pass<'a> {
    fn new(
        group: &'a mut ProcessGroup,
        own: ProcessGroup,
        count: usize,
        parameters: usize,
    ) -> Result<Self, Error> {
        let rank = group.rank().index();
        let source = |parameter| {
            let values: Vec<f32> = (0..count).map(|i| computed(rank, parameter, i)).collect();
            Ok(group.upload(&values)?)
        };
        let sources = (0..parameters).map(source).collect::<Result<_, Error>>()?;
        Ok(Self { group, own, sources, count, compute: Compute::default() })
    }

    /// Returns the seconds of work that all ranks begin together, on this rank.
    fn time(&mut self, work: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<f64, Error> {
        self.group.barrier()?;
        self.group.synchronize()?;
        let started = Instant::now();
        work(self)?;
        self.group.synchronize()?;
        Ok(started.elapsed().as_secs_f64())
    }
}

/// Returns the median of all but the first, each on its slowest rank, in microseconds.
fn median_us(group: &mut ProcessGroup, seconds: &[f64]) -> Result<f64, Error> {
    let all = group.all_gather_object(&seconds.to_vec())?;
    let all: Vec<&[f64]> = all.iter().map(|rank| rank.get(1..).unwrap_or_default()).collect();
    Ok(summary(slowest(&all)).median_us * 1e6)
}

/// Returns the value of element `i` on a rank: sums of these are exact.
fn computed(rank: usize, parameter: usize, i: usize) -> f32 {
    ((i + 3 * rank + 5 * parameter) % PERIOD) as f32
}

/// A strategy to reduce gradients.
enum ReductionStrategy {
    /// One all-reduce per parameter, after the backward pass.
    OneByOne(Vec<GroupBuffer<f32>>),
    /// Buckets of at most this many bytes. Each starts when its gradients are ready.
    InBuckets(usize, BucketedReducer),
}

impl ReductionStrategy {
    fn one_by_one(pass: &Pass<'_>) -> Result<Self, Error> {
        let zeros = vec![0.0; pass.count];
        let gradients = pass.sources.iter().map(|_| pass.group.upload(&zeros)).collect::<Result<_, _>>()?;
        Ok(Self::OneByOne(gradients))
    }

    fn in_buckets(pass: &Pass<'_>, bytes: usize) -> Result<Self, Error> {
        let options = BucketOptions { bucket_bytes: bytes, op: ReduceOp::Sum, ..BucketOptions::default() };
        let named = |i| Parameter::new::<f32>(format!("parameter {i}"), pass.count);
        let model: Vec<Parameter> = (0..pass.sources.len()).map(named).collect();
        Ok(Self::InBuckets(bytes, BucketedReducer::new(pass.group, &model, &options)?))
    }

    fn bucket_bytes(&self) -> Option<usize> {
        match self {
            Self::OneByOne(_) => None,
            Self::InBuckets(bytes, _) => Some(*bytes),
        }
    }

    fn calls(&self) -> usize {
        match self {
            Self::OneByOne(gradients) => gradients.len(),
            Self::InBuckets(_, reducer) => reducer.buckets().len(),
        }
    }

    fn step(&mut self, pass: &mut Pass<'_>, computes: bool) -> Result<(), Error> {
        let Pass { group, own, sources, compute, .. } = pass;
        for (parameter, source) in sources.iter().enumerate().rev() {
            if computes {
                compute.run()?;
            }
            match self {
                Self::OneByOne(gradients) => {
                    own.all_reduce_into(source, &mut gradients[parameter], ReduceOp::Sum)?;
                }
                Self::InBuckets(_, reducer) => {
                    if group.device().is_some() {
                        own.all_reduce_into(source, &mut reducer.device_gradient(parameter)?, ReduceOp::Sum)?;
                    } else {
                        own.all_reduce_into(source, reducer.gradient::<f32>(parameter)?, ReduceOp::Sum)?;
                    }
                    reducer.mark_ready(group, parameter)?;
                }
            }
        }
        match self {
            Self::OneByOne(gradients) => {
                for gradient in gradients.iter_mut().rev() {
                    group.all_reduce(gradient, ReduceOp::Sum)?;
                }
            }
            Self::InBuckets(_, reducer) => drop(reducer.finish(group)?),
        }
        Ok(())
    }

    /// Returns the number of wrong elements on this rank after the last step.
    fn wrong(&mut self, pass: &mut Pass<'_>) -> Result<u64, Error> {
        let mut found = pass.group.upload(&vec![0.0f32; pass.count])?;
        let (ranks, mut wrong) = (pass.group.world_size(), 0);
        for parameter in 0..pass.sources.len() {
            let own = &mut pass.own;
            match self {
                Self::OneByOne(gradients) => {
                    own.all_reduce_into(&gradients[parameter], &mut found, ReduceOp::Sum)?;
                }
                Self::InBuckets(_, reducer) if pass.group.device().is_some() => {
                    own.all_reduce_into(&reducer.device_gradient(parameter)?, &mut found, ReduceOp::Sum)?;
                }
                Self::InBuckets(_, reducer) => {
                    own.all_reduce_into(&*reducer.gradient::<f32>(parameter)?, &mut found, ReduceOp::Sum)?;
                }
            }
            let want: Vec<f32> =
                (0..PERIOD).map(|i| (0..ranks).map(|rank| computed(rank, parameter, i)).sum()).collect();
            let got = pass.group.download(&found)?;
            wrong += got.iter().zip(want.iter().cycle()).filter(|(got, want)| got != want).count() as u64;
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_must_fit_the_memory_six_times_for_each_rank() {
        let request = OverlapRequest { bytes: 1 << 20, ..OverlapRequest::usual(Memory::Host) };
        assert!(request.check_memory(2, 12 << 20).is_ok());
        let error = request.check_memory(3, 12 << 20).unwrap_err().to_string();
        assert!(error.contains("3 ranks") && error.contains("18.87 MB"), "{error}");
    }
}
