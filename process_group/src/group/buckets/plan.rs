//! The assignment of gradients to buckets, and the time when a bucket may be reduced.

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::types::dtype::{DType, Element};

/// A parameter of a model, whose gradient is reduced over all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parameter {
    /// Its name, for errors.
    pub name: String,
    /// The element type of its gradient.
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}

impl Parameter {
    /// Creates a parameter whose gradient has `count` elements of the type `T`.
    pub fn new<T: Element>(name: impl Into<String>, count: usize) -> Self {
        Self { name: name.into(), dtype: T::DTYPE, count }
    }
}

/// The contents of one bucket: gradients of one type, one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BucketLayout {
    /// The element type.
    pub dtype: DType,
    /// The number of elements of all gradients together.
    pub count: usize,
    /// The parameters, by their number in order of registration, in the order of their gradients in the bucket.
    pub parameters: Vec<usize>,
}

impl BucketLayout {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// The location of a gradient.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct GradientLocation {
    pub(super) bucket: usize,
    pub(super) elements: Range<usize>,
}

/// All buckets, in the order of their reduction.
#[derive(Debug)]
pub(super) struct BucketPlan {
    pub(super) buckets: Vec<BucketLayout>,
    /// The location of each parameter's gradient.
    pub(super) locations: Vec<GradientLocation>,
}

impl BucketPlan {
    /// Fills buckets from the last parameter to the first, which is about the order in which a backward pass produces gradients.
    ///
    /// A bucket ends before the parameter that would make it larger than `limit` bytes, the first one than `first_limit`; a larger
    /// parameter has a bucket of its own. Buckets are in the order of their completion if the parameters become ready from the last
    /// to the first.
    pub(super) fn new(parameters: &[Parameter], first_limit: usize, limit: usize) -> Result<Self> {
        let mut buckets: Vec<BucketLayout> = Vec::new();
        // The newest bucket of each type.
        let mut open: Vec<usize> = Vec::new();
        for (number, parameter) in parameters.iter().enumerate().rev() {
            let Parameter { dtype, count, .. } = *parameter;
            let bytes = count.checked_mul(dtype.size()).filter(|bytes| isize::try_from(*bytes).is_ok());
            let bytes = bytes.ok_or_else(|| too_large(parameter))?;
            let newest = open.iter().position(|bucket| buckets[*bucket].dtype == dtype);
            let fitting = newest.filter(|at| {
                let limit = if open[*at] == 0 { first_limit.min(limit) } else { limit };
                buckets[open[*at]].bytes().checked_add(bytes).is_some_and(|sum| sum <= limit)
            });
            if let Some(at) = fitting {
                let bucket = &mut buckets[open[at]];
                bucket.count += count;
                bucket.parameters.push(number);
                continue;
            }
            newest.map(|at| open.swap_remove(at));
            open.push(buckets.len());
            buckets.push(BucketLayout { dtype, count, parameters: vec![number] });
        }
        buckets.sort_by_key(|bucket| Reverse(bucket.parameters.last().copied()));
        let locations = locations(&buckets, parameters);
        Ok(Self { buckets, locations })
    }
}

fn too_large(parameter: &Parameter) -> Error {
    Error::invalid(format!(
        "the gradient of parameter `{}` has {} elements of {}, which are more than memory holds",
        parameter.name, parameter.count, parameter.dtype
    ))
}

fn locations(buckets: &[BucketLayout], parameters: &[Parameter]) -> Vec<GradientLocation> {
    let mut locations = vec![GradientLocation { bucket: 0, elements: 0..0 }; parameters.len()];
    for (bucket, layout) in buckets.iter().enumerate() {
        let mut start = 0;
        for &number in &layout.parameters {
            let end = start + parameters[number].count;
            locations[number] = GradientLocation { bucket, elements: start..end };
            start = end;
        }
    }
    locations
}

/// The ready parameters of the current step.
#[derive(Debug)]
pub(super) struct Readiness {
    ready: Vec<bool>,
    /// Number of parameters of each bucket that are not ready.
    missing: Vec<usize>,
    /// Number of buckets that have been launched: always the first ones.
    launched: usize,
}

impl Readiness {
    pub(super) fn new(plan: &BucketPlan) -> Self {
        Self {
            ready: vec![false; plan.locations.len()],
            missing: plan.buckets.iter().map(|bucket| bucket.parameters.len()).collect(),
            launched: 0,
        }
    }

    pub(super) fn is_ready(&self, parameter: usize) -> bool {
        self.ready[parameter]
    }

    /// Returns the parameters that are not ready, in order of registration.
    pub(super) fn unready(&self) -> impl Iterator<Item = usize> {
        self.ready.iter().enumerate().filter(|(_, ready)| !**ready).map(|(number, _)| number)
    }

    /// Marks a parameter as ready. Returns the buckets to launch now. A bucket waits for the previous ones, so that all ranks
    /// launch them in the same order.
    pub(super) fn mark(&mut self, plan: &BucketPlan, parameter: usize) -> Range<usize> {
        self.ready[parameter] = true;
        self.missing[plan.locations[parameter].bucket] -= 1;
        let complete = self.missing[self.launched..].iter().take_while(|missing| **missing == 0).count();
        let launch = self.launched..self.launched + complete;
        self.launched = launch.end;
        launch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters(of: &[(DType, usize)]) -> Vec<Parameter> {
        let named = |(number, &(dtype, count)): (usize, &(DType, usize))| Parameter {
            name: format!("p{number}"),
            dtype,
            count,
        };
        of.iter().enumerate().map(named).collect()
    }

    fn numbers(plan: &BucketPlan) -> Vec<&[usize]> {
        plan.buckets.iter().map(|bucket| &bucket.parameters[..]).collect()
    }

    #[test]
    fn buckets_are_filled_from_the_last_parameter_and_the_first_bucket_is_smaller() {
        let all = parameters(&[(DType::F32, 10); 6]);
        let plan = BucketPlan::new(&all, 40, 100).unwrap();
        assert_eq!(numbers(&plan), [&[5][..], &[4, 3], &[2, 1], &[0]]);
        assert_eq!(plan.locations[3], GradientLocation { bucket: 1, elements: 10..20 });
    }

    #[test]
    fn a_parameter_larger_than_a_bucket_has_one_alone() {
        let all = parameters(&[(DType::F32, 1), (DType::F32, 1000), (DType::F32, 1)]);
        assert_eq!(numbers(&BucketPlan::new(&all, 100, 100).unwrap()), [[2], [1], [0]]);
    }

    #[test]
    fn types_have_buckets_of_their_own_in_the_order_in_which_these_are_complete() {
        let all = parameters(&[(DType::F32, 1), (DType::BF16, 1), (DType::BF16, 1), (DType::F32, 1)]);
        assert_eq!(numbers(&BucketPlan::new(&all, 100, 100).unwrap()), [[2, 1], [3, 0]]);
    }

    #[test]
    fn a_gradient_larger_than_memory_is_refused_by_name() {
        let error = BucketPlan::new(&parameters(&[(DType::F64, usize::MAX)]), 1, 1).unwrap_err();
        assert!(error.to_string().contains("parameter `p0`"), "{error}");
    }

    fn any_parameters() -> impl Strategy<Value = Vec<Parameter>> {
        let dtype = prop::sample::select(&[DType::F32, DType::BF16, DType::F64]);
        prop::collection::vec((dtype, 0..300usize), 0..40).prop_map(|of| parameters(&of))
    }

    proptest! {
        #[test]
        fn every_gradient_has_one_location_and_no_bucket_exceeds_its_limit(
            all in any_parameters(), first in 0..500usize, limit in 0..2000usize,
        ) {
            let plan = BucketPlan::new(&all, first, limit).unwrap();
            let mut seen = vec![0; all.len()];
            for (index, bucket) in plan.buckets.iter().enumerate() {
                let mut end = 0;
                for &number in &bucket.parameters {
                    seen[number] += 1;
                    prop_assert_eq!(all[number].dtype, bucket.dtype);
                    let location = &plan.locations[number];
                    prop_assert_eq!((location.bucket, location.elements.start), (index, end));
                    prop_assert_eq!(location.elements.len(), all[number].count);
                    end = location.elements.end;
                }
                prop_assert_eq!(end, bucket.count);
                prop_assert!(bucket.bytes() <= limit || bucket.parameters.len() == 1);
            }
            prop_assert!(seen.iter().all(|times| *times == 1));
        }

        #[test]
        fn in_whatever_order_parameters_are_ready_buckets_are_launched_complete_and_in_order(
            (all, order) in any_parameters().prop_flat_map(|all| {
                let order: Vec<usize> = (0..all.len()).collect();
                (Just(all), Just(order).prop_shuffle())
            }),
            limit in 0..2000usize,
        ) {
            let plan = BucketPlan::new(&all, limit / 4, limit).unwrap();
            let mut readiness = Readiness::new(&plan);
            let mut launched = 0;
            for number in order {
                let now = readiness.mark(&plan, number);
                prop_assert_eq!(now.start, launched);
                launched = now.end;
                let is_complete =
                    |bucket: &BucketLayout| bucket.parameters.iter().all(|p| readiness.is_ready(*p));
                prop_assert!(plan.buckets[..launched].iter().all(is_complete));
                // No bucket waits without need.
                prop_assert!(plan.buckets.get(launched).is_none_or(|next| !is_complete(next)));
            }
            prop_assert_eq!(launched, plan.buckets.len());
            prop_assert_eq!(readiness.unready().count(), 0);
        }

        #[test]
        fn parameters_ready_from_the_last_to_the_first_never_hold_a_complete_bucket_back(
            all in any_parameters(), limit in 0..2000usize,
        ) {
            let plan = BucketPlan::new(&all, limit, limit).unwrap();
            let mut readiness = Readiness::new(&plan);
            for number in (0..all.len()).rev() {
                let launched = readiness.mark(&plan, number);
                let bucket = plan.locations[number].bucket;
                let is_last = plan.buckets[bucket].parameters.last() == Some(&number);
                prop_assert_eq!(launched.len(), usize::from(is_last));
                prop_assert!(launched.is_empty() || launched.start == bucket);
            }
        }
    }
}
