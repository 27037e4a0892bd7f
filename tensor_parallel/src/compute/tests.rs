use ryzanstein_process_group::DType;

use super::*;
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// Returns small integers, different for every seed: their products and sums are exact in any order.
fn whole(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let count = shape.iter().product();
    let value = |i: usize| ((i * 7 + seed * 13 + i / 5) % 9) as f32 - 4.0;
    Tensor::new(shape, (0..count).map(value).collect(), dtype).unwrap()
}

#[test]
fn a_result_is_rounded_once() {
    let x = Tensor::new(&[1, 2], vec![256.0, 1.0], DType::BF16).unwrap();
    let w = Tensor::new(&[1, 2], vec![1.0, 1.0], DType::BF16).unwrap();
    let bias = Tensor::new(&[1], vec![1.0], DType::F32).unwrap();
    // 256 + 1 rounds to 256 in bf16 and would stay there; 256 + 1 + 1 is representable.
    let y = Host::new(1).linear(&x, &w, Some(&bias), DType::BF16).unwrap();
    assert_eq!(*y.values().unwrap(), [258.0]);
}

#[test]
fn rms_norm_and_swiglu_are_what_their_formulas_say() {
    let host = Host::new(1);
    let x = Tensor::new(&[2, 2], vec![3.0, 4.0, -1.0, 1.0], DType::F32).unwrap();
    let weight = Tensor::new(&[2], vec![1.0, 2.0], DType::F32).unwrap();
    let y = host.rms_norm(&x, &weight, 0.0).unwrap();
    let root = 12.5f32.sqrt();
    for (got, want) in y.values().unwrap().iter().zip([3.0 / root, 8.0 / root, -1.0, 2.0]) {
        assert!((got - want).abs() < 1e-6);
    }
    let y = host.swiglu(&x).unwrap();
    let silu = |x: f32| x / (1.0 + (-x).exp());
    assert_eq!(*y.values().unwrap(), [silu(3.0) * 4.0, silu(-1.0)]);
}

#[test]
fn embedding_gives_zeros_for_what_it_does_not_hold() {
    let table = whole(&[2, 3], 1, DType::BF16);
    let host = Host::new(1);
    let batch = host.batch(&[4, 3, 6, 5], &SlotMapping::from_position(0, 4), &Rotary::new(2, 1e4)).unwrap();
    let y = host.embed(&table, 4, &batch, DType::F32).unwrap();
    let values = table.values().unwrap();
    assert_eq!(y.values().unwrap()[..3], values[..3]);
    assert_eq!(y.values().unwrap()[3..9], [0.0; 6]);
    assert_eq!(y.values().unwrap()[9..], values[3..]);
}

#[test]
fn blocks_are_joined_side_by_side_without_the_padding() {
    let blocks = Tensor::new(&[2, 2, 3], (0..12u8).map(f32::from).collect(), DType::F32).unwrap();
    let joined = Host::new(1).select_columns(&blocks, 0..5).unwrap();
    assert_eq!(joined.shape(), [2, 5]);
    assert_eq!(*joined.values().unwrap(), [0.0, 1.0, 2.0, 6.0, 7.0, 3.0, 4.0, 5.0, 9.0, 10.0]);
    let middle = Host::new(1).select_columns(&blocks, 1..4).unwrap();
    assert_eq!(*middle.values().unwrap(), [1.0, 2.0, 6.0, 4.0, 5.0, 9.0]);
}

/// Computes the attention of all positions at once.
fn attend(qkv: &Tensor, window: Option<usize>, steps: &[usize], threads: usize) -> Vec<f32> {
    let rotary = Rotary::new(4, 10_000.0);
    let host = Host::new(threads);
    let mut cache = LayerCache::new(&host, [1, 1, 4], DType::F32).unwrap();
    let mut out = Vec::new();
    let mut position = 0;
    for count in steps {
        let rows = qkv.values().unwrap()[position * 16..(position + count) * 16].to_vec();
        let rows = Tensor::new(&[*count, 16], rows, DType::F32).unwrap();
        let batch =
            host.batch(&vec![0; *count], &SlotMapping::from_position(position, *count), &rotary).unwrap();
        let call = AttentionCall { heads: 2, kv_heads: 1, head_dim: 4, batch: &batch, window, norms: None };
        out.extend_from_slice(&host.attention(rows, &call, &mut cache).unwrap().values().unwrap());
        position += count;
    }
    out
}

#[test]
fn attention_is_the_same_at_once_in_pieces_and_on_threads() {
    let qkv = whole(&[64, 16], 5, DType::F32);
    for window in [None, Some(3)] {
        let at_once = attend(&qkv, window, &[64], 1);
        let mut pieces = vec![10, 1, 1, 20];
        pieces.extend([1; 32]);
        assert_eq!(at_once, attend(&qkv, window, &pieces, 1));
        assert_eq!(at_once, attend(&qkv, window, &[64], 2));
    }
}

/// Returns the slots of sequences of one page, each given as page, position and tokens.
fn slots(runs: &[(u32, usize, usize)]) -> SlotMapping {
    let mut slots = SlotMapping::new(PAGE_SIZE);
    for &(page, position, tokens) in runs {
        slots.push(&[page], position, tokens);
    }
    slots
}

#[test]
fn single_tokens_and_runs_of_several_sequences_attend_at_once_as_one_after_another() {
    let rotary = Rotary::new(4, 10_000.0);
    let host = Host::new(2);
    let pass = |cache: &mut LayerCache, slots: SlotMapping, seeds: &[usize]| {
        let rows: Vec<f32> =
            seeds.iter().flat_map(|s| whole(&[16], *s, DType::F32).values().unwrap().into_owned()).collect();
        let rows = Tensor::new(&[seeds.len(), 16], rows, DType::F32).unwrap();
        let batch = host.batch(&vec![0; seeds.len()], &slots, &rotary).unwrap();
        let call =
            AttentionCall { heads: 2, kv_heads: 1, head_dim: 4, batch: &batch, window: None, norms: None };
        host.attention(rows, &call, cache).unwrap().values().unwrap().into_owned()
    };
    let mut caches = [(); 2].map(|()| LayerCache::new(&host, [4, 1, 4], DType::F32).unwrap());
    for cache in &mut caches {
        pass(cache, slots(&[(2, 0, 3)]), &[1, 2, 3]);
    }
    let [one, other] = &mut caches;
    let all = slots(&[(0, 0, 1), (3, 0, 1), (2, 3, 2), (1, 0, 3)]);
    let parts: Vec<_> = all.parts().into_iter().map(|part| (part.rows, part.runs)).collect();
    assert_eq!(parts, [(0..2, 0..2), (2..4, 2..3), (4..7, 3..4)]);
    let at_once = pass(one, all, &[4, 10, 5, 6, 7, 8, 9]);
    let mut apart = Vec::new();
    for (page, position, seeds) in [(0, 0, &[4][..]), (3, 0, &[10]), (2, 3, &[5, 6]), (1, 0, &[7, 8, 9])] {
        apart.extend(pass(other, slots(&[(page, position, seeds.len())]), seeds));
    }
    assert_eq!(at_once, apart);
}

#[test]
fn a_window_of_one_sees_only_itself_and_a_large_one_is_no_window() {
    let qkv = whole(&[8, 16], 5, DType::F32);
    let own = attend(&qkv, Some(1), &[8], 1);
    for (row, out) in qkv.values().unwrap().chunks_exact(16).zip(own.chunks_exact(8)) {
        assert_eq!(out, [&row[12..], &row[12..]].concat());
    }
    assert_eq!(attend(&qkv, Some(8), &[8], 1), attend(&qkv, None, &[8], 1));
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    let host = Host::new(1);
    let (a, b) = (whole(&[2, 3], 0, DType::F32), whole(&[2, 4], 0, DType::F32));
    assert!(host.linear(&a, &b, None, DType::F32).is_err());
    assert!(host.linear(&a, &a, Some(&b), DType::F32).is_err());
    assert!(host.add(&mut whole(&[2, 3], 0, DType::F32), &b).is_err());
    assert!(host.rms_norm(&a, &b, 0.0).is_err());
    assert!(host.swiglu(&a).is_err());
    assert!(host.select_columns(&a, 2..4).is_err());
    assert!(host.select_columns(&whole(&[2, 2, 3], 0, DType::F32), 5..7).is_err());
    assert!(host.select_columns(&whole(&[6], 0, DType::F32), 0..1).is_err());
}

#[test]
fn an_array_that_no_memory_holds_is_an_error_and_no_end() {
    let host = Host::new(1);
    // More elements than addresses, and more bytes than can be counted.
    for shape in [vec![1 << 23, 1 << 20, 8], vec![usize::MAX, 2]] {
        let error = host.zeros(&shape, DType::F32).unwrap_err().to_string();
        assert!(
            error.contains("no memory for an array of shape") && error.contains("--max-new-tokens"),
            "{error}"
        );
    }
    assert_eq!(host.zeros(&[2, 3], DType::F32).unwrap().count(), 6);
}

#[test]
fn pages_are_copied_within_their_cache_alone() {
    let host = Host::new(1);
    let mut cache = LayerCache::new(&host, [3, 2, 4], DType::F32).unwrap();
    let rotary = Rotary::new(4, 1e4);
    let batch = host.batch(&[0], &SlotMapping::from_position(0, 1), &rotary).unwrap();
    let call = AttentionCall { heads: 2, kv_heads: 2, head_dim: 4, batch: &batch, window: None, norms: None };
    host.attention(whole(&[1, 24], 1, DType::F32), &call, &mut cache).unwrap();
    let page = |cache: &LayerCache, page: usize| {
        let length = 2 * PAGE_SIZE * 4;
        [&cache.keys, &cache.values]
            .map(|all| all.values().unwrap()[page * length..(page + 1) * length].to_vec())
    };
    let first = page(&cache, 0);
    assert_ne!(first, page(&cache, 2));
    cache.copy_page(0, 2).unwrap();
    cache.copy_page(1, 1).unwrap();
    assert_eq!([0, 2].map(|at| page(&cache, at)), [first.clone(), first]);
    for (from, to) in [(0, 3), (3, 0), (u32::MAX, 0), (3, 3)] {
        assert!(cache.copy_page(from, to).is_err(), "{from} to {to}");
    }
}

#[test]
fn heads_and_slots_that_the_cache_does_not_have_are_refused_even_where_their_products_overflow() {
    let host = Host::new(1);
    let rotary = Rotary::new(4, 1e4);
    let mut cache = LayerCache::new(&host, [2, 1, 4], DType::F32).unwrap();
    let mut attend = |heads, kv_heads, slots: SlotMapping| {
        let batch = host.batch(&[0, 0], &slots, &rotary)?;
        let call = AttentionCall { heads, kv_heads, head_dim: 4, batch: &batch, window: None, norms: None };
        host.attention(whole(&[2, 16], 1, DType::F32), &call, &mut cache).map(|_| ())
    };
    attend(2, 1, SlotMapping::from_position(0, 2)).unwrap();
    // 4 × (2⁶² + 4) is 16 in 64 bits.
    for (heads, kv_heads) in [((1 << 62) + 2, 1), (usize::MAX, 1), (2, usize::MAX), (0, 1), (2, 0), (4, 1)] {
        let refused = attend(heads, kv_heads, SlotMapping::from_position(0, 2)).unwrap_err().to_string();
        assert!(refused.contains("do not fit the batch or a cache"), "{heads}/{kv_heads}: {refused}");
    }
    let of_one_page = |capacity, position| {
        let mut slots = SlotMapping::new(capacity);
        slots.push(&[0], position, 2);
        slots
    };
    for slots in [
        SlotMapping::from_position(2 * PAGE_SIZE - 1, 2),
        SlotMapping::from_position(usize::MAX, 2),
        SlotMapping::from_position(0, 1),
        slots(&[(2, 0, 2)]),
        slots(&[(0, 0, 1), (2, 0, 1)]),
        slots(&[(0, PAGE_SIZE, 1), (1, 0, 1)]),
        slots(&[(0, usize::MAX, 1), (1, 0, 1)]),
        slots(&[(0, 0, 1)]),
        slots(&[(0, 0, 2), (1, 0, 0)]),
        slots(&[(0, 0, 1), (0, 1, 1)]),
        slots(&[(1, PAGE_SIZE - 1, 2)]),
        slots(&[(0, 0, 1), (1, 0, usize::MAX)]),
        of_one_page(1, 0),
        of_one_page(usize::MAX, 0),
        of_one_page(2 * PAGE_SIZE, PAGE_SIZE),
    ] {
        assert!(attend(2, 1, slots.clone()).is_err(), "{slots:?}");
    }
}

/// Computes attention in f64, over all positions at once: `[position, head, element]`.
fn reference(qkv: &[f32], [rows, heads, kv_heads, head_dim]: [usize; 4], window: Option<usize>) -> Vec<f64> {
    let width = (heads + 2 * kv_heads) * head_dim;
    let rotary = Rotary::new(head_dim, 10_000.0);
    let table = rotary.table((0..rows).map(|at| (at, rows)));
    let mut qkv = qkv.to_vec();
    for (i, row) in qkv.chunks_exact_mut(width).enumerate() {
        let (rotated, _) = row.split_at_mut((heads + kv_heads) * head_dim);
        rotated.chunks_exact_mut(head_dim).for_each(|head| table.rotate(i, head));
    }
    let head = |row: usize, head: usize| &qkv[row * width + head * head_dim..][..head_dim];
    let mut out = Vec::new();
    for row in 0..rows {
        for query in 0..heads {
            let kv = query / (heads / kv_heads);
            let seen = window.map_or(0, |w| (row + 1).saturating_sub(w))..row + 1;
            let scores: Vec<f64> = seen
                .clone()
                .map(|at| {
                    let pairs = head(row, query).iter().zip(head(at, heads + kv));
                    pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (head_dim as f64).sqrt()
                })
                .collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
            out.extend((0..head_dim).map(|i| {
                let values = seen.clone().map(|at| f64::from(head(at, heads + kv_heads + kv)[i]));
                values
                    .zip(&scores)
                    .map(|(value, score)| value * (score - greatest).exp() / total)
                    .sum::<f64>()
            }));
        }
    }
    out
}

#[test]
fn attention_over_several_blocks_is_that_of_f64_on_every_instruction_set() {
    let (rows, heads, kv_heads) = (201, 6, 2);
    for (head_dim, window) in [(64, None), (20, None), (32, Some(70))] {
        let width = (heads + 2 * kv_heads) * head_dim;
        let values: Vec<f32> =
            (0..rows * width).map(|i| ((i * 7919 + i / 31) % 1009) as f32 / 200.0 - 2.5).collect();
        let want = reference(&values, [rows, heads, kv_heads, head_dim], window);
        // Keys and values in bf16 are rounded, and so are queries and weights if the processor has tiles.
        let cases = [(DType::F32, 2e-5), (DType::BF16, 0.1)];
        for (set, (dtype, most)) in
            instruction_set::supported().into_iter().flat_map(|set| cases.map(|case| (set, case)))
        {
            let host = Host::with_numerics(2, set, Numerics::Fast);
            let rotary = Rotary::new(head_dim, 10_000.0);
            let mut cache = LayerCache::new(&host, [2, kv_heads, head_dim], dtype).unwrap();
            let (mut got, mut position) = (Vec::new(), 0);
            for count in [130, 1, 70] {
                let part = values[position * width..][..count * width].to_vec();
                let part = Tensor::new(&[count, width], part, DType::F32).unwrap();
                let mut slots = SlotMapping::new(2 * PAGE_SIZE);
                slots.push(&[1, 0], position, count);
                let batch = host.batch(&vec![0; count], &slots, &rotary).unwrap();
                let call = AttentionCall { heads, kv_heads, head_dim, batch: &batch, window, norms: None };
                got.extend_from_slice(&host.attention(part, &call, &mut cache).unwrap().values().unwrap());
                position += count;
            }
            let far =
                got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
            assert!(got.len() == want.len() && far < most, "{set}, {dtype}, heads of {head_dim}: {far}");
        }
    }
}

#[test]
fn what_a_query_does_not_see_does_not_reach_it_even_if_it_is_infinite() {
    let mut values: Vec<f32> = (0..100 * 16).map(|i| (i % 13) as f32 / 13.0).collect();
    // One head of 4 elements: two query heads, a key, a value.
    for position in [10, 90] {
        values[position * 16 + 12] = f32::INFINITY;
    }
    let qkv = Tensor::new(&[100, 16], values, DType::F32).unwrap();
    for (window, is_seen) in
        [(None, (10..100).collect::<Vec<_>>()), (Some(5), [10..15, 90..95].into_iter().flatten().collect())]
    {
        for (row, out) in attend(&qkv, window, &[100], 1).chunks_exact(8).enumerate() {
            let is_finite = out.iter().all(|value| value.is_finite());
            assert_eq!(is_finite, !is_seen.contains(&row), "{window:?}, row {row}: {out:?}");
        }
    }
}
