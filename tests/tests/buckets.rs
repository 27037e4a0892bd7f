//! Gradients reduced in buckets, on CPUs.

use half::bf16;
use proptest::prelude::*;
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::{
    BucketOptions, BucketedReducer, DType, Element, Error, Parameter, ProcessGroup, Rank, ReduceOp,
};
use ryzanstein_tests::{config, in_good_order, on_loopback, with_ranks};

/// A model of two element types, whose last parameter is larger than a bucket of [`small`].
fn model() -> Vec<Parameter> {
    let sizes = [300, 1, 0, 770, 1000, 12, 40, 5000];
    let parameter = |(number, count): (usize, &usize)| {
        let name = format!("layer.{number}");
        if number % 3 == 1 {
            Parameter::new::<bf16>(name, *count)
        } else {
            Parameter::new::<f32>(name, *count)
        }
    };
    sizes.iter().enumerate().map(parameter).collect()
}

/// Buckets of a few parameters each.
fn small(op: ReduceOp) -> BucketOptions {
    BucketOptions { bucket_bytes: 4000, first_bucket_bytes: 1000, op, ..BucketOptions::default() }
}

/// Returns a rank's value: sums of these over four ranks are exact in bf16.
fn computed(step: usize, rank: usize, parameter: usize, i: usize) -> f32 {
    ((step + 3 * rank + 5 * parameter + i) % 13) as f32
}

trait Value: Element {
    fn of(value: f32) -> Self;
}

impl Value for f32 {
    fn of(value: f32) -> Self {
        value
    }
}

impl Value for bf16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
}

fn write<T: Value>(reducer: &mut BucketedReducer, parameter: usize, value: impl Fn(usize) -> f32) {
    for (i, x) in reducer.gradient::<T>(parameter).unwrap().iter_mut().enumerate() {
        *x = T::of(value(i));
    }
}

/// Compares a reduced gradient with an all-reduce of that parameter alone, bit for bit.
fn is_as_alone<T: Value>(
    group: &mut ProcessGroup,
    reducer: &mut BucketedReducer,
    parameter: usize,
    op: ReduceOp,
    value: impl Fn(usize) -> f32,
) {
    let got = reducer.gradient::<T>(parameter).unwrap();
    let mut alone: Vec<T> = (0..got.len()).map(|i| T::of(value(i))).collect();
    group.all_reduce(&mut alone, op).unwrap();
    assert_eq!(
        bytemuck::cast_slice::<T, u8>(got),
        bytemuck::cast_slice::<T, u8>(&alone),
        "parameter {parameter}"
    );
}

#[test]
fn buckets_give_the_same_bits_as_an_all_reduce_of_each_parameter() {
    for (world_size, op) in [(1, ReduceOp::Avg), (2, ReduceOp::Avg), (3, ReduceOp::Sum), (4, ReduceOp::Avg)] {
        in_good_order(&config(BackendChoice::Tcp), world_size, |manager| {
            let group = manager.world();
            let (me, model) = (group.rank().index(), model());
            let mut reducer = BucketedReducer::new(group, &model, &small(op)).unwrap();
            assert!(reducer.buckets().len() >= 4, "{:?}", reducer.buckets());
            for step in 0..3 {
                // Each rank is ready in an order of its own.
                for at in 0..model.len() {
                    let parameter = (model.len() - 1 - at + me * step) % model.len();
                    let value = |i| computed(step, me, parameter, i);
                    match model[parameter].dtype {
                        DType::BF16 => write::<bf16>(&mut reducer, parameter, value),
                        _ => write::<f32>(&mut reducer, parameter, value),
                    }
                    reducer.mark_ready(group, parameter).unwrap();
                }
                assert!(reducer.finish(group).unwrap().is_empty());
                for (parameter, of) in model.iter().enumerate() {
                    let value = |i| computed(step, me, parameter, i);
                    match of.dtype {
                        DType::BF16 => is_as_alone::<bf16>(group, &mut reducer, parameter, op, value),
                        _ => is_as_alone::<f32>(group, &mut reducer, parameter, op, value),
                    }
                }
            }
        });
    }
}

#[test]
fn a_parameter_that_a_rank_leaves_out_counts_as_zeros_where_that_is_allowed() {
    let unused = in_good_order(&config(BackendChoice::Tcp), 3, |manager| {
        let group = manager.world();
        let me = group.rank().index();
        let model = [Parameter::new::<f32>("expert", 4), Parameter::new::<f32>("shared", 4)];
        let options = BucketOptions { find_unused: true, ..small(ReduceOp::Sum) };
        let mut reducer = BucketedReducer::new(group, &model, &options).unwrap();
        let mut names = Vec::new();
        for step in 0..3 {
            for parameter in [1, 0] {
                reducer.gradient::<f32>(parameter).unwrap().fill(1.0);
                if parameter == 1 || me == step {
                    reducer.mark_ready(group, parameter).unwrap();
                }
            }
            names.push(reducer.finish(group).unwrap());
            assert_eq!(reducer.gradient::<f32>(0).unwrap(), [1.0; 4], "of one rank alone");
            assert_eq!(reducer.gradient::<f32>(1).unwrap(), [3.0; 4]);
        }
        names
    });
    for (rank, steps) in unused.iter().enumerate() {
        for (step, names) in steps.iter().enumerate() {
            assert_eq!(names.is_empty(), rank == step, "rank {rank} leaves {names:?} out in step {step}");
        }
    }
}

#[test]
fn ranks_that_register_different_parameters_are_told_of_each_other() {
    let outcomes = with_ranks(&config(BackendChoice::Tcp), 2, |mut manager| {
        let group = manager.world();
        let count = 100 + group.rank().index();
        let model = [Parameter::new::<f32>("weight", count)];
        let mut reducer = BucketedReducer::new(group, &model, &BucketOptions::default()).unwrap();
        reducer.mark_ready(group, 0).unwrap();
        reducer.finish(group).unwrap_err()
    });
    for error in outcomes {
        let told = matches!(&error, Error::Mismatch { field: "length", .. } | Error::PeerAborted { .. });
        assert!(told && error.to_string().contains("length"), "{error}");
    }
}

#[test]
fn a_reducer_refuses_another_group_than_its_own() {
    in_good_order(&config(BackendChoice::Tcp), 2, |manager| {
        let mut other = manager.new_group(&[Rank(0), Rank(1)]).unwrap().unwrap();
        let model = [Parameter::new::<f32>("weight", 1)];
        let mut reducer = BucketedReducer::new(manager.world(), &model, &BucketOptions::default()).unwrap();
        let error = reducer.mark_ready(&mut other, 0).unwrap_err();
        assert!(error.to_string().contains("pass the group that it was made with"), "{error}");
        reducer.mark_ready(manager.world(), 0).unwrap();
        reducer.finish(manager.world()).unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_model_in_any_buckets_is_reduced_right(
        counts in prop::collection::vec(0..200usize, 1..15),
        limit in 0..1500usize,
        world_size in 1..=4usize,
    ) {
        on_loopback(world_size, |group| {
            let me = group.rank().index();
            let model: Vec<Parameter> =
                counts.iter().map(|count| Parameter::new::<f32>("any", *count)).collect();
            let options = BucketOptions { bucket_bytes: limit, ..small(ReduceOp::Sum) };
            let mut reducer = BucketedReducer::new(group, &model, &options).unwrap();
            for parameter in (0..model.len()).rev() {
                write::<f32>(&mut reducer, parameter, |i| computed(0, me, parameter, i));
                reducer.mark_ready(group, parameter).unwrap();
            }
            reducer.finish(group).unwrap();
            for parameter in 0..model.len() {
                for (i, got) in reducer.gradient::<f32>(parameter).unwrap().iter().enumerate() {
                    let sum: f32 = (0..world_size).map(|rank| computed(0, rank, parameter, i)).sum();
                    assert_eq!(*got, sum);
                }
            }
        });
    }
}
