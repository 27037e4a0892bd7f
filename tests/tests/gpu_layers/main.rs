//! Every operation on a GPU against the same on the processor, and what whole models do there. Run with `--ignored` where there is
//! a GPU.

mod attention;
mod models;
mod products;

use ryzanstein_config::{DeviceConfig, Numerics};
use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{DType, LocalRank};
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{CHOSEN, PAGE_SIZE, SlotMapping};
use ryzanstein_tensor_parallel::{Compute, Cuda, Host, Tensor};
use ryzanstein_tests::gpu::libraries;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

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

/// Returns the tolerance of two computations of one result, where each rounds once: `f32` sums differ by their order.
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

/// Returns, of each row of candidates, the logit and the token that it chooses: the greatest, NaN before all, the lowest of a tie.
fn chosen(candidates: &Tensor) -> Vec<(u32, f32)> {
    let values = candidates.values().unwrap();
    let of_row = |row: &[f32]| {
        let better = |a: &[f32], b: &[f32]| b[0] > a[0] || (b[0].is_nan() && !a[0].is_nan());
        let best = row.chunks_exact(2).reduce(|a, b| if better(a, b) { b } else { a }).unwrap();
        // Zeros of both signs are equal, and so is every NaN.
        (best[1] as u32, if best[0].is_nan() { f32::NAN } else { best[0] + 0.0 })
    };
    values.chunks_exact(candidates.columns()).map(of_row).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn tokens_are_chosen_as_on_the_processor_and_embedded_right_after() {
    let (cuda, host) = (cuda(), Host::new(1));
    let rotary = Rotary::new(4, 10_000.0);
    for (width, tokens) in [
        (1, 0..1),
        (64, 36..100),
        (2047, 0..2047),
        (2048, 5..2053),
        (2049, 0..2049),
        (6000, 0..4096),
        (6000, 90..90),
        (128_256, 7..128_200),
    ] {
        let rows = 6;
        let mut values = whole(&[rows, width], width, DType::F32).values().unwrap().into_owned();
        let mut set = |row: usize, at: usize, value: f32| values[row * width + at % width] = value;
        // Ties across parts, what is no number, zeros of both signs, and greater values behind the tokens.
        for at in [3, 2050, 4500] {
            set(1, at, 9.0);
        }
        for at in [70, 4099] {
            set(2, at, f32::NAN);
        }
        for at in 0..width {
            set(3, at, if at.is_multiple_of(3) { -0.0 } else { 0.0 });
            set(5, at, f32::NEG_INFINITY);
        }
        set(4, 2100, f32::INFINITY);
        for row in values.chunks_exact_mut(width) {
            row[tokens.len()..].fill(1e9);
        }
        let (x, gpu_x) = both(&cuda, || Tensor::new(&[rows, width], values.clone(), DType::F32).unwrap());
        let want = chosen(&host.argmax(&x, tokens.clone()).unwrap());
        let candidates = cuda.argmax(&gpu_x, tokens.clone()).unwrap();
        let got = chosen(&candidates);
        for (row, (got, want)) in got.iter().zip(&want).enumerate() {
            let same = got.1 == want.1 || (got.1.is_nan() && want.1.is_nan());
            // Without tokens, or a logit above negative infinity, any token is right.
            let any = want.1 == f32::NEG_INFINITY;
            assert!(
                same && (any || got.0 == want.0),
                "{width}, {tokens:?}, row {row}: {got:?} and not {want:?}"
            );
        }
        if tokens.is_empty() {
            continue;
        }
        // The last rows first, and a token that the host knows between them.
        let ids = [CHOSEN | 4, CHOSEN | 2, tokens.start as u32, CHOSEN, CHOSEN | 1];
        let mut slots = SlotMapping::new(5 * PAGE_SIZE);
        (0..5).for_each(|page| slots.push(&[page], 0, 1));
        let expected: Vec<u32> = [4, 2].iter().map(|row| want[*row].0).collect();
        let expected = [&expected[..], &[tokens.start as u32, want[0].0, want[1].0]].concat();
        let (table, gpu_table) = both(&cuda, || noise(&[tokens.end, 8], 3, DType::F32));
        for _ in 0..8 {
            let mut batch = cuda.batch(&ids, &slots, &rotary).unwrap();
            cuda.choose_tokens(&mut batch, &candidates).unwrap();
            let got = cuda.embed(&gpu_table, 0, &batch, DType::F32).unwrap();
            let host_batch = host.batch(&expected, &slots, &rotary).unwrap();
            let want = host.embed(&table, 0, &host_batch, DType::F32).unwrap();
            assert_eq!(got.values().unwrap(), want.values().unwrap(), "{width}, {tokens:?}");
        }
        let mut batch = cuda.batch(&[CHOSEN | 6], &SlotMapping::from_position(0, 1), &rotary).unwrap();
        let refused = cuda.choose_tokens(&mut batch, &candidates).unwrap_err().to_string();
        assert!(refused.contains("do not have the rows"), "{refused}");
        for shape in [&[rows * 2][..], &[rows, 3], &[rows, 0]] {
            let odd = cuda.upload(Tensor::zeros(shape, DType::F32).unwrap()).unwrap();
            assert!(cuda.choose_tokens(&mut batch, &odd).is_err(), "{shape:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_norm_reads_its_weight_after_the_kernel_that_writes_it() {
    let (cuda, host) = (cuda(), Host::new(1));
    let (one, gpu_one) = both(&cuda, || Tensor::new(&[4096], vec![1.0; 4096], DType::F32).unwrap());
    let (mut weight, mut gpu_weight) = both(&cuda, || noise(&[4096], 2, DType::F32));
    for _ in 0..8 {
        let (mut x, mut gpu_x) = both(&cuda, || noise(&[8, 4096], 1, DType::BF16));
        let (y, gpu_y) = both(&cuda, || noise(&[8, 4096], 4, DType::BF16));
        for is_sum in [false, true] {
            // One launch right after the other.
            cuda.add(&mut gpu_weight, &gpu_one).unwrap();
            let got = if is_sum {
                cuda.add_norm(&mut gpu_x, &gpu_y, &gpu_weight, 1e-5)
            } else {
                cuda.rms_norm(&gpu_x, &gpu_weight, 1e-5)
            };
            host.add(&mut weight, &one).unwrap();
            let want = if is_sum {
                host.add_norm(&mut x, &y, &weight, 1e-5)
            } else {
                host.rms_norm(&x, &weight, 1e-5)
            };
            assert_near(&got.unwrap(), &want.unwrap(), 1.0, "a weight that was written just before");
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
fn columns_of_blocks_are_those_of_the_processor() {
    let (cuda, host) = (cuda(), Host::new(1));
    for dtype in TYPES {
        for (shape, ranges) in
            [(&[5, 37][..], [0..37, 3..4, 9..37, 5..5]), (&[4, 3, 16], [0..1, 0..20, 15..50, 0..64])]
        {
            let (blocks, gpu_blocks) = both(&cuda, || noise(shape, 1, dtype));
            for range in ranges {
                let want = host.select_columns(&blocks, range.clone()).unwrap();
                let got = cuda.select_columns(&gpu_blocks, range.clone()).unwrap();
                assert_eq!(
                    (got.shape(), got.values().unwrap()),
                    (want.shape(), want.values().unwrap()),
                    "{dtype} {shape:?} {range:?}"
                );
            }
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
    assert!(cuda.select_columns(&a, 2..4).is_err());
    // One row, but a matrix: only a vector is added to every row.
    let half = there(&[1, 3]);
    assert!(cuda.add(&mut a, &half).is_err());
    let weight = there(&[3]);
    assert!(cuda.add_norm(&mut a, &half, &weight, 0.0).is_err());
    let here = noise(&[2, 4], 0, DType::F32);
    let error = cuda.swiglu(&here).unwrap_err().to_string();
    assert!(error.contains("not in the memory of GPU 0"), "{error}");
    let error = Host::new(1).swiglu(&b).unwrap_err().to_string();
    assert!(error.contains("in the memory of GPU 0"), "{error}");
}
