use proptest::prelude::*;
use ryzanstein_process_group::DType;

use super::*;

/// Returns values of about 1 that use all bits of their type, different for every seed.
fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Returns the maximum error of a product, in units of the expected rounding error of its f32 additions.
fn error(set: InstructionSet, threads: usize, dtypes: [DType; 2], [m, k, n]: [usize; 3]) -> f64 {
    let stored = |count, seed, dtype| Storage::rounded(values(count, seed), dtype).unwrap();
    let (x, w) = (stored(m * k, 1, dtypes[0]), stored(n * k, 2, dtypes[1]));
    let threads = Threads::new(threads, "test");
    let got = Products::new(set).multiply::<f32>(&threads, (&[&x], &w), None, [m, k, n]);
    let (x, w) = (x.widened(), w.widened());
    let mut largest = 0.0f64;
    for (r, row) in got.chunks_exact(n).enumerate() {
        for (i, got) in row.iter().enumerate() {
            let terms =
                x[r * k..][..k].iter().zip(&w[i * k..][..k]).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let unit = size * f64::from(f32::EPSILON) * (k as f64).sqrt().max(1.0);
            largest = largest.max((sum - f64::from(*got)).abs() / unit.max(f64::MIN_POSITIVE));
        }
    }
    largest
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_instruction_set_has_the_sums_of_f64_but_for_rounding(
        m in 1usize..70, k in 1usize..1300, n in 1usize..140, threads in 1usize..4,
    ) {
        for set in instruction_set::supported() {
            for dtypes in [[DType::BF16; 2], [DType::F32, DType::BF16], [DType::F16; 2], [DType::F32, DType::F16], [DType::F32; 2]] {
                // Tiles are 32 deep.
                for k in [k, k.next_multiple_of(32)] {
                    let error = error(set, threads, dtypes, [m, k, n]);
                    prop_assert!(error < 2.0, "{set}, {dtypes:?}, {m} x {k} x {n}, {threads} threads: {error}");
                }
            }
        }
    }
}

#[test]
fn products_of_whole_numbers_are_exact_over_several_blocks_and_threads() {
    for [m, k, n] in [[1, 512, 1024], [3, 512, 1024], [40, 600, 1000], [40, 608, 1000]] {
        let whole = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 7 + i / 5 + seed) % 9) as f32 - 4.0).collect()
        };
        let (x, w, bias) = (whole(m * k, 1), whole(n * k, 2), whole(n, 3));
        let sum = |r: usize, i: usize| -> f32 {
            x[r * k..][..k].iter().zip(&w[i * k..][..k]).map(|(x, w)| x * w).sum()
        };
        let want: Vec<f32> = (0..m * n).map(|at| sum(at / n, at % n) + bias[at % n]).collect();
        let stored = |dtype| [&x, &w].map(|values| Storage::rounded(values.clone(), dtype).unwrap());
        let [f32s, f16s, bf16s] = [DType::F32, DType::F16, DType::BF16].map(stored);
        for set in instruction_set::supported() {
            let (products, threads) = (Products::new(set), Threads::new(2, "test"));
            for (xs, ws) in
                [(&bf16s, &bf16s), (&f32s, &bf16s), (&f16s, &f16s), (&f32s, &f16s), (&f32s, &f32s)]
            {
                let operands = (&[&xs[0]][..], &ws[1]);
                let got = products.multiply::<f32>(&threads, operands, Some(&bias), [m, k, n]);
                assert!(*got == want, "{set}, {} by {}, {m} x {k} x {n}", xs[0].dtype(), ws[1].dtype());
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_rows_are_beside_it() {
    // With 300 rows, tiles take the depth in parts.
    for ([m, k, n], leaves, every) in
        [([21, 608, 77], 1, 1), ([300, 608, 40], 1, 97), ([300, 544, 40], 2, 97)]
    {
        for set in instruction_set::supported() {
            for dtype in [DType::BF16, DType::F32] {
                let w = Storage::rounded(values(leaves * n * k, 2), dtype).unwrap();
                let all: Vec<_> = (0..leaves as u64).map(|leaf| values(m * k, 3 + leaf)).collect();
                let product = |rows: Range<usize>, threads| {
                    let part = |x: &Vec<f32>| {
                        Storage::rounded(x[rows.start * k..rows.end * k].to_vec(), dtype).unwrap()
                    };
                    let xs: Vec<_> = all.iter().map(part).collect();
                    let xs: Vec<_> = xs.iter().collect();
                    let threads = Threads::new(threads, "test");
                    Products::new(set).multiply::<f32>(&threads, (&xs, &w), None, [rows.len(), k, n])
                };
                let together = product(0..m, 2);
                for (row, together) in together.chunks_exact(n).enumerate().step_by(every) {
                    assert!(*product(row..row + 1, 1) == *together, "{set}, {dtype}, row {row} of {m}");
                }
            }
        }
    }
}

#[test]
fn not_a_number_and_infinity_arrive_in_their_sums_only() {
    let [k, n] = [96, 35];
    for (set, m) in instruction_set::supported().into_iter().flat_map(|set| [(set, 5), (set, 21)]) {
        let mut w = vec![1.0; n * k];
        (w[k + 3], w[4 * k + 95]) = (f32::NAN, f32::INFINITY);
        let (x, w) = (vec![1.0; m * k], Storage::rounded(w, DType::BF16).unwrap());
        let x = Storage::rounded(x, DType::BF16).unwrap();
        let threads = Threads::new(2, "test");
        let out = Products::new(set).multiply::<f32>(&threads, (&[&x], &w), None, [m, k, n]);
        for row in out.chunks_exact(n) {
            assert!(row[1].is_nan() && row[4] == f32::INFINITY, "{set}, {m} rows");
            assert!(row.iter().enumerate().all(|(i, sum)| [1, 4].contains(&i) || *sum == k as f32), "{set}");
        }
    }
}

#[test]
fn empty_products_are_zeros_and_the_bias() {
    for shape @ [m, k, n] in [[0, 3, 2], [2, 0, 3], [2, 3, 0]] {
        let stored = |count| Storage::zeros(count, DType::BF16).unwrap();
        let threads = Threads::new(1, "test");
        let products = Products::new(instruction_set::current());
        let sums = products.multiply::<f32>(&threads, (&[&stored(m * k)], &stored(n * k)), None, shape);
        assert_eq!(*sums, vec![0.0; m * n]);
        let bias: Vec<f32> = values(n, 3);
        let sums =
            products.multiply::<f32>(&threads, (&[&stored(m * k)], &stored(n * k)), Some(&bias), shape);
        assert_eq!(*sums, bias.repeat(m));
    }
}
