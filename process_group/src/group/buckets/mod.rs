//! Reduces gradients in buckets while the rest of a backward pass still computes.

mod plan;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use crate::device::DeviceSliceMut;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::group::memory::GroupMemory;
use crate::group::work::Work;
use crate::types::dtype::{DType, Element};
use crate::types::operation::{Composed, ReduceOp};
pub use plan::{BucketLayout, Parameter};
use plan::{BucketPlan, GradientLocation, Readiness};

/// Options for the buckets of a [`BucketedReducer`].
#[derive(Clone, Debug)]
pub struct BucketOptions {
    /// The maximum size of a bucket, in bytes; 25 MiB by default. A larger parameter has a bucket of its own.
    pub bucket_bytes: usize,
    /// The maximum size of the first bucket, in bytes, so that the first reduction starts early; 1 MiB by default.
    pub first_bucket_bytes: usize,
    /// [`ReduceOp::Avg`], the default, or [`ReduceOp::Sum`].
    pub op: ReduceOp,
    /// True if a step may leave parameters out, whose gradients are then zeros on this rank. Off by default: an omitted parameter
    /// is an error of [`BucketedReducer::finish`].
    pub find_unused: bool,
}

impl Default for BucketOptions {
    fn default() -> Self {
        Self { bucket_bytes: 25 << 20, first_bucket_bytes: 1 << 20, op: ReduceOp::Avg, find_unused: false }
    }
}

/// Reduces the gradients of a model over all ranks in buckets, each as soon as its gradients are complete, like
/// `DistributedDataParallel` of PyTorch.
///
/// Each bucket is one allocation in the memory on which the group works, and a gradient is a part of it: the backward pass writes
/// it there, and nothing is copied. Parameters are numbered in the order of registration, which is that of the forward pass;
/// buckets are filled from the last to the first, as gradients become ready. Every rank registers the same parameters in the same
/// order, and marks all of them in each step, in any order.
///
/// ```
/// use ryzanstein_process_group::{BucketOptions, BucketedReducer, Parameter, ProcessGroup, Result};
///
/// fn train(group: &mut ProcessGroup) -> Result<()> {
///     let parameters = [Parameter::new::<f32>("embedding", 1000), Parameter::new::<f32>("head", 500)];
///     let mut reducer = BucketedReducer::new(group, &parameters, &BucketOptions::default())?;
///     for _step in 0..3 {
///         // The backward pass, from the last layer to the first.
///         for parameter in [1, 0] {
///             reducer.gradient::<f32>(parameter)?.fill(group.rank().0 as f32);
///             reducer.mark_ready(group, parameter)?;
///         }
///         reducer.finish(group)?;
///         assert_eq!(reducer.gradient::<f32>(0)?[0], 0.5);
///     }
///     Ok(())
/// }
/// # std::thread::scope(|scope| {
/// #     for mut group in ProcessGroup::loopback(2) {
/// #         scope.spawn(move || train(&mut group).unwrap());
/// #     }
/// # });
/// ```
#[derive(Debug)]
pub struct BucketedReducer {
    group: String,
    options: BucketOptions,
    parameters: Vec<Parameter>,
    /// What the ranks compare with each reduction.
    call: Composed,
    plan: BucketPlan,
    readiness: Readiness,
    buckets: Vec<Bucket>,
}

#[derive(Debug)]
enum Bucket {
    /// The caller may use the gradients.
    Idle(GroupMemory),
    InFlight(Work<GroupMemory>),
    /// Its reduction has failed.
    Lost,
}

impl BucketedReducer {
    /// Allocates the buckets, with zeroed gradients, in the memory on which the calls of `group` work. Makes no calls on other
    /// ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an operation that is neither a sum nor an average and for gradients that are larger than
    /// memory; those of a GPU.
    pub fn new(group: &ProcessGroup, parameters: &[Parameter], options: &BucketOptions) -> Result<Self> {
        if !matches!(options.op, ReduceOp::Sum | ReduceOp::Avg) {
            return Err(Error::invalid(format!(
                "buckets of gradients cannot be reduced by `{}`; set BucketOptions::op to Sum or Avg",
                options.op
            )));
        }
        let plan = BucketPlan::new(parameters, options.first_bucket_bytes, options.bucket_bytes)?;
        let allocate = |layout: &BucketLayout| {
            Ok(Bucket::Idle(GroupMemory::new(group.device(), layout.dtype, layout.count)?))
        };
        Ok(Self {
            group: group.name().to_owned(),
            options: options.clone(),
            parameters: parameters.to_vec(),
            call: Composed::buckets(parameters.iter().map(|p| (p.dtype, p.count))),
            readiness: Readiness::new(&plan),
            buckets: plan.buckets.iter().map(allocate).collect::<Result<_>>()?,
            plan,
        })
    }

    /// Returns the buckets, in the order of their reduction.
    pub fn buckets(&self) -> &[BucketLayout] {
        &self.plan.buckets
    }

    /// Returns the gradient of a parameter. Write it before [`mark_ready`](Self::mark_ready); it is reduced after
    /// [`finish`](Self::finish). It keeps its values from step to step.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown parameter, another type, a gradient that is marked ready, and one on a GPU, which
    /// [`device_gradient`](Self::device_gradient) lends.
    pub fn gradient<T: Element>(&mut self, parameter: usize) -> Result<&mut [T]> {
        self.check_type(parameter, T::DTYPE)?;
        let (memory, location) = self.idle(parameter)?;
        let bytes = memory.host(location.elements).ok_or_else(|| {
            Error::invalid(
                "this gradient is in the memory of a GPU; take it with BucketedReducer::device_gradient",
            )
        })?;
        Ok(bytemuck::cast_slice_mut(bytes))
    }

    /// As [`gradient`](Self::gradient), on a GPU. Enqueue the work that writes it on the compute stream of the group's device.
    ///
    /// # Errors
    /// As there, and for a gradient in host memory.
    pub fn device_gradient(&mut self, parameter: usize) -> Result<DeviceSliceMut<'_>> {
        let (memory, location) = self.idle(parameter)?;
        memory.device(location.elements)?.ok_or_else(|| {
            Error::invalid("this gradient is in host memory; take it with BucketedReducer::gradient")
        })
    }

    /// Marks a gradient as written. As soon as all gradients of its bucket are written and all previous buckets have been launched,
    /// the bucket's all-reduce begins in the background.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown parameter, one that is marked already, and another group than that of
    /// [`new`](Self::new); those of [`ProcessGroup::all_reduce_async`].
    pub fn mark_ready(&mut self, group: &mut ProcessGroup, parameter: usize) -> Result<()> {
        self.check_group(group)?;
        let name = &self.registered(parameter)?.name;
        if self.readiness.is_ready(parameter) {
            return Err(Error::invalid(format!(
                "parameter {parameter} (`{name}`) is marked ready for the second time in this step; mark each parameter once, \
                 and call `finish` before the next step"
            )));
        }
        self.mark(group, parameter)
    }

    /// Waits until all gradients are reduced, and begins the next step. On a GPU the compute stream waits, and this returns at
    /// once. Returns the names of the parameters that were not marked, which only [`BucketOptions::find_unused`] allows.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the names of the parameters that are not marked: mark them and call this again. The others wait
    /// for this rank meanwhile, as in any collective. Those of the all-reduces; the gradients are then lost.
    pub fn finish(&mut self, group: &mut ProcessGroup) -> Result<Vec<String>> {
        self.check_group(group)?;
        let unready: Vec<usize> = self.readiness.unready().collect();
        if !unready.is_empty() && !self.options.find_unused {
            return Err(Error::invalid(self.unused(&unready)));
        }
        for &parameter in &unready {
            let (memory, location) = self.idle(parameter)?;
            memory.zero(location.elements)?;
            self.mark(group, parameter)?;
        }
        // All reductions are waited for before the first error is returned, so that none is in flight then.
        let outcomes: Vec<Result<()>> = self.buckets.iter_mut().map(Bucket::join).collect();
        self.readiness = Readiness::new(&self.plan);
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(unready.into_iter().map(|parameter| self.parameters[parameter].name.clone()).collect())
    }

    fn mark(&mut self, group: &mut ProcessGroup, parameter: usize) -> Result<()> {
        for bucket in self.readiness.mark(&self.plan, parameter) {
            self.buckets[bucket].launch(group, self.call, self.options.op)?;
        }
        Ok(())
    }

    fn registered(&self, parameter: usize) -> Result<&Parameter> {
        self.parameters.get(parameter).ok_or_else(|| {
            Error::invalid(format!(
                "parameter {parameter} is not registered; the {} parameters of this reducer are numbered from 0 in order of \
                 registration",
                self.parameters.len()
            ))
        })
    }

    fn check_group(&self, group: &ProcessGroup) -> Result<()> {
        if group.name() == self.group {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "a bucketed reducer of group `{}` is called with group `{}`; pass the group that it was made with",
            self.group,
            group.name()
        )))
    }

    fn check_type(&self, parameter: usize, dtype: DType) -> Result<()> {
        let Parameter { name, dtype: registered, .. } = self.registered(parameter)?;
        if *registered == dtype {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the gradient of parameter {parameter} (`{name}`) is registered as {registered} and asked for as {dtype}"
        )))
    }

    /// Returns the memory of a gradient that the caller may use.
    fn idle(&mut self, parameter: usize) -> Result<(&mut GroupMemory, GradientLocation)> {
        let name = &self.registered(parameter)?.name;
        if self.readiness.is_ready(parameter) {
            return Err(Error::invalid(format!(
                "the gradient of parameter {parameter} (`{name}`) is marked ready; write it before `mark_ready`, and read it \
                 after `finish`"
            )));
        }
        let location = self.plan.locations[parameter].clone();
        match &mut self.buckets[location.bucket] {
            Bucket::Idle(memory) => Ok((memory, location)),
            Bucket::InFlight(_) | Bucket::Lost => Err(lost()),
        }
    }

    fn unused(&self, unready: &[usize]) -> String {
        const SHOWN: usize = 20;
        let mut names = String::new();
        for parameter in unready.iter().take(SHOWN) {
            let _ = write!(names, "`{}`, ", self.parameters[*parameter].name);
        }
        if unready.len() > SHOWN {
            let _ = write!(names, "and {} more, ", unready.len() - SHOWN);
        }
        format!(
            "{} of {} parameters were not marked ready in this step: {names}so their gradients are not reduced; mark them, or \
             set BucketOptions::find_unused on every rank to reduce zeros for them",
            unready.len(),
            self.parameters.len()
        )
    }
}

impl Bucket {
    fn launch(&mut self, group: &mut ProcessGroup, call: Composed, op: ReduceOp) -> Result<()> {
        let Self::Idle(memory) = std::mem::replace(self, Self::Lost) else { return Err(lost()) };
        *self = Self::InFlight(group.compose(call, |group| group.all_reduce_async(memory, op))?);
        Ok(())
    }

    fn join(&mut self) -> Result<()> {
        match std::mem::replace(self, Self::Lost) {
            Self::InFlight(work) => *self = Self::Idle(work.join()?),
            Self::Idle(memory) => *self = Self::Idle(memory),
            Self::Lost => return Err(lost()),
        }
        Ok(())
    }
}

fn lost() -> Error {
    Error::invalid(
        "the reduction of a bucket has failed before, and its gradients are lost; make a new reducer on a new group",
    )
}
