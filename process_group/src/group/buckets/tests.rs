//! Errors for one rank that misuses a reducer.

use super::*;
use crate::testing::in_time;

fn parameters() -> [Parameter; 3] {
    [Parameter::new::<f32>("a", 10), Parameter::new::<f32>("b", 20), Parameter::new::<i32>("c", 5)]
}

/// Returns a group of one rank and a reducer of three parameters.
fn alone(options: &BucketOptions) -> (ProcessGroup, BucketedReducer) {
    let group = ProcessGroup::loopback(1).remove(0);
    let reducer = BucketedReducer::new(&group, &parameters(), options).unwrap();
    (group, reducer)
}

fn is_refused<R: std::fmt::Debug>(outcome: Result<R>, with: &str) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert!(error.to_string().contains(with), "{error}");
}

#[test]
fn misuse_is_refused_with_the_name_of_the_parameter_and_the_step_goes_on() {
    let (mut group, mut reducer) = alone(&BucketOptions::default());
    is_refused(reducer.mark_ready(&mut group, 3), "parameter 3 is not registered; the 3 parameters");
    is_refused(reducer.gradient::<f32>(3), "parameter 3 is not registered");
    is_refused(reducer.gradient::<f32>(2), "(`c`) is registered as i32 and asked for as f32");
    is_refused(reducer.device_gradient(0), "is in host memory");

    reducer.gradient::<f32>(1).unwrap().fill(7.0);
    reducer.mark_ready(&mut group, 1).unwrap();
    is_refused(reducer.mark_ready(&mut group, 1), "parameter 1 (`b`) is marked ready for the second time");
    is_refused(reducer.gradient::<f32>(1), "(`b`) is marked ready; write it before");
    is_refused(reducer.finish(&mut group), "2 of 3 parameters were not marked ready in this step: `a`, `c`,");

    for parameter in [0, 2] {
        reducer.mark_ready(&mut group, parameter).unwrap();
    }
    assert!(reducer.finish(&mut group).unwrap().is_empty());
    assert_eq!(reducer.gradient::<f32>(1).unwrap(), [7.0; 20]);
    assert_eq!(reducer.gradient::<i32>(2).unwrap(), [0; 5]);
}

#[test]
fn reductions_for_which_zeros_are_not_neutral_are_refused() {
    let group = ProcessGroup::loopback(1).remove(0);
    let options = BucketOptions { op: ReduceOp::Max, ..BucketOptions::default() };
    is_refused(BucketedReducer::new(&group, &parameters(), &options), "cannot be reduced by `max`");
}

#[test]
fn gradients_that_no_memory_holds_are_refused() {
    let group = ProcessGroup::loopback(1).remove(0);
    let options = BucketOptions {
        bucket_bytes: usize::MAX,
        first_bucket_bytes: usize::MAX,
        ..BucketOptions::default()
    };
    let half = Parameter::new::<u8>("half", 1 << 62);
    for parameters in [vec![half.clone()], vec![half; 2]] {
        is_refused(BucketedReducer::new(&group, &parameters, &options), "more than memory holds");
    }
}

#[test]
fn many_unused_parameters_are_counted_and_not_all_named() {
    let mut group = ProcessGroup::loopback(1).remove(0);
    let many: Vec<Parameter> = (0..100).map(|i| Parameter::new::<f32>(format!("layer.{i}"), 1)).collect();
    let mut reducer = BucketedReducer::new(&group, &many, &BucketOptions::default()).unwrap();
    is_refused(reducer.finish(&mut group), "`layer.19`, and 80 more,");
}

#[test]
fn gradients_of_a_failed_reduction_are_lost_and_the_error_is_that_of_the_reduction() {
    in_time(|| {
        let mut group = ProcessGroup::loopback(2).remove(0);
        let mut reducer = BucketedReducer::new(&group, &parameters(), &BucketOptions::default()).unwrap();
        group.abort(&Error::Transport("a cable was cut".into()));
        for parameter in 0..3 {
            reducer.mark_ready(&mut group, parameter).unwrap();
        }
        let error = reducer.finish(&mut group).unwrap_err();
        assert!(error.to_string().contains("a cable was cut"), "{error}");
        is_refused(reducer.gradient::<f32>(0), "make a new reducer on a new group");
        is_refused(reducer.finish(&mut group), "were not marked ready");
    });
}
