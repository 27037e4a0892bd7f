//! All-reduce of f32 values that are sent as 16-bit ones, on CPUs.

use half::{bf16, f16};
use proptest::prelude::*;
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::{Error, ProcessGroup, ReduceOp, WireType};
use ryzanstein_tests::{config, in_good_order, on_loopback};

fn rounded(wire: WireType, value: f32) -> f32 {
    match wire {
        WireType::Bf16 => bf16::from_f32(value).to_f32(),
        WireType::F16 => f16::from_f32(value).to_f32(),
    }
}

/// Returns the result by definition: rounded, summed in f32 in rank order, rounded.
fn defined(wire: WireType, op: ReduceOp, operands: &[f32]) -> f32 {
    let sum = operands.iter().map(|x| rounded(wire, *x)).reduce(|a, b| a + b).unwrap();
    let result = if op == ReduceOp::Avg { sum / operands.len() as f32 } else { sum };
    rounded(wire, result)
}

/// Returns a value that no 16-bit type holds exactly.
fn operand(rank: usize, i: usize) -> f32 {
    let mixed = (i * 7919 + rank * 104_729) % 20_011;
    (mixed as f32 - 10_005.0) * 0.001_234_5
}

fn is_as_defined(group: &mut ProcessGroup, length: usize, op: ReduceOp, wire: WireType) {
    let (n, me) = (group.world_size(), group.rank().index());
    let mut x: Vec<f32> = (0..length).map(|i| operand(me, i)).collect();
    group.all_reduce_compressed(&mut x, op, wire).unwrap();
    for (i, got) in x.iter().enumerate() {
        let operands: Vec<f32> = (0..n).map(|rank| operand(rank, i)).collect();
        let expected = defined(wire, op, &operands);
        assert_eq!(got.to_bits(), expected.to_bits(), "element {i} of {length}, {op} as {wire}");
    }
}

#[test]
fn every_rank_gets_the_bits_of_the_definition() {
    for world_size in 1..=4 {
        in_good_order(&config(BackendChoice::Tcp), world_size, |manager| {
            for length in [0, 1, 3, 1023, 100_003] {
                for wire in [WireType::Bf16, WireType::F16] {
                    for op in [ReduceOp::Sum, ReduceOp::Avg] {
                        is_as_defined(manager.world(), length, op, wire);
                    }
                }
            }
        });
    }
}

#[test]
fn what_is_no_number_or_too_large_shows_in_the_result() {
    on_loopback(2, |group| {
        let of = |value| if group.rank().0 == 0 { value } else { 1.0 };
        let mut x = [of(f32::NAN), of(f32::INFINITY), of(1e6)];
        group.all_reduce_compressed(&mut x, ReduceOp::Sum, WireType::F16).unwrap();
        assert!(x[0].is_nan() && x[1] == f32::INFINITY && x[2] == f32::INFINITY, "{x:?}");
        let mut x = [1e30f32];
        group.all_reduce_compressed(&mut x, ReduceOp::Sum, WireType::Bf16).unwrap();
        assert!((x[0] - 2e30).abs() < 2e28, "{x:?}");
    });
}

#[test]
fn other_reductions_than_sum_and_average_are_refused_and_the_group_goes_on() {
    on_loopback(2, |group| {
        let error = group.all_reduce_compressed(&mut [1.0], ReduceOp::Max, WireType::Bf16).unwrap_err();
        assert!(
            matches!(error, Error::Invalid(_)) && error.to_string().contains("use Sum or Avg"),
            "{error}"
        );
        let mut x = [1.0f32];
        group.all_reduce(&mut x, ReduceOp::Max).unwrap();
    });
}

type Composed = fn(&mut ProcessGroup, usize) -> Result<(), Error>;

#[test]
fn ranks_whose_composed_calls_differ_are_told_in_what() {
    let calls: [(&str, Composed); 4] = [
        ("reduction", |group, me| {
            group.all_reduce_compressed(&mut [1.0f32; 5], [ReduceOp::Sum, ReduceOp::Avg][me], WireType::Bf16)
        }),
        ("length", |group, me| {
            group.all_reduce_compressed(&mut vec![1.0f32; 5 + me], ReduceOp::Sum, WireType::Bf16)
        }),
        ("split", |group, me| {
            let (mut a, mut b) = (vec![1.0f32; 3 + 2 * me], vec![1.0f32; 5 - 2 * me]);
            group.all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::Sum)
        }),
        ("operation", |group, me| match me {
            0 => group.all_gather_object(&7u8).map(drop),
            _ => group.all_gather(&mut [0u64; 2]),
        }),
    ];
    for (field, call) in calls {
        let errors = on_loopback(2, |group| {
            let me = group.rank().index();
            call(group, me).unwrap_err()
        });
        for error in errors {
            let told = matches!(error, Error::Mismatch { .. } | Error::PeerAborted { .. });
            assert!(told && error.to_string().contains(field), "{field}: {error}");
        }
    }
}

/// Of the range in which both types have their full precision.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![Just(0.0f32), 0.01f32..4000.0, -4000.0f32..-0.01]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_error_is_within_the_bound(
        rows in (1..=6usize).prop_flat_map(|n| prop::collection::vec(prop::collection::vec(value(), 33), n)),
        wire in prop::sample::select(&[WireType::Bf16, WireType::F16]),
        op in prop::sample::select(&[ReduceOp::Sum, ReduceOp::Avg]),
    ) {
        let n = rows.len();
        let results = on_loopback(n, |group| {
            let mut x = rows[group.rank().index()].clone();
            group.all_reduce_compressed(&mut x, op, wire).unwrap();
            x
        });
        prop_assert!(results.iter().all(|x| x == &results[0]));
        let divisor = if op == ReduceOp::Avg { n as f64 } else { 1.0 };
        for (i, got) in results[0].iter().enumerate() {
            let exact: f64 = rows.iter().map(|row| f64::from(row[i])).sum::<f64>() / divisor;
            let magnitude: f64 = rows.iter().map(|row| f64::from(row[i].abs())).sum::<f64>() / divisor;
            let error = (f64::from(*got) - exact).abs();
            prop_assert!(error <= wire.error_bound(n) * magnitude, "{got} for {exact}, error {error}");
        }
    }
}
