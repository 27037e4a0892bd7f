//! Every operation on a GPU against the same on the processor, and whole models against `transformers` (see
//! `fixtures/README.md`). Run with `--ignored` where there is a GPU.

use std::iter;
use std::sync::Arc;

use ryzanstein_config::{BackendChoice, DeviceConfig, Numerics};
use ryzanstein_process_group::device::{Device, Libraries, LibrarySearch};
use ryzanstein_process_group::{DType, LocalRank, MemoryRendezvous, ProcessGroupManager};
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{AttentionCall, HeadNorms, LayerCache, Run, SlotMapping};
use ryzanstein_tensor_parallel::{
    Compute, Cuda, GenerateOptions, Host, Llama, LlamaConfig, Passes, Tensor, legal_world_sizes,
};
use ryzanstein_tests::batch::{mixed, staggered};
use ryzanstein_tests::fixtures::{Expected, fixtures, folder, rope_fixtures};
use ryzanstein_tests::{config, distance, greatest, with_ranks};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn libraries() -> Arc<Libraries> {
    let search = LibrarySearch::from_variables(|name| std::env::var(name).ok());
    Arc::new(Libraries::find(&DeviceConfig::default(), &search))
}

fn gpus() -> usize {
    libraries().device_count().unwrap() as usize
}

fn cuda() -> Cuda {
    cuda_with(Numerics::Fast)
}

fn cuda_with(numerics: Numerics) -> Cuda {
    let device = Device::open(&libraries(), LocalRank(0), &DeviceConfig::default()).unwrap();
    Cuda::with_numerics(&device, 4, numerics).unwrap()
}

/// Reproducible values between -1 and 1, different for every seed.
fn noise(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    Tensor::new(shape, (0..shape.iter().product()).map(|_| next()).collect(), dtype).unwrap()
}

/// Small whole numbers: their products and sums are exact in any order.
fn whole(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 7 + seed * 13 + i / 5) % 9) as f32 - 4.0;
    Tensor::new(shape, (0..shape.iter().product()).map(value).collect(), dtype).unwrap()
}

/// How far two ways of computing one result may be apart, where each rounds once: `f32` sums differ by their order.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 5e-6,
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        other => panic!("{other} is no type of tensors"),
    }
}

fn assert_near(got: &Tensor, want: &Tensor, scale: f32, what: &str) {
    assert_eq!((got.shape(), got.dtype()), (want.shape(), want.dtype()), "{what}");
    let limit = tolerance(want.dtype());
    for (i, (got, want)) in got.values().unwrap().iter().zip(want.values().unwrap().iter()).enumerate() {
        let error = (got - want).abs();
        assert!(error <= limit * (scale + want.abs()), "{what}, element {i}: {got} and should be {want}");
    }
}

/// The same tensor in both memories.
fn both(cuda: &Cuda, make: impl Fn() -> Tensor) -> (Tensor, Tensor) {
    (make(), cuda.upload(make()).unwrap())
}

#[test]
#[ignore = "needs a GPU"]
fn values_come_back_from_the_gpu_as_they_went() {
    let cuda = cuda();
    for dtype in TYPES {
        // The last is longer than a pinned buffer, and its rows do not divide one.
        for shape in [&[1usize, 1][..], &[3, 5], &[0, 4], &[7], &[3001, 4097]] {
            let (here, there) = both(&cuda, || noise(shape, 5, dtype));
            assert_eq!(here.values().unwrap(), there.values().unwrap(), "{dtype} {shape:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn products_of_whole_numbers_are_exact_for_every_pair_of_types() {
    let (cuda, host) = ([Numerics::Fast, Numerics::Invariant].map(cuda_with), Host::new(2));
    for (m, k, n) in [
        (1, 1, 1),
        (1, 37, 5),
        (1, 1024, 300),
        (1, 4100, 3),
        (2, 37, 5),
        (8, 8, 8),
        (9, 72, 200),
        (17, 96, 33),
        (33, 104, 64),
        (64, 1024, 256),
        (130, 200, 300),
        (300, 264, 36_000),
    ] {
        // Products with many outputs take long on the processor: one type is enough.
        let types = if n > 1024 { &[DType::BF16][..] } else { &TYPES };
        for (xs, ws, cuda) in iter_product(types, types, &cuda) {
            for out in [DType::F32, xs] {
                let (x, gpu_x) = both(cuda, || whole(&[m, k], 1, xs));
                let (w, gpu_w) = both(cuda, || whole(&[n, k], 2, ws));
                let (bias, gpu_bias) = both(cuda, || whole(&[n], 3, DType::F32));
                for biased in [false, true] {
                    let want = host.linear(&x, &w, biased.then_some(&bias), out).unwrap();
                    let got = cuda.linear(&gpu_x, &gpu_w, biased.then_some(&gpu_bias), out).unwrap();
                    assert_eq!(got.dtype(), out);
                    let what =
                        format!("{m} {k} {n}, {xs} by {ws} to {out}, bias {biased}, {:?}", cuda.numerics());
                    assert!(got.values().unwrap() == want.values().unwrap(), "{what}");
                }
            }
        }
    }
}

/// Iterates over all combinations of three slices.
fn iter_product<'a, A: Copy, B: Copy, C>(
    first: &'a [A],
    second: &'a [B],
    third: &'a [C],
) -> impl Iterator<Item = (A, B, &'a C)> {
    first.iter().flat_map(move |a| second.iter().flat_map(move |b| third.iter().map(move |c| (*a, *b, c))))
}

#[test]
#[ignore = "needs a GPU"]
fn a_row_of_a_product_with_invariant_numerics_has_the_same_bits_in_every_batch_and_shard() {
    let cuda = cuda_with(Numerics::Invariant);
    let columns = |x: &Tensor, range| cuda.slice_columns(x, range).unwrap();
    for dtype in TYPES {
        // Leaves of 8 × 67 elements, or of a number that no copy can start at; and so many tiles that each block adds all leaves of
        // several.
        for (k, n) in [(8 * 536, 384), (8 * 31, 70), (8 * 16, 11_000)] {
            let whole = cuda.upload(noise(&[530, k], 1, dtype)).unwrap();
            let weight = noise(&[n, k], 2, dtype);
            let values = weight.values().unwrap();
            let rows = |range: std::ops::Range<usize>| {
                Tensor::new(&[range.len(), k], values[range.start * k..range.end * k].to_vec(), dtype)
                    .unwrap()
            };
            let of = |m: usize| {
                cuda.upload(Tensor::new(&[m, k], whole.values().unwrap()[..m * k].to_vec(), dtype).unwrap())
            };
            let full = cuda.upload(rows(0..n)).unwrap();
            let want = cuda.linear(&whole, &full, None, DType::F32).unwrap();
            // A bias makes it a sum of one leaf, as a gated product is.
            let zeros = cuda.upload(Tensor::new(&[n], vec![0.0; n], DType::F32).unwrap()).unwrap();
            let gated = cuda.swiglu(&cuda.linear(&whole, &full, Some(&zeros), dtype).unwrap()).unwrap();
            // The rows of each leaf in turn.
            let leaves = |from: usize, count: usize| {
                let parts = (from..from + count).flat_map(|leaf| {
                    let part = k / 8;
                    (0..n).flat_map(move |row| row * k + leaf * part..row * k + (leaf + 1) * part)
                });
                let leaf_major = parts.map(|at| values[at]).collect();
                cuda.upload(Tensor::new(&[count * n, k / 8], leaf_major, dtype).unwrap()).unwrap()
            };
            let sum = |x: &Tensor, weight: &Tensor, count| {
                cuda.linear_of_leaves(x, weight, count, DType::F32).unwrap()
            };
            let tree = sum(&whole, &leaves(0, 8), 8);
            for m in [1, 2, 8, 9, 31, 64, 65, 128, 200, 512, 530] {
                let x = of(m).unwrap();
                let got = cuda.linear(&x, &full, None, DType::F32).unwrap();
                assert!(
                    got.values().unwrap()[..] == want.values().unwrap()[..m * n],
                    "{dtype}, {m} rows, {k}"
                );
                // Half of the outputs, as on one of two ranks.
                let half = cuda.upload(rows(n / 2..n)).unwrap();
                let half = cuda.linear(&x, &half, None, DType::F32).unwrap();
                assert!(
                    half.values().unwrap() == columns(&got, n / 2..n).values().unwrap(),
                    "{dtype}, {m} rows, {k}"
                );
                let got = cuda.gated_linear(&x, &full, None).unwrap();
                assert!(
                    got.values().unwrap()[..] == gated.values().unwrap()[..m * n / 2],
                    "{dtype}, {m} gated rows, {k}"
                );
                for ranks in [1, 2, 4, 8] {
                    let share = 8 / ranks;
                    let sums = (0..ranks).flat_map(|rank| {
                        let mine = columns(&x, rank * k / ranks..(rank + 1) * k / ranks);
                        sum(&mine, &leaves(rank * share, share), share).values().unwrap().into_owned()
                    });
                    let terms = cuda
                        .upload(Tensor::new(&[ranks, m, n], sums.collect(), DType::F32).unwrap())
                        .unwrap();
                    let got = cuda.sum_of_leaves(&terms, DType::F32).unwrap();
                    assert!(
                        got.values().unwrap()[..] == tree.values().unwrap()[..m * n],
                        "{dtype}, {m} rows on {ranks} ranks"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn products_with_invariant_numerics_are_as_near_to_those_of_f64_as_fast_ones() {
    let (fast, invariant) = (cuda(), cuda_with(Numerics::Invariant));
    let (k, n) = (4096, 384);
    for dtype in TYPES {
        let (x, weight) = (noise(&[200, k], 1, dtype), noise(&[n, k], 2, dtype));
        let wide = |x: &Tensor| x.values().unwrap().iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        let (wide_x, wide_w) = (wide(&x), wide(&weight));
        let dot = |(row, output): (usize, usize)| -> f64 {
            let [a, b] = [&wide_x[row * k..][..k], &wide_w[output * k..][..k]];
            a.iter().zip(b).map(|(a, b)| a * b).sum()
        };
        let want: Vec<f64> = (0..200 * n).map(|i| dot((i / n, i % n))).collect();
        // Roots of mean squares.
        let size = (want.iter().map(|want| want.powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        let error = |got: Tensor| {
            let got = got.values().unwrap();
            let squares = got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).powi(2));
            (squares.sum::<f64>() / got.len() as f64).sqrt()
        };
        for m in [1, 8, 64, 200] {
            let rows = Tensor::new(&[m, k], x.values().unwrap()[..m * k].to_vec(), dtype).unwrap();
            let errors = [&fast, &invariant].map(|cuda| {
                let [x, weight] = [&rows, &weight].map(|tensor| {
                    let values = tensor.values().unwrap().into_owned();
                    cuda.upload(Tensor::new(tensor.shape(), values, dtype).unwrap()).unwrap()
                });
                // The error of the sums, and with that of rounding.
                [DType::F32, dtype].map(|out| error(cuda.linear(&x, &weight, None, out).unwrap()))
            });
            println!("{dtype}, {m} rows: {errors:?}");
            let [[_, fast], [sums, invariant]] = errors;
            assert!(sums <= 1e-5 * size && invariant <= 1.01 * fast, "{dtype}, {m} rows: {errors:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn products_are_those_of_the_processor_within_the_rounding_of_the_type() {
    let (cuda, host) = (cuda(), Host::new(2));
    for (m, k, n) in [(1, 2048, 4096), (3, 515, 129), (33, 2048, 640), (200, 64, 48)] {
        for dtype in TYPES {
            let (x, gpu_x) = both(&cuda, || noise(&[m, k], 1, dtype));
            let (w, gpu_w) = both(&cuda, || noise(&[n, k], 2, dtype));
            for out in [DType::F32, dtype] {
                let want = host.linear(&x, &w, None, out).unwrap();
                let got = cuda.linear(&gpu_x, &gpu_w, None, out).unwrap();
                assert_near(&got, &want, (k as f32).sqrt(), &format!("{m} {k} {n} {dtype} to {out}"));
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_result_is_rounded_once_on_a_gpu_too() {
    let cuda = cuda();
    for m in [1, 2] {
        let up = |shape: &[usize], values: Vec<f32>, dtype| {
            cuda.upload(Tensor::new(shape, values, dtype).unwrap()).unwrap()
        };
        let x = up(&[m, 2], [256.0, 1.0].repeat(m), DType::BF16);
        let w = up(&[1, 2], vec![1.0, 1.0], DType::BF16);
        let bias = up(&[1], vec![1.0], DType::F32);
        // 256 + 1 rounds to 256 in bf16 and would stay there; 256 + 1 + 1 is representable.
        let y = cuda.linear(&x, &w, Some(&bias), DType::BF16).unwrap();
        assert_eq!(*y.values().unwrap(), vec![258.0; m]);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn embeddings_are_rows_of_the_table_and_zeros_for_other_tokens() {
    let (cuda, host) = (cuda(), Host::new(1));
    let rotary = Rotary::new(8, 1e4);
    let tokens = [40, 10, 9, 0, 17, 49, 50, u32::MAX];
    for stored in TYPES {
        for out in TYPES {
            for columns in [1, 7, 64, 520] {
                let (table, gpu_table) = both(&cuda, || noise(&[40, columns], 3, stored));
                let want = host
                    .embed(
                        &table,
                        10,
                        &host.batch(&tokens, &SlotMapping::from_position(0, tokens.len()), &rotary).unwrap(),
                        out,
                    )
                    .unwrap();
                let got = cuda
                    .embed(
                        &gpu_table,
                        10,
                        &cuda.batch(&tokens, &SlotMapping::from_position(0, tokens.len()), &rotary).unwrap(),
                        out,
                    )
                    .unwrap();
                assert_eq!(
                    got.values().unwrap(),
                    want.values().unwrap(),
                    "{stored} to {out}, {columns} columns"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn norms_gates_and_sums_are_those_of_the_processor() {
    let (cuda, host) = (cuda(), Host::new(1));
    for dtype in TYPES {
        for (rows, columns) in [(1, 2), (3, 6), (5, 36), (1, 4096), (7, 1000), (2, 14_336)] {
            let what = format!("{dtype} [{rows}, {columns}]");
            let (x, gpu_x) = both(&cuda, || noise(&[rows, columns], 1, dtype));
            let want = host.swiglu(&x).unwrap();
            assert_near(&cuda.swiglu(&gpu_x).unwrap(), &want, 1.0, &format!("swiglu {what}"));
            for other in TYPES {
                let (weight, gpu_weight) = both(&cuda, || noise(&[columns], 2, other));
                let want = host.rms_norm(&x, &weight, 1e-5).unwrap();
                let got = cuda.rms_norm(&gpu_x, &gpu_weight, 1e-5).unwrap();
                assert_near(&got, &want, 1.0, &format!("norm {what} by {other}"));
                for shape in [&[rows, columns][..], &[columns]] {
                    let (y, gpu_y) = both(&cuda, || noise(shape, 4, other));
                    let (mut sum, mut gpu_sum) = both(&cuda, || noise(&[rows, columns], 1, dtype));
                    host.add(&mut sum, &y).unwrap();
                    cuda.add(&mut gpu_sum, &gpu_y).unwrap();
                    assert_eq!(
                        gpu_sum.values().unwrap(),
                        sum.values().unwrap(),
                        "add {what} and {other} {shape:?}"
                    );
                    let (mut sum, mut gpu_sum) = both(&cuda, || noise(&[rows, columns], 1, dtype));
                    let want = host.add_norm(&mut sum, &y, &weight, 1e-5).unwrap();
                    let got = cuda.add_norm(&mut gpu_sum, &gpu_y, &gpu_weight, 1e-5).unwrap();
                    assert_near(&got, &want, 1.0, &format!("norm of a sum {what} and {other} {shape:?}"));
                    assert_eq!(
                        gpu_sum.values().unwrap(),
                        sum.values().unwrap(),
                        "{what} and {other} {shape:?}"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gated_products_are_those_of_the_processor() {
    let (cuda, host) = (cuda(), Host::new(1));
    for dtype in TYPES {
        for (rows, k, n) in [(1, 4096, 512), (1, 14_336, 6), (1, 7, 2), (1, 1000, 34), (3, 64, 10)] {
            let what = format!("{dtype} {rows} x {k} x {n}");
            let (x, gpu_x) = both(&cuda, || noise(&[rows, k], 1, dtype));
            let (weight, gpu_weight) = both(&cuda, || noise(&[n, k], 2, dtype));
            let (bias, gpu_bias) = both(&cuda, || noise(&[n], 3, DType::F32));
            for (bias, gpu_bias) in [(None, None), (Some(&bias), Some(&gpu_bias))] {
                let want = host.gated_linear(&x, &weight, bias).unwrap();
                let got = cuda.gated_linear(&gpu_x, &gpu_weight, gpu_bias).unwrap();
                // A product of k terms of about 1.
                let scale = (k as f32).sqrt()
                    * want.values().unwrap().iter().fold(1.0f32, |most, x| most.max(x.abs()));
                assert_near(&got, &want, scale, &what);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_product_reads_weights_after_the_kernel_that_writes_them() {
    let (cuda, host) = (cuda(), Host::new(1));
    let (added, gpu_added) = both(&cuda, || noise(&[2048, 4096], 3, DType::BF16));
    let (mut weight, mut gpu_weight) = both(&cuda, || noise(&[2048, 4096], 2, DType::BF16));
    for m in [1, 8, 32].repeat(8) {
        let (x, gpu_x) = both(&cuda, || noise(&[m, 4096], 1, DType::BF16));
        host.add(&mut weight, &added).unwrap();
        cuda.add(&mut gpu_weight, &gpu_added).unwrap();
        let want = host.linear(&x, &weight, None, DType::F32).unwrap();
        let got = cuda.linear(&gpu_x, &gpu_weight, None, DType::F32).unwrap();
        let scale = want.values().unwrap().iter().fold(64.0f32, |most, x| most.max(x.abs()));
        assert_near(&got, &want, scale, "weights that were written just before");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn columns_and_joined_blocks_are_those_of_the_processor() {
    let (cuda, host) = (cuda(), Host::new(1));
    for dtype in TYPES {
        let (x, gpu_x) = both(&cuda, || noise(&[5, 37], 1, dtype));
        for range in [0..37, 3..4, 9..37, 5..5] {
            let (want, got) = (
                host.slice_columns(&x, range.clone()).unwrap(),
                cuda.slice_columns(&gpu_x, range.clone()).unwrap(),
            );
            assert_eq!(
                (got.shape(), got.values().unwrap()),
                (want.shape(), want.values().unwrap()),
                "{dtype} {range:?}"
            );
        }
        for keep in [1, 20, 60, 64] {
            let (blocks, gpu_blocks) = both(&cuda, || noise(&[4, 3, 16], 2, dtype));
            let (want, got) =
                (host.concat_columns(blocks, keep).unwrap(), cuda.concat_columns(gpu_blocks, keep).unwrap());
            assert_eq!(
                (got.shape(), got.values().unwrap()),
                (want.shape(), want.values().unwrap()),
                "{dtype} {keep}"
            );
        }
    }
}

/// Attention over some passes in a row; what each gives, on the processor and on the GPU.
struct Attended {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    /// True if heads are normalised.
    norms: bool,
    passes: Vec<usize>,
}

fn attend(
    compute: &dyn Compute,
    case: &Attended,
    dtype: DType,
    upload: impl Fn(Tensor) -> Tensor,
) -> Vec<Tensor> {
    let &Attended { heads, kv_heads, head_dim, window, norms, .. } = case;
    let [queries, keys] = [3, 4].map(|seed| upload(noise(&[head_dim], seed, DType::F32)));
    let norms = norms.then_some(HeadNorms { queries: &queries, keys: &keys, epsilon: 1e-6 });
    let rotary = Rotary::new(head_dim, 1e4);
    let capacity = case.passes.iter().sum();
    let mut cache = LayerCache::new(compute, [1, kv_heads, capacity, head_dim], dtype).unwrap();
    let mut position = 0;
    let mut pass = |count: usize| {
        let qkv = upload(noise(&[count, (heads + 2 * kv_heads) * head_dim], position as u64 + 7, dtype));
        let batch =
            compute.batch(&vec![0; count], &SlotMapping::from_position(position, count), &rotary).unwrap();
        position += count;
        let call = AttentionCall { heads, kv_heads, head_dim, batch: &batch, window, norms };
        compute.attention(qkv, &call, &mut cache).unwrap()
    };
    case.passes.iter().map(|count| pass(*count)).collect()
}

/// Scores are large, so that a factor that should be 1 is not rounded to it.
#[test]
#[ignore = "needs a GPU"]
fn attention_with_invariant_numerics_has_the_same_bits_however_a_prompt_is_cut() {
    const POSITIONS: usize = 300;
    let cuda = cuda_with(Numerics::Invariant);
    for dtype in TYPES {
        for (heads, kv_heads, head_dim) in [(7, 1, 64), (8, 2, 128), (2, 2, 64), (4, 2, 16)] {
            let (width, rotary) = ((heads + 2 * kv_heads) * head_dim, Rotary::new(head_dim, 1e4));
            let values: Vec<f32> = noise(&[POSITIONS, width], 5, dtype)
                .values()
                .unwrap()
                .iter()
                .map(|value| value * 8.0)
                .collect();
            for window in [None, Some(100)] {
                let run = |passes: &[usize]| -> Vec<u32> {
                    let shape = [1, kv_heads, POSITIONS, head_dim];
                    let mut cache = LayerCache::new(&cuda, shape, dtype).unwrap();
                    let (mut position, mut seen) = (0, Vec::new());
                    for &count in passes {
                        let rows = values[position * width..(position + count) * width].to_vec();
                        let qkv = cuda.upload(Tensor::new(&[count, width], rows, dtype).unwrap()).unwrap();
                        let slots = SlotMapping::from_position(position, count);
                        let batch = cuda.batch(&vec![0; count], &slots, &rotary).unwrap();
                        let call =
                            AttentionCall { heads, kv_heads, head_dim, batch: &batch, window, norms: None };
                        let attended = cuda.attention(qkv, &call, &mut cache).unwrap();
                        seen.extend(attended.values().unwrap().iter().map(|value| value.to_bits()));
                        position += count;
                    }
                    seen
                };
                let whole = run(&[POSITIONS]);
                for passes in [vec![100, 200], [vec![7; 42], vec![6]].concat(), vec![1; POSITIONS]] {
                    let what = format!(
                        "{heads}/{kv_heads} of {head_dim}, {window:?}, {dtype}, {} passes",
                        passes.len()
                    );
                    assert!(run(&passes) == whole, "{what}");
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn attention_is_that_of_the_processor_for_prompts_and_single_tokens() {
    let (cuda, host) = (cuda(), Host::new(2));
    let long = |prompt: usize| {
        let mut passes = vec![prompt, 1, 1, 7];
        passes.extend([1; 3]);
        passes
    };
    for (heads, kv_heads, head_dim) in [
        (2, 2, 6),
        (4, 2, 8),
        (8, 1, 64),
        (7, 1, 64),
        (8, 2, 128),
        (16, 1, 128),
        (3, 1, 80),
        (4, 2, 256),
        (1, 1, 2),
    ] {
        for window in [None, Some(1), Some(5), Some(100)] {
            for prompt in [1, 2, 33, 300] {
                let norms = window == Some(5);
                let case = Attended { heads, kv_heads, head_dim, window, norms, passes: long(prompt) };
                for dtype in TYPES {
                    let want = attend(&host, &case, dtype, |t| t);
                    let got = attend(&cuda, &case, dtype, |t| cuda.upload(t).unwrap());
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        let what = format!(
                            "{heads}/{kv_heads} of {head_dim}, {window:?}, {prompt}, {dtype}, pass {i}"
                        );
                        assert_near(got, want, 1.0, &what);
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_token_behind_a_long_context_sees_all_of_it() {
    let (cuda, host) = (cuda(), Host::new(2));
    for dtype in TYPES {
        let case = Attended {
            heads: 8,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            norms: true,
            passes: vec![5000, 1, 1],
        };
        let want = attend(&host, &case, dtype, |t| t);
        let got = attend(&cuda, &case, dtype, |t| cuda.upload(t).unwrap());
        for (got, want) in got.iter().zip(&want) {
            assert_near(got, want, 1.0, &format!("{dtype}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn shapes_and_memories_that_do_not_fit_are_errors() {
    let cuda = cuda();
    let there = |shape: &[usize]| cuda.upload(noise(shape, 0, DType::F32)).unwrap();
    let (mut a, b) = (there(&[2, 3]), there(&[2, 4]));
    assert!(cuda.linear(&a, &b, None, DType::F32).is_err());
    assert!(cuda.add(&mut a, &b).is_err());
    assert!(cuda.rms_norm(&a, &b, 0.0).is_err());
    assert!(cuda.swiglu(&a).is_err());
    assert!(cuda.slice_columns(&a, 2..4).is_err());
    let here = noise(&[2, 4], 0, DType::F32);
    let error = cuda.swiglu(&here).unwrap_err().to_string();
    assert!(error.contains("not in the memory of GPU 0"), "{error}");
    let error = Host::new(1).swiglu(&b).unwrap_err().to_string();
    assert!(error.contains("in the memory of GPU 0"), "{error}");
}

// ---- whole models --------------------------------------------------------------------------------------------------

fn world_sizes(name: &str) -> Vec<usize> {
    let most = gpus().min(8);
    legal_world_sizes(&LlamaConfig::from_folder(&folder(name)).unwrap(), most, Numerics::Fast)
}

fn on_gpus<R: Send>(
    world_size: usize,
    job: impl Fn(&mut ryzanstein_process_group::ProcessGroup) -> R + Sync,
) -> Vec<R> {
    with_ranks(&config(BackendChoice::Nccl), world_size, |mut manager| {
        let result = job(manager.world());
        manager.finalize().unwrap();
        result
    })
}

#[track_caller]
fn near(got: &[f32], want: &[f32]) {
    let (difference, largest) = (distance(got, want), greatest(want));
    assert!(difference <= 1e-5 * largest, "{difference} of {largest}");
}

/// Logits of all positions at once; of the prompt and then token by token; and by a recorded graph.
fn logits(name: &str, dtype: Option<DType>, world_size: usize, expected: &Expected) -> [Vec<f32>; 3] {
    let mut all = on_gpus(world_size, |group| {
        let model = Arc::new(Llama::load(&folder(name), dtype, group).unwrap());
        let input = expected.input();
        let mut cache = model.cache(input.len()).unwrap();
        let at_once = model.forward(&input, &mut cache, group).unwrap().values().unwrap().into_owned();
        let (prompt, rest) = input.split_at(expected.prompt.len());
        let [eager, recorded] = [Passes::Eager, Passes::Graph].map(|passes| {
            let mut cache = model.cache(input.len()).unwrap();
            let mut values = model.forward(prompt, &mut cache, group).unwrap().values().unwrap().into_owned();
            let mut decoder = model.decoder(1, input.len(), passes).unwrap();
            let last = decoder.prefill(0, prompt, group).unwrap();
            let vocabulary = last.columns();
            // One row is a product of another kind than many.
            near(&last.values().unwrap(), &values[values.len() - vocabulary..]);
            for token in rest {
                values.extend_from_slice(&decoder.decode(&[(0, *token)], group).unwrap().values().unwrap());
            }
            values
        });
        [at_once, eager, recorded]
    });
    let first = all.remove(0);
    assert!(all.iter().all(|other| *other == first), "{name}, world {world_size}: ranks disagree");
    first
}

#[test]
#[ignore = "needs a GPU"]
fn f32_logits_on_gpus_equal_the_reference_at_every_position() {
    for name in fixtures().chain(rope_fixtures()) {
        let expected = Expected::read(name);
        for world_size in world_sizes(name) {
            let got = logits(name, Some(DType::F32), world_size, &expected);
            assert_eq!(
                got[1], got[2],
                "{name}, world {world_size}: a recorded pass differs from the eager one"
            );
            let stepwise = expected.stepwise.as_ref().unwrap_or(&expected.logits);
            for (got, want) in got.iter().zip([&expected.logits, stepwise, stepwise]) {
                assert_eq!(got.len(), want.len(), "{name}, world {world_size}");
                for (i, (got, want)) in got.iter().zip(want).enumerate() {
                    assert!(
                        (got - want).abs() <= 1e-4 + 1e-4 * want.abs(),
                        "{name}, world {world_size}, logit {i}: {got} and should be {want}"
                    );
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sixteen_bit_models_on_gpus_stay_near_the_f32_reference() {
    for name in fixtures() {
        let expected = Expected::read(name);
        let scale = greatest(&expected.logits);
        for dtype in [DType::F16, DType::BF16] {
            let got = logits(name, Some(dtype), 1, &expected);
            assert_eq!(got[1], got[2], "{name}, {dtype}: a recorded pass differs from the eager one");
            for got in got {
                let error = distance(&got, &expected.logits) / scale;
                println!("{name}, {dtype}: {error:.5} of the greatest logit");
                assert!(error <= 5e-2, "{name}, {dtype}: off by {error} of the greatest logit");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn greedy_decoding_on_gpus_gives_the_reference_tokens_recorded_or_not() {
    for name in fixtures() {
        let expected = Expected::read(name);
        let types =
            if expected.native.is_some() { vec![Some(DType::F32), None] } else { vec![Some(DType::F32)] };
        for world_size in world_sizes(name) {
            for dtype in &types {
                for passes in [Passes::Eager, Passes::Graph] {
                    let options = GenerateOptions {
                        max_new_tokens: expected.tokens.len(),
                        passes,
                        ..GenerateOptions::default()
                    };
                    for by_path in on_gpus(world_size, |group| {
                        let model = Llama::load(&folder(name), *dtype, group).unwrap();
                        // By the paths that the group chooses, with the norm in the kernel of the sum where it has that; and by
                        // each path that it has.
                        let forced: Vec<_> = group.paths().into_iter().map(Some).collect();
                        let paths = iter::once(None).chain(forced.into_iter().filter(|_| world_size > 1));
                        let generate = |path| {
                            group.force_path(path).unwrap();
                            (path, model.generate(&expected.prompt, &options, group).unwrap().tokens)
                        };
                        paths.map(generate).collect::<Vec<_>>()
                    }) {
                        for (path, tokens) in by_path {
                            assert_eq!(
                                tokens, expected.tokens,
                                "{name}, world {world_size}, {dtype:?}, {passes:?}, {path:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sequences_decoded_together_on_gpus_have_the_logits_of_the_reference() {
    for name in fixtures() {
        let expected = Expected::read(name);
        for world_size in world_sizes(name) {
            for all in on_gpus(world_size, |group| {
                let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
                [Passes::Eager, Passes::Graph].map(|passes| staggered(&model, &expected, passes, group))
            }) {
                assert!(
                    all[0] == all[1],
                    "{name}, world {world_size}: recorded passes differ from eager ones"
                );
                for (position, got) in &all[1] {
                    let want = &expected.logits[position * expected.vocabulary..][..expected.vocabulary];
                    for (got, want) in got.iter().zip(want) {
                        assert!(
                            (got - want).abs() <= 1e-4 + 1e-4 * want.abs(),
                            "{name}, world {world_size}, position {position}: {got} and should be {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn many_sequences_of_different_lengths_attend_to_their_own() {
    let (cuda, host) = (cuda(), Host::new(2));
    let (heads, kv_heads, head_dim) = (8, 2, 64);
    let rotary = Rotary::new(head_dim, 1e4);
    // Short ones of one split beside long ones of many.
    let lengths = [1, 700, 64, 2000, 3];
    for dtype in TYPES {
        let all = |compute: &dyn Compute, upload: &dyn Fn(Tensor) -> Tensor| {
            let mut cache =
                LayerCache::new(compute, [lengths.len(), kv_heads, 2002, head_dim], dtype).unwrap();
            let width = (heads + 2 * kv_heads) * head_dim;
            let mut pass = |slots: &SlotMapping, rows: usize, seed: usize| {
                let qkv = upload(noise(&[rows, width], seed as u64, dtype));
                let batch = compute.batch(&vec![0; rows], slots, &rotary).unwrap();
                let call =
                    AttentionCall { heads, kv_heads, head_dim, batch: &batch, window: None, norms: None };
                compute.attention(qkv, &call, &mut cache).unwrap()
            };
            for (sequence, length) in lengths.into_iter().enumerate() {
                pass(&Run { sequence, position: 0, tokens: length }.into(), length, sequence);
            }
            let mut all: Vec<_> = [[4, 0, 3, 1, 2], [0, 1, 2, 3, 4]]
                .into_iter()
                .enumerate()
                .map(|(round, order)| {
                    let slots = order.map(|sequence| (sequence, lengths[sequence] + round));
                    pass(&SlotMapping { single: slots.to_vec(), runs: vec![] }, lengths.len(), 50 + round)
                })
                .collect();
            // Some of them get one more token, others several, in one batch.
            let single = [3, 0].map(|sequence| (sequence, lengths[sequence]));
            let runs = [(1, 100), (4, 1), (2, 37)].map(|(sequence, tokens)| Run {
                sequence,
                position: lengths[sequence] + 2,
                tokens,
            });
            all.push(pass(
                &SlotMapping { single: single.to_vec(), runs: runs.to_vec() },
                2 + 100 + 1 + 37,
                60,
            ));
            all
        };
        let want = all(&host, &|t| t);
        let got = all(&cuda, &|t| cuda.upload(t).unwrap());
        for (got, want) in got.iter().zip(&want) {
            assert_near(got, want, 1.0, &format!("{dtype}"));
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn prompts_next_tokens_forks_and_truncated_sequences_in_one_pass_have_the_logits_of_the_reference_on_gpus() {
    for name in fixtures() {
        let expected = Expected::read(name);
        for world_size in world_sizes(name) {
            for all in on_gpus(world_size, |group| {
                let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
                [Passes::Eager, Passes::Graph].map(|passes| mixed(&model, &expected, passes, group))
            }) {
                for (position, got) in all.iter().flatten() {
                    let want = &expected.logits[position * expected.vocabulary..][..expected.vocabulary];
                    near(got, want);
                }
            }
        }
    }
}

/// What another thread enqueues while a pass is captured neither gets into the graph nor is lost.
#[test]
#[ignore = "needs a GPU"]
fn two_threads_share_a_model_while_each_records_its_passes() {
    let name = "llama-gqa";
    let expected = Expected::read(name);
    let input = expected.input();
    let row = |position: usize| &expected.logits[position * expected.vocabulary..][..expected.vocabulary];
    let libraries = libraries();
    let device = Device::open(&libraries, LocalRank(0), &DeviceConfig::default()).unwrap();
    let managers: Vec<_> = (0..2)
        .map(|_| {
            let ranks = MemoryRendezvous::new(1);
            ProcessGroupManager::initialize_on(&config(BackendChoice::Nccl), &ranks[0], &device).unwrap()
        })
        .collect();
    let mut managers = managers.into_iter();
    let mut first = managers.next().unwrap();
    let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), first.world()).unwrap());
    std::thread::scope(|scope| {
        for mut manager in std::iter::once(first).chain(managers) {
            let (model, input) = (Arc::clone(&model), &input);
            scope.spawn(move || {
                for _ in 0..20 {
                    let mut decoder = model.decoder(1, input.len(), Passes::Graph).unwrap();
                    decoder.prefill(0, &input[..1], manager.world()).unwrap();
                    for (position, token) in input.iter().enumerate().skip(1) {
                        let logits = decoder.decode(&[(0, *token)], manager.world()).unwrap();
                        near(&logits.values().unwrap(), row(position));
                    }
                }
                manager.finalize().unwrap();
            });
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn decoders_of_one_model_leave_each_others_results_alone() {
    let name = "llama-gqa";
    let expected = Expected::read(name);
    let input = expected.input();
    let row = |position: usize| &expected.logits[position * expected.vocabulary..][..expected.vocabulary];
    for world_size in world_sizes(name) {
        on_gpus(world_size, |group| {
            let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
            let (mut a, mut b) = (
                model.decoder(1, input.len(), Passes::Graph).unwrap(),
                model.decoder(1, input.len(), Passes::Graph).unwrap(),
            );
            let ahead = 4;
            a.prefill(0, &input[..ahead], group).unwrap();
            // From the third token on, the first decoder repeats a recorded pass.
            for token in &input[ahead..ahead + 3] {
                a.decode(&[(0, *token)], group).unwrap();
            }
            b.prefill(0, &input[..1], group).unwrap();
            for at in 1..input.len() - ahead - 3 {
                let of_b = b.decode(&[(0, input[at])], group).unwrap();
                let of_a = a.decode(&[(0, input[at + ahead + 2])], group).unwrap();
                near(&of_a.values().unwrap(), row(at + ahead + 2));
                near(&of_b.values().unwrap(), row(at));
            }
        });
    }
}

/// What loading has not compiled, a first request would have to, while the other ranks wait.
#[test]
#[ignore = "needs a GPU"]
fn a_request_to_a_model_finds_every_kernel_compiled_and_no_call_of_the_first_pass_recorded() {
    for dtype in TYPES {
        let cache = tempfile::tempdir().unwrap();
        let mut config = config(BackendChoice::Nccl);
        config.device.kernel_cache = Some(cache.path().to_owned());
        let kernels = || std::fs::read_dir(cache.path()).unwrap().count();
        with_ranks(&config, gpus().min(2), |mut manager| {
            let group = manager.world();
            let model = Llama::load(&folder("llama-gqa"), Some(dtype), group).unwrap();
            assert_eq!(group.profile().calls("all_reduce"), 0);
            group.barrier().unwrap();
            let before = kernels();
            assert!(before > 0);
            let options = GenerateOptions { max_new_tokens: 5, ..GenerateOptions::default() };
            model.generate(&[1, 2, 3, 4, 5, 6, 7], &options, group).unwrap();
            group.barrier().unwrap();
            assert_eq!(kernels(), before, "{dtype}");
            manager.finalize().unwrap();
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_model_that_only_one_rank_can_read_is_the_same_on_all_gpus() {
    let name = "llama-gqa";
    let expected = Expected::read(name);
    let world_size = *world_sizes(name).last().unwrap();
    let root = ryzanstein_process_group::Rank(world_size as u32 - 1);
    on_gpus(world_size, |group| {
        let directory = (group.rank() == root).then(|| folder(name));
        let model = Llama::load_from_root(directory.as_deref(), Some(DType::F32), root, group).unwrap();
        let input = expected.input();
        let mut cache = model.cache(input.len()).unwrap();
        let got = model.forward(&input, &mut cache, group).unwrap();
        assert_eq!(got.count(), expected.logits.len());
        for (got, want) in got.values().unwrap().iter().zip(&expected.logits) {
            assert!((got - want).abs() <= 1e-4 + 1e-4 * want.abs(), "{got} and should be {want}");
        }
    });
}

#[test]
#[ignore = "needs a GPU"]
fn what_a_model_held_on_a_gpu_is_given_back() {
    let held = on_gpus(1, |group| {
        let device = group.device().unwrap().clone();
        let before = device.budget().0;
        let model = Llama::load(&folder("llama-mha"), None, group).unwrap();
        let options = GenerateOptions { max_new_tokens: 20, ..GenerateOptions::default() };
        model.generate(&[1, 2, 3], &options, group).unwrap();
        assert!(device.budget().0 > before);
        drop(model);
        device.budget().0 - before
    });
    assert_eq!(held, [0]);
}
