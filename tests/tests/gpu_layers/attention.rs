//! Attention on a GPU.

use ryzanstein_config::Numerics;
use ryzanstein_process_group::DType;
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{AttentionCall, HeadNorms, LayerCache, PAGE_SIZE, SlotMapping};
use ryzanstein_tensor_parallel::{Compute, Host, Tensor};

use super::*;

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

/// Returns pages for a sequence of this length, the last ones first.
fn pages_of(capacity: usize) -> Vec<u32> {
    (0..capacity.div_ceil(PAGE_SIZE) as u32).rev().collect()
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
    let pages = pages_of(capacity);
    let mut cache = LayerCache::new(compute, [pages.len(), kv_heads, head_dim], dtype).unwrap();
    let mut position = 0;
    let mut pass = |count: usize| {
        let qkv = upload(noise(&[count, (heads + 2 * kv_heads) * head_dim], position as u64 + 7, dtype));
        let mut slots = SlotMapping::new(capacity);
        slots.push(&pages, position, count);
        let batch = compute.batch(&vec![0; count], &slots, &rotary).unwrap();
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
                    let pages = pages_of(POSITIONS);
                    let shape = [pages.len(), kv_heads, head_dim];
                    let mut cache = LayerCache::new(&cuda, shape, dtype).unwrap();
                    let (mut position, mut seen) = (0, Vec::new());
                    for &count in passes {
                        let rows = values[position * width..(position + count) * width].to_vec();
                        let qkv = cuda.upload(Tensor::new(&[count, width], rows, dtype).unwrap()).unwrap();
                        let mut slots = SlotMapping::new(POSITIONS);
                        slots.push(&pages, position, count);
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

/// Blocks share the positions of a sequence if there are few sequences. If there are many, a block takes all positions.
#[test]
#[ignore = "needs a GPU"]
fn attention_of_a_token_with_invariant_numerics_has_the_same_bits_in_every_batch() {
    const POSITIONS: usize = 400;
    let cuda = cuda_with(Numerics::Invariant);
    for dtype in [DType::BF16, DType::F16] {
        for (heads, kv_heads, head_dim) in [(8, 2, 128), (71, 1, 64), (71, 1, 128), (4, 2, 16)] {
            let (width, rotary) = ((heads + 2 * kv_heads) * head_dim, Rotary::new(head_dim, 1e4));
            let prompt = noise(&[POSITIONS, width], 6, dtype).values().unwrap().into_owned();
            let attend = |rows: Vec<f32>, slots: &SlotMapping, window, cache: &mut LayerCache| -> Vec<f32> {
                let count = rows.len() / width;
                let qkv = cuda.upload(Tensor::new(&[count, width], rows, dtype).unwrap()).unwrap();
                let batch = cuda.batch(&vec![0; count], slots, &rotary).unwrap();
                let call = AttentionCall { heads, kv_heads, head_dim, batch: &batch, window, norms: None };
                cuda.attention(qkv, &call, cache).unwrap().values().unwrap().into_owned()
            };
            for (window, mut first) in [(None, None), (Some(100), None)] {
                for sequences in [1, 60, 150] {
                    let pages = POSITIONS.div_ceil(PAGE_SIZE);
                    let shape = [sequences * pages, kv_heads, head_dim];
                    // Neighbouring pages belong to different sequences.
                    let table = |sequence: usize| -> Vec<u32> {
                        (0..pages).map(|page| (page * sequences + sequence) as u32).collect()
                    };
                    let mut cache = LayerCache::new(&cuda, shape, dtype).unwrap();
                    let (before, last) = prompt.split_at((POSITIONS - 1) * width);
                    for sequence in 0..sequences {
                        let mut slots = SlotMapping::new(POSITIONS);
                        slots.push(&table(sequence), 0, POSITIONS - 1);
                        attend(before.to_vec(), &slots, window, &mut cache);
                    }
                    let mut slots = SlotMapping::new(POSITIONS);
                    (0..sequences).for_each(|sequence| slots.push(&table(sequence), POSITIONS - 1, 1));
                    let rows = attend(last.repeat(sequences), &slots, window, &mut cache);
                    let first = first.get_or_insert_with(|| rows[..heads * head_dim].to_vec());
                    for (sequence, row) in rows.chunks(heads * head_dim).enumerate() {
                        assert!(
                            row == first,
                            "{heads} of {head_dim}, {dtype}, {window:?}, {sequence} of {sequences}"
                        );
                    }
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
        (71, 1, 64),
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
