//! Products with weights on a GPU.

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;
use ryzanstein_tensor_parallel::{Compute, Host, Tensor};

use super::*;

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
        (5, 136, 36_000),
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
    let columns = |x: &Tensor, range| cuda.select_columns(x, range).unwrap();
    for dtype in TYPES {
        // Two lengths: one of 67 vectors a leaf, and one that no copy can start at. The last shape gives blocks several tiles,
        // and tiles several blocks.
        for (k, n) in [(8 * 536, 384), (8 * 31, 70), (8 * 16, 4040)] {
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
                for count in [3, 5, 6, 7] {
                    let [all, some] = [&whole, &x].map(|x| {
                        sum(&columns(x, 0..count * k / 8), &leaves(0, count), count)
                            .values()
                            .unwrap()
                            .into_owned()
                    });
                    assert!(some[..] == all[..m * n], "{dtype}, {m} rows of {count} leaves");
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
            let [[fast_sums, fast], [sums, invariant]] = errors;
            assert!(
                fast_sums.max(sums) <= 1e-5 * size && invariant <= 1.01 * fast,
                "{dtype}, {m} rows: {errors:?}"
            );
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gated_products_are_those_of_the_processor() {
    let (cuda, host) = (cuda(), Host::new(1));
    for dtype in TYPES {
        for (rows, k, n) in [
            (1, 4096, 512),
            (1, 14_336, 6),
            (1, 7, 2),
            (1, 1000, 34),
            (3, 64, 10),
            (8, 4096, 512),
            (32, 2048, 600),
        ] {
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
        // One launch right after the other.
        cuda.add(&mut gpu_weight, &gpu_added).unwrap();
        let got = cuda.linear(&gpu_x, &gpu_weight, None, DType::F32).unwrap();
        host.add(&mut weight, &added).unwrap();
        let want = host.linear(&x, &weight, None, DType::F32).unwrap();
        let scale = want.values().unwrap().iter().fold(64.0f32, |most, x| most.max(x.abs()));
        assert_near(&got, &want, scale, "weights that were written just before");
    }
}
