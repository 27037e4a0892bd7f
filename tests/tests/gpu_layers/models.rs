//! Whole models on GPUs against `transformers`.

use std::iter;
use std::sync::Arc;

use ryzanstein_config::{BackendChoice, DeviceConfig, Numerics};
use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{DType, LocalRank, MemoryRendezvous, ProcessGroupManager};
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{AttentionCall, LayerCache, PAGE_SIZE, SlotMapping};
use ryzanstein_tensor_parallel::{
    CacheSize, Compute, GenerateOptions, Host, Llama, LlamaConfig, Passes, Tensor, legal_world_sizes,
};
use ryzanstein_tests::batch::{greedy, mixed, staggered};
use ryzanstein_tests::fixtures::{Expected, fixtures, folder, rope_fixtures};
use ryzanstein_tests::gpu::{need, on_gpus};
use ryzanstein_tests::{config, distance, greatest, in_good_order, on_loopback};

use super::*;

// ---- whole models --------------------------------------------------------------------------------------------------

fn world_sizes(name: &str) -> Vec<usize> {
    let most = need(1).min(8);
    legal_world_sizes(&LlamaConfig::from_folder(&folder(name)).unwrap(), most, Numerics::Fast)
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
        let decoder = |passes| model.decoder(CacheSize::full(1, input.len()), passes).unwrap();
        let mut whole = decoder(Passes::Eager);
        let at_once = whole.logits(0, &input, group).unwrap().values().unwrap().into_owned();
        let (prompt, rest) = input.split_at(expected.prompt.len());
        let [eager, recorded] = [Passes::Eager, Passes::Graph].map(|passes| {
            let mut decoder = decoder(passes);
            let mut values = decoder.logits(0, prompt, group).unwrap().values().unwrap().into_owned();
            decoder.clear(0);
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
    // Short sequences have one split, long ones have many.
    let lengths = [1, 700, 64, 2000, 3];
    let (capacity, pages) = (2002, 2002usize.div_ceil(PAGE_SIZE));
    // Neighbouring pages belong to different sequences.
    let table = |sequence: usize| -> Vec<u32> {
        (0..pages).map(|page| (page * lengths.len() + sequence) as u32).collect()
    };
    for dtype in TYPES {
        let all = |compute: &dyn Compute, upload: &dyn Fn(Tensor) -> Tensor| {
            let mut cache =
                LayerCache::new(compute, [lengths.len() * pages, kv_heads, head_dim], dtype).unwrap();
            let width = (heads + 2 * kv_heads) * head_dim;
            // Of each run the sequence, the position and the number of tokens.
            let mut pass = |runs: &[(usize, usize, usize)], rows: usize, seed: usize| {
                let slots = &mut SlotMapping::new(capacity);
                for &(sequence, position, tokens) in runs {
                    slots.push(&table(sequence), position, tokens);
                }
                let qkv = upload(noise(&[rows, width], seed as u64, dtype));
                let batch = compute.batch(&vec![0; rows], slots, &rotary).unwrap();
                let call =
                    AttentionCall { heads, kv_heads, head_dim, batch: &batch, window: None, norms: None };
                compute.attention(qkv, &call, &mut cache).unwrap()
            };
            for (sequence, length) in lengths.into_iter().enumerate() {
                pass(&[(sequence, 0, length)], length, sequence);
            }
            let mut all: Vec<_> = [[4, 0, 3, 1, 2], [0, 1, 2, 3, 4]]
                .into_iter()
                .enumerate()
                .map(|(round, order)| {
                    let runs = order.map(|sequence| (sequence, lengths[sequence] + round, 1));
                    pass(&runs, lengths.len(), 50 + round)
                })
                .collect();
            // Some of them get one more token, others several, in one batch.
            let mut runs = [3, 0].map(|sequence| (sequence, lengths[sequence], 1)).to_vec();
            let more = [(1, 100), (4, 1), (2, 37)];
            runs.extend(more.map(|(sequence, tokens)| (sequence, lengths[sequence] + 2, tokens)));
            all.push(pass(&runs, 2 + 100 + 1 + 37, 60));
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

#[test]
#[ignore = "needs a GPU"]
fn greedy_passes_that_start_before_their_tokens_are_known_choose_those_of_each_sequence_alone_on_gpus() {
    for name in fixtures() {
        let expected = Expected::read(name);
        let input = expected.input();
        let prompts = [1, expected.prompt.len(), 2, 5].map(|begun| input[..begun].to_vec());
        for world_size in world_sizes(name) {
            let all = on_gpus(world_size, |group| {
                let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
                let options = GenerateOptions { max_new_tokens: 12, ..GenerateOptions::default() };
                let options = GenerateOptions { passes: Passes::Eager, ignore_end: true, ..options };
                let alone =
                    prompts.each_ref().map(|prompt| model.generate(prompt, &options, group).unwrap().tokens);
                for passes in [Passes::Eager, Passes::Graph] {
                    let got = greedy(&model, &prompts, 12, passes, group);
                    assert_eq!(got, alone, "{name}, world {world_size}, {passes:?}");
                }
                alone
            });
            assert!(all.iter().all(|tokens| *tokens == all[0]), "{name}, world {world_size}: ranks disagree");
            let on_host = on_loopback(1, |group| {
                let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
                greedy(&model, &prompts, 12, Passes::Eager, group)
            });
            assert_eq!(on_host[0], all[0], "{name}, world {world_size}: other tokens than on the host");
        }
    }
}

/// Work that another thread enqueues while a pass is captured neither gets into the graph nor is lost.
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
                    let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Graph).unwrap();
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
                model.decoder(CacheSize::full(1, input.len()), Passes::Graph).unwrap(),
                model.decoder(CacheSize::full(1, input.len()), Passes::Graph).unwrap(),
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

/// A first request would have to compile what loading has not, while the other ranks wait.
#[test]
#[ignore = "needs a GPU"]
fn a_request_to_a_model_finds_every_kernel_compiled_and_no_call_of_the_first_pass_recorded() {
    for dtype in TYPES {
        let cache = tempfile::tempdir().unwrap();
        let mut config = config(BackendChoice::Nccl);
        config.device.kernel_cache = Some(cache.path().to_owned());
        let kernels = || std::fs::read_dir(cache.path()).unwrap().count();
        in_good_order(&config, need(1).min(2), |manager| {
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
        let (model, input) = (Arc::new(model), expected.input());
        let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Eager).unwrap();
        let got = decoder.logits(0, &input, group).unwrap();
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
