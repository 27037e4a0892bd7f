//! What whole models do on a GPU. `oracle` compares their logits and tokens with those of `transformers`.

use std::sync::Arc;

use ryzanstein_config::{BackendChoice, DeviceConfig};
use ryzanstein_process_group::device::Device;
use ryzanstein_process_group::{DType, LocalRank, MemoryRendezvous, ProcessGroupManager};
use ryzanstein_tensor_parallel::attention::Rotary;
use ryzanstein_tensor_parallel::compute::{AttentionCall, LayerCache, PAGE_SIZE, SlotMapping};
use ryzanstein_tensor_parallel::{CacheSize, Compute, GenerateOptions, Host, Llama, Passes, Tensor};
use ryzanstein_tests::fixtures::{Expected, folder};
use ryzanstein_tests::gpu::{need, on_gpus};
use ryzanstein_tests::{config, in_good_order, near};

use super::*;

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

/// Work that another thread enqueues while a pass is captured neither gets into the graph nor is lost.
#[test]
#[ignore = "needs a GPU"]
fn two_threads_share_a_model_while_each_records_its_passes() {
    let name = "llama-gqa";
    let expected = Expected::read(name);
    let input = expected.input();
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
            let (model, input, expected) = (Arc::clone(&model), &input, &expected);
            scope.spawn(move || {
                for _ in 0..20 {
                    let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Graph).unwrap();
                    decoder.prefill(0, &input[..1], manager.world()).unwrap();
                    for (position, token) in input.iter().enumerate().skip(1) {
                        let logits = decoder.decode(&[(0, *token)], manager.world()).unwrap();
                        near(&logits.values().unwrap(), expected.row(position));
                    }
                }
                manager.finalize().unwrap();
            });
        }
    });
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
