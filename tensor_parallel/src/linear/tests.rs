//! Bitwise comparison of sharded with unsharded layers: operands are small integers, so that sums are exact in any order.

use std::collections::HashMap;

use proptest::prelude::*;
use ryzanstein_config::Numerics;
use ryzanstein_process_group::{DType, ProcessGroup};

use super::*;
use crate::attention::{CacheSize, KvCache, ParallelAttention, Rotary};
use crate::checkpoint::{Loader, MemorySource};
use crate::compute::{Host, SlotMapping, instruction_set};
use crate::embedding::{ParallelLmHead, VocabParallelEmbedding, VocabularyWeight};
use crate::error::Error;
use crate::mlp::ParallelMlp;
use crate::testing::on_loopback;

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];
const HIDDEN: usize = 24;

fn whole(shape: &[usize], seed: usize) -> Tensor {
    let value = |i: usize| ((i * 7 + seed * 13 + i / 5) % 5) as f32 - 2.0;
    Tensor::new(shape, (0..shape.iter().product()).map(value).collect(), DType::F32).unwrap()
}

fn tensors(named: &[(&str, &[usize])]) -> HashMap<String, Tensor> {
    named.iter().enumerate().map(|(i, (name, shape))| ((*name).to_owned(), whole(shape, i + 1))).collect()
}

/// Loads and runs on every rank. Returns the results in rank order, and checks the calls that were made.
fn run(
    world_size: usize,
    tensors: &HashMap<String, Tensor>,
    calls: &[(&str, u64)],
    body: impl Fn(&mut Loader<'_>, &mut ProcessGroup) -> Result<Tensor> + Sync,
) -> Vec<Tensor> {
    on_loopback(world_size, |group| {
        let mut source = MemorySource { tensors };
        let mut loader = Loader::new(&mut source, group.rank().index(), world_size, DType::F32).unwrap();
        let result = body(&mut loader, group).unwrap();
        let profile = group.profile();
        for (name, count) in calls {
            assert_eq!(profile.calls(name), *count, "{name}, world {world_size}");
        }
        let expected: u64 = calls.iter().map(|c| c.1).sum();
        assert_eq!(profile.rows().iter().map(|r| r.calls).sum::<u64>(), expected);
        result
    })
}

/// Checks that every rank of every world size returns the result of a single rank.
fn same_on_all(
    tensors: &HashMap<String, Tensor>,
    calls: &[(&str, u64)],
    body: impl Fn(&mut Loader<'_>, &mut ProcessGroup) -> Result<Tensor> + Sync,
) {
    let alone = run(1, tensors, calls, &body).remove(0);
    assert!(alone.values().unwrap().iter().any(|v| *v != 0.0));
    for world_size in WORLDS {
        for (rank, got) in run(world_size, tensors, calls, &body).into_iter().enumerate() {
            assert_eq!(
                (got.shape(), got.values().unwrap()),
                (alone.shape(), alone.values().unwrap()),
                "rank {rank} of {world_size}"
            );
        }
    }
}

fn linear(bias: bool) -> HashMap<String, Tensor> {
    let mut named: Vec<(&str, &[usize])> = vec![("l.weight", &[48, HIDDEN])];
    if bias {
        named.push(("l.bias", &[48]));
    }
    tensors(&named)
}

#[test]
fn gathered_column_parallel_equals_the_whole_layer() {
    for bias in [false, true] {
        same_on_all(&linear(bias), &[("all_gather", 1)], |loader, group| {
            let layer = ColumnParallelLinear::load(
                loader,
                "l",
                (48, HIDDEN),
                ColumnOptions { bias, gather_output: true },
            )?;
            layer.forward(&whole(&[5, HIDDEN], 9), &Host::new(1), group)
        });
    }
}

#[test]
fn column_parallel_results_side_by_side_are_the_whole_layer() {
    let x = whole(&[1, HIDDEN], 9);
    let body = |loader: &mut Loader<'_>, group: &mut ProcessGroup| {
        let options = ColumnOptions { bias: true, ..ColumnOptions::default() };
        ColumnParallelLinear::load(loader, "l", (48, HIDDEN), options)?.forward(&x, &Host::new(1), group)
    };
    let alone = run(1, &linear(true), &[], body).remove(0);
    for world_size in WORLDS {
        let parts = run(world_size, &linear(true), &[], body);
        let joined: Vec<f32> = parts.iter().flat_map(|p| p.values().unwrap().into_owned()).collect();
        assert_eq!(joined, *alone.values().unwrap());
    }
}

#[test]
fn row_parallel_equals_the_whole_layer_and_adds_its_bias_once() {
    for bias in [false, true] {
        same_on_all(&linear(bias), &[("all_reduce", 1)], |loader, group| {
            let options = RowOptions { bias, input_is_parallel: false, reduce_results: true };
            let layer = RowParallelLinear::load(loader, "l", (48, HIDDEN), options)?;
            layer.forward(&whole(&[5, HIDDEN], 9), &Host::new(1), group)
        });
    }
}

/// Values that sums round.
fn uneven(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let value = |i: u64| {
        let mixed = (i ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (mixed as f32 / (1 << 23) as f32 - 1.0) * (1.0 + (i % 5) as f32)
    };
    Tensor::new(shape, (0..shape.iter().product::<usize>() as u64).map(value).collect(), dtype).unwrap()
}

/// The squared error of a row-parallel product of bf16 on four ranks, against sums in `f64`.
fn squared_error(numerics: Numerics) -> f64 {
    let (rows, outputs, inputs) = (16, 64, 1024);
    let (x, weight) = (uneven(&[rows, inputs], 1, DType::BF16), uneven(&[outputs, inputs], 2, DType::BF16));
    let (xs, ws) = (x.values().unwrap(), weight.values().unwrap());
    let exact = |i: usize| -> f64 {
        let (x, w) = (&xs[i / outputs * inputs..][..inputs], &ws[i % outputs * inputs..][..inputs]);
        x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
    };
    let got = row_parallel(&x, &weight, 4, numerics).remove(0);
    got.values.iter().enumerate().map(|(i, got)| (f64::from(*got) - exact(i)).powi(2)).sum()
}

#[test]
fn errors_with_invariant_numerics_are_not_above_those_of_fast_ones() {
    assert!(squared_error(Numerics::Invariant) <= squared_error(Numerics::Fast));
}

/// A product, and the calls that it took.
struct Product {
    values: Vec<f32>,
    all_to_alls: u64,
    all_gathers: u64,
}

/// The product `x · weightᵀ` of a row-parallel layer, on each rank.
fn row_parallel(x: &Tensor, weight: &Tensor, world_size: usize, numerics: Numerics) -> Vec<Product> {
    let (dtype, shape) = (weight.dtype(), [weight.rows(), weight.columns()]);
    let whole = Tensor::new(&shape, weight.values().unwrap().into_owned(), dtype).unwrap();
    let weights = HashMap::from([("l.weight".to_owned(), whole)]);
    on_loopback(world_size, |group| {
        let compute = Host::with_numerics(1, instruction_set::current(), numerics);
        let mut source = MemorySource { tensors: &weights };
        let loader = Loader::new(&mut source, group.rank().index(), world_size, dtype).unwrap();
        let mut loader = loader.on(&compute);
        let options = RowOptions { input_is_parallel: false, ..RowOptions::default() };
        let layer = RowParallelLinear::load(&mut loader, "l", shape.into(), options).unwrap();
        let values = layer.forward(x, &compute, group).unwrap().values().unwrap().into_owned();
        let calls = group.profile();
        let [all_to_alls, all_gathers] = ["all_to_all", "all_gather"].map(|name| calls.calls(name));
        Product { values, all_to_alls, all_gathers }
    })
}

/// Moves the columns of part `a` to part `b` of eight, and those of `b` to `a`.
fn swap_parts(x: &Tensor, a: usize, b: usize) -> Tensor {
    let (values, columns) = (x.values().unwrap(), x.columns());
    let part = columns / 8;
    let from = |column: usize| match column / part {
        at if at == a => b * part + column % part,
        at if at == b => a * part + column % part,
        _ => column,
    };
    let moved = (0..values.len()).map(|i| values[i / columns * columns + from(i % columns)]).collect();
    Tensor::new(x.shape(), moved, x.dtype()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_row_parallel_product_with_invariant_numerics_has_the_same_bits_at_every_world_size(
        rows in prop_oneof![1usize..20, 180usize..220], outputs in prop_oneof![40usize..130, Just(128)],
        part in 1usize..70, seed in any::<u64>(), is_bf16 in any::<bool>(),
    ) {
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        let (x, weight) = (uneven(&[rows, 8 * part], seed, dtype), uneven(&[outputs, 8 * part], !seed, dtype));
        let alone = row_parallel(&x, &weight, 1, Numerics::Invariant).remove(0).values;
        for world_size in [2, 4, 8] {
            for sum in row_parallel(&x, &weight, world_size, Numerics::Invariant) {
                prop_assert!(sum.values == alone, "{} ranks", world_size);
            }
        }
        // The same product with two leaves in other places of the tree. In bf16 the sum may round to the same value.
        if !is_bf16 && part > 2 {
            let moved = row_parallel(&swap_parts(&x, 1, 2), &swap_parts(&weight, 1, 2), 1, Numerics::Invariant);
            prop_assert!(moved[0].values != alone);
        }
    }
}

#[test]
fn ranks_divide_the_addition_of_long_terms_and_gather_short_ones() {
    for (rows, outputs, calls) in [(200, 128, [1, 1]), (8, 128, [0, 1]), (200, 129, [0, 1])] {
        let (x, weight) = (uneven(&[rows, 64], 1, DType::BF16), uneven(&[outputs, 64], 2, DType::BF16));
        for product in row_parallel(&x, &weight, 2, Numerics::Invariant) {
            assert_eq!([product.all_to_alls, product.all_gathers], calls, "{rows} x {outputs}");
        }
    }
}

#[test]
fn column_then_row_needs_one_all_reduce_only() {
    let named = tensors(&[
        ("a.weight", &[48, HIDDEN]),
        ("a.bias", &[48]),
        ("b.weight", &[HIDDEN, 48]),
        ("b.bias", &[HIDDEN]),
    ]);
    same_on_all(&named, &[("all_reduce", 1)], |loader, group| {
        let options = ColumnOptions { bias: true, ..ColumnOptions::default() };
        let first = ColumnParallelLinear::load(loader, "a", (48, HIDDEN), options)?;
        let second = RowParallelLinear::load(
            loader,
            "b",
            (HIDDEN, 48),
            RowOptions { bias: true, ..RowOptions::default() },
        )?;
        let inner = first.forward(&whole(&[3, HIDDEN], 9), &Host::new(1), group)?;
        second.forward(&inner, &Host::new(1), group)
    });
}

#[test]
fn a_rank_that_no_group_has_gets_no_loader() {
    let named = linear(false);
    for (rank, world_size) in [(0, 0), (2, 2), (5, 2), (usize::MAX, 1)] {
        let mut source = MemorySource { tensors: &named };
        let error = Loader::new(&mut source, rank, world_size, DType::F32).unwrap_err().to_string();
        assert!(error.contains(&format!("no rank {rank} of {world_size}")), "{error}");
    }
}

#[test]
fn a_group_other_than_that_of_loading_is_refused_by_layers_that_call_it() {
    let named = linear(false);
    let (x, host) = (whole(&[5, HIDDEN], 9), Host::new(1));
    let mut groups = ProcessGroup::loopback(2);
    let group = &mut groups[0];
    for (rank, world_size) in [(1, 2), (0, 3), (0, 1)] {
        let mut source = MemorySource { tensors: &named };
        let mut loader = Loader::new(&mut source, rank, world_size, DType::F32).unwrap();
        let gathered = ColumnOptions { gather_output: true, ..ColumnOptions::default() };
        let column = ColumnParallelLinear::load(&mut loader, "l", (48, HIDDEN), gathered).unwrap();
        let summed = RowOptions { input_is_parallel: false, ..RowOptions::default() };
        let row = RowParallelLinear::load(&mut loader, "l", (48, HIDDEN), summed).unwrap();
        for outcome in [column.forward(&x, &host, group), row.forward(&x, &host, group)] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(&format!("shard {rank} of {world_size}")), "{error}");
            assert!(error.contains("it is rank 0 of 2"), "{error}");
        }
    }
}

#[test]
fn a_row_parallel_bias_without_a_sum_is_refused() {
    let named = linear(true);
    let mut source = MemorySource { tensors: &named };
    let mut loader = Loader::new(&mut source, 0, 2, DType::F32).unwrap();
    let options = RowOptions { bias: true, input_is_parallel: true, reduce_results: false };
    let error = RowParallelLinear::load(&mut loader, "l", (48, HIDDEN), options).unwrap_err();
    assert!(matches!(error, Error::Configuration(_)), "{error}");
}

#[test]
fn unreduced_row_parallel_results_add_up_to_the_whole_layer() {
    let options = RowOptions { bias: false, input_is_parallel: false, reduce_results: false };
    let body = |loader: &mut Loader<'_>, group: &mut ProcessGroup| {
        let layer = RowParallelLinear::load(loader, "l", (48, HIDDEN), options)?;
        layer.forward(&whole(&[2, HIDDEN], 9), &Host::new(1), group)
    };
    let alone = run(1, &linear(false), &[], body).remove(0);
    let parts = run(4, &linear(false), &[], body);
    let sums: Vec<f32> =
        (0..alone.count()).map(|i| parts.iter().map(|p| p.values().unwrap()[i]).sum()).collect();
    assert_eq!(sums, *alone.values().unwrap());
}

#[test]
fn merged_parts_are_cut_one_by_one() {
    let named = tensors(&[("g.weight", &[24, HIDDEN]), ("u.weight", &[48, HIDDEN])]);
    let x = whole(&[1, HIDDEN], 9);
    let body = |loader: &mut Loader<'_>, _: &mut ProcessGroup| {
        MergedColumnParallelLinear::load(loader, &[("g", 24), ("u", 48)], HIDDEN, false)?
            .forward(&x, &Host::new(1))
    };
    let alone = run(1, &named, &[], body).remove(0);
    let values = alone.values().unwrap();
    let (gate, up) = values.split_at(24);
    for world_size in WORLDS {
        for (rank, part) in run(world_size, &named, &[], body).iter().enumerate() {
            let (g, u) = (24 / world_size, 48 / world_size);
            assert_eq!(part.values().unwrap()[..g], gate[rank * g..(rank + 1) * g]);
            assert_eq!(part.values().unwrap()[g..], up[rank * u..(rank + 1) * u]);
        }
    }
}

#[test]
fn the_mlp_differs_by_the_order_of_a_sum_at_most_and_needs_one_all_reduce() {
    let named = tensors(&[
        ("m.gate_proj.weight", &[48, HIDDEN]),
        ("m.up_proj.weight", &[48, HIDDEN]),
        ("m.down_proj.weight", &[HIDDEN, 48]),
        ("m.gate_proj.bias", &[48]),
        ("m.up_proj.bias", &[48]),
        ("m.down_proj.bias", &[HIDDEN]),
    ]);
    let body = |loader: &mut Loader<'_>, group: &mut ProcessGroup| {
        let layer = ParallelMlp::load(loader, "m", HIDDEN, 48, true)?;
        layer.forward(&whole(&[5, HIDDEN], 9), &Host::new(1), group)
    };
    close_on_all(&WORLDS, &named, body);
}

/// For layers with nonlinear functions, whose values are not integers.
fn close_on_all(
    worlds: &[usize],
    named: &HashMap<String, Tensor>,
    body: impl Fn(&mut Loader<'_>, &mut ProcessGroup) -> Result<Tensor> + Sync,
) {
    let alone = run(1, named, &[("all_reduce", 1)], &body).remove(0);
    let scale = alone.values().unwrap().iter().fold(0.0f32, |a, b| a.max(b.abs()));
    for world_size in worlds {
        let all = run(*world_size, named, &[("all_reduce", 1)], &body);
        assert!(
            all.iter().all(|r| r.values().unwrap() == all[0].values().unwrap()),
            "ranks of {world_size} differ"
        );
        for (got, want) in all[0].values().unwrap().iter().zip(alone.values().unwrap().iter()) {
            assert!((got - want).abs() <= 2e-6 * scale, "world {world_size}: {got} and {want}");
        }
    }
}

#[test]
fn attention_with_cut_and_with_replicated_kv_heads_is_the_whole_layer() {
    for (heads, kv_heads, worlds) in
        [(8, 8, &[1, 2, 4, 8][..]), (8, 2, &[1, 2, 4, 8]), (6, 3, &[1, 3, 6]), (24, 1, &WORLDS)]
    {
        let (q, kv) = (heads * 4, kv_heads * 4);
        let named = tensors(&[
            ("a.q_proj.weight", &[q, HIDDEN]),
            ("a.k_proj.weight", &[kv, HIDDEN]),
            ("a.v_proj.weight", &[kv, HIDDEN]),
            ("a.q_proj.bias", &[q]),
            ("a.k_proj.bias", &[kv]),
            ("a.v_proj.bias", &[kv]),
            ("o.weight", &[HIDDEN, q]),
        ]);
        close_on_all(worlds, &named, |loader, group| {
            let shape = QkvShape { hidden: HIDDEN, heads, kv_heads, head_dim: 4 };
            let attention = ParallelAttention {
                qkv: QkvParallelLinear::load(loader, "a", shape, true)?,
                output: RowParallelLinear::load(loader, "o", (HIDDEN, q), RowOptions::default())?,
                window: None,
                norms: None,
            };
            let host = Host::new(1);
            let mut cache =
                KvCache::new(&host, 1, CacheSize::full(1, 5), [attention.qkv.kv_heads(), 4], DType::F32)?;
            let batch = host.batch(&[0; 5], &SlotMapping::from_position(0, 5), &Rotary::new(4, 1e4))?;
            let x = whole(&[5, HIDDEN], 9);
            attention.forward(&x, &batch, &mut cache.layers[0], &host, group)
        });
    }
}

#[test]
fn qkv_projections_are_the_whole_layers_rows_of_this_ranks_heads() {
    let named = tensors(&[
        ("a.q_proj.weight", &[32, HIDDEN]),
        ("a.k_proj.weight", &[8, HIDDEN]),
        ("a.v_proj.weight", &[8, HIDDEN]),
    ]);
    let x = whole(&[1, HIDDEN], 9);
    let body = |loader: &mut Loader<'_>, _: &mut ProcessGroup| {
        let shape = QkvShape { hidden: HIDDEN, heads: 8, kv_heads: 2, head_dim: 4 };
        QkvParallelLinear::load(loader, "a", shape, false)?.forward(&x, &Host::new(1))
    };
    let alone = run(1, &named, &[], body).remove(0).values().unwrap().into_owned();
    for world_size in [1, 2, 4, 8] {
        let (q, kv) = (32 / world_size, 8 / world_size.min(2));
        for (rank, got) in run(world_size, &named, &[], body).iter().enumerate() {
            let k = if world_size <= 2 { rank * kv } else { rank / (world_size / 2) * kv };
            let want =
                [&alone[rank * q..(rank + 1) * q], &alone[32 + k..32 + k + kv], &alone[40 + k..40 + k + kv]];
            assert_eq!(*got.values().unwrap(), want.concat(), "rank {rank} of {world_size}");
        }
    }
}

#[test]
fn embedding_and_head_equal_the_whole_layers_whatever_the_vocabulary() {
    for vocabulary in [5, 100, 101, 128, 1000] {
        let named = tensors(&[("e.weight", &[vocabulary, HIDDEN])]);
        let last = vocabulary as u32 - 1;
        same_on_all(&named, &[("all_reduce", 1)], |loader, group| {
            let weight = VocabularyWeight::load(loader, "e", vocabulary, HIDDEN)?;
            let host = Host::new(1);
            let batch =
                host.batch(&[0, last, 3, last / 2], &SlotMapping::from_position(0, 4), &Rotary::new(4, 1e4))?;
            VocabParallelEmbedding::new(weight).forward(&batch, DType::F32, &host, group)
        });
        same_on_all(&named, &[("all_gather", 1)], |loader, group| {
            let weight = VocabularyWeight::load(loader, "e", vocabulary, HIDDEN)?;
            let logits =
                ParallelLmHead::new(weight).forward(&whole(&[5, HIDDEN], 9), &Host::new(1), group)?;
            assert_eq!(logits.shape(), [5, vocabulary]);
            Ok(logits)
        });
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_before_any_call() {
    let named = tensors(&[("e.weight", &[100, HIDDEN])]);
    run(2, &named, &[], |loader, group| {
        let weight = VocabularyWeight::load(loader, "e", 100, HIDDEN)?;
        let embedding = VocabParallelEmbedding::new(weight);
        let host = Host::new(1);
        let batch = host.batch(&[1, 100], &SlotMapping::from_position(0, 2), &Rotary::new(4, 1e4))?;
        let error = embedding.forward(&batch, DType::F32, &host, group).unwrap_err();
        assert!(error.to_string().contains("token 100 is not in the vocabulary of 100"));
        Tensor::zeros(&[1], DType::F32)
    });
}

#[test]
fn the_mlp_is_exact_where_silu_is() {
    let mut named = tensors(&[
        ("m.gate_proj.weight", &[48, HIDDEN]),
        ("m.up_proj.weight", &[48, HIDDEN]),
        ("m.down_proj.weight", &[HIDDEN, 48]),
    ]);
    // silu of a multiple of 128 is bitwise itself or zero.
    let gate = whole(&[48, HIDDEN], 1).values().unwrap().iter().map(|v| v * 128.0).collect();
    named.insert("m.gate_proj.weight".into(), Tensor::new(&[48, HIDDEN], gate, DType::F32).unwrap());
    same_on_all(&named, &[("all_reduce", 1)], |loader, group| {
        let layer = ParallelMlp::load(loader, "m", HIDDEN, 48, false)?;
        layer.forward(&whole(&[5, HIDDEN], 9), &Host::new(1), group)
    });
}

#[test]
fn attention_is_exact_where_softmax_is() {
    let mut named = tensors(&[
        ("a.q_proj.weight", &[96, HIDDEN]),
        ("a.k_proj.weight", &[4, HIDDEN]),
        ("a.v_proj.weight", &[4, HIDDEN]),
        ("o.weight", &[HIDDEN, 96]),
    ]);
    // Queries of zero attend to all positions equally; a window of two makes every weight a half or one.
    named.insert("a.q_proj.weight".into(), Tensor::zeros(&[96, HIDDEN], DType::F32).unwrap());
    same_on_all(&named, &[("all_reduce", 1)], |loader, group| {
        let shape = QkvShape { hidden: HIDDEN, heads: 24, kv_heads: 1, head_dim: 4 };
        let attention = ParallelAttention {
            qkv: QkvParallelLinear::load(loader, "a", shape, false)?,
            output: RowParallelLinear::load(loader, "o", (HIDDEN, 96), RowOptions::default())?,
            window: Some(2),
            norms: None,
        };
        let host = Host::new(1);
        let mut cache =
            KvCache::new(&host, 1, CacheSize::full(1, 5), [attention.qkv.kv_heads(), 4], DType::F32)?;
        let batch = host.batch(&[0; 5], &SlotMapping::from_position(0, 5), &Rotary::new(4, 1e4))?;
        let x = whole(&[5, HIDDEN], 9);
        attention.forward(&x, &batch, &mut cache.layers[0], &host, group)
    });
}
