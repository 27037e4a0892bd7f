//! Invariant numerics: the same bits with every number of ranks, batch, chunking and path.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::slice;
use std::sync::Arc;

use ryzanstein_config::{BackendChoice, InstructionSet, Numerics};
use ryzanstein_process_group::{DType, ProcessGroup, ProcessGroupManager};
use ryzanstein_tensor_parallel::checkpoint::{Loader, NoiseSource};
use ryzanstein_tensor_parallel::compute::{PAGE_SIZE, instruction_set};
use ryzanstein_tensor_parallel::generate::Sampler;
use ryzanstein_tensor_parallel::{
    CacheSize, Compute, Cuda, GenerateOptions, Host, Llama, LlamaConfig, ModelGroups, Passes, Sampling,
    check_world_size, legal_world_sizes,
};
use ryzanstein_tests::batch::{mixed, staggered};
use ryzanstein_tests::fixtures::{Expected, fixtures, folder, rope_fixtures};
use ryzanstein_tests::gpu::{gpus, on_gpus};
use ryzanstein_tests::{config, in_good_order, on_loopback, sockets, with_ranks};

/// Logits by position.
type Rows = BTreeMap<usize, Vec<u32>>;

/// A model whose sums are long enough to be rounded often. `heads` and key/value heads determine its world sizes. With a `head_dim` of
/// 32, every part of a row is a whole number of AMX's tiles.
fn shape([heads, kv_heads]: [usize; 2], head_dim: usize) -> LlamaConfig {
    let json = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": {hidden},
            "intermediate_size": {intermediate}, "num_hidden_layers": 2, "num_attention_heads": {heads},
            "num_key_value_heads": {kv_heads}, "head_dim": {head_dim}, "vocab_size": 250, "hidden_act": "silu",
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false}}"#,
        hidden = heads * head_dim,
        intermediate = heads * if head_dim == 32 { 64 } else { 40 },
    );
    LlamaConfig::from_json("the test's own config.json".as_ref(), &json, None).unwrap()
}

fn made(
    shape: &LlamaConfig,
    dtype: DType,
    (set, numerics): (InstructionSet, Numerics),
    group: &ProcessGroup,
) -> Arc<Llama> {
    let (rank, ranks) = (group.rank().index(), group.world_size());
    let mut source = NoiseSource;
    let mut loader = Loader::new(&mut source, rank, ranks, dtype).unwrap();
    let compute: Box<dyn Compute> = match group.device() {
        Some(device) => Box::new(Cuda::with_numerics(device, 1, numerics).unwrap()),
        None => Box::new(Host::with_numerics(1, set, numerics)),
    };
    Arc::new(Llama::from_loader(shape.clone(), dtype, compute, &mut loader).unwrap())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn tokens(count: usize, start: usize) -> Vec<u32> {
    (start..start + count).map(|i| (i * 37 % 250) as u32).collect()
}

/// The logits after each token, with the tokens in chunks.
fn forced(model: &Arc<Llama>, tokens: &[u32], chunk: usize, group: &mut dyn ModelGroups) -> Vec<u32> {
    let mut decoder = model.decoder(CacheSize::full(1, tokens.len()), Passes::Eager).unwrap();
    let logits = |part| bits(&decoder.logits(0, part, group).unwrap().values().unwrap());
    tokens.chunks(chunk).flat_map(logits).collect()
}

/// The logits of greedy decoding of several prompts together, by prompt.
fn greedy(model: &Arc<Llama>, prompts: &[Vec<u32>], steps: usize, group: &mut ProcessGroup) -> Vec<Vec<u32>> {
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    let size = CacheSize::full(prompts.len(), longest + steps);
    let mut decoder = model.decoder(size, Passes::Graph).unwrap();
    let mut sampler = Sampler::new(Sampling::Greedy).unwrap();
    let mut seen = vec![Vec::new(); prompts.len()];
    let pairs: Vec<_> = prompts.iter().enumerate().map(|(i, prompt)| (i, &prompt[..])).collect();
    let mut logits = decoder.step(&pairs, group).unwrap().values().unwrap().into_owned();
    for _ in 0..steps {
        let mut next = Vec::new();
        for (i, row) in logits.chunks_exact(250).enumerate() {
            seen[i].extend(bits(row));
            next.push((i, sampler.choose(row).unwrap()));
        }
        logits = decoder.decode(&next, group).unwrap().values().unwrap().into_owned();
    }
    seen
}

/// A prompt that has a slot of the decoder, and the tokens that it gets next.
struct Running {
    prompt: usize,
    next: Vec<u32>,
}

/// Returns [`greedy`]'s logits of prompts that are computed as an engine does it: a prompt waits until there are pages for it,
/// enters in chunks while others get their next token, and shares the pages of a common beginning with a running one.
fn scheduled(
    model: &Arc<Llama>,
    prompts: &[Vec<u32>],
    steps: usize,
    (size, passes): (CacheSize, Passes),
    group: &mut ProcessGroup,
) -> Vec<Vec<u32>> {
    const CHUNK: usize = 40;
    let mut decoder = model.decoder(size, passes).unwrap();
    let mut sampler = Sampler::new(Sampling::Greedy).unwrap();
    let mut seen = vec![Vec::new(); prompts.len()];
    let mut slots: Vec<Option<Running>> = (0..size.sequences).map(|_| None).collect();
    let mut waiting = (0..prompts.len()).peekable();
    let pages = |prompt: usize| (prompts[prompt].len() + steps).div_ceil(PAGE_SIZE);
    loop {
        while let Some(slot) = slots.iter().position(Option::is_none) {
            let held: usize = slots.iter().flatten().map(|running| pages(running.prompt)).sum();
            let Some(prompt) = waiting.next_if(|prompt| held + pages(*prompt) <= size.pages) else { break };
            let common = |(from, running): (usize, &Option<Running>)| {
                let other = &prompts[running.as_ref()?.prompt];
                let pairs = other.iter().zip(&prompts[prompt]).take_while(|(a, b)| a == b);
                // The last token of the prompt is computed.
                Some((pairs.count().min(decoder.len(from)).min(prompts[prompt].len() - 1), from))
            };
            let (common, from) = slots.iter().enumerate().filter_map(common).max().unwrap_or((0, slot));
            decoder.fork(from, slot, common).unwrap();
            slots[slot] = Some(Running { prompt, next: prompts[prompt][common..].to_vec() });
        }
        let of_slot = |(slot, running): (usize, &mut Option<Running>)| {
            let next = &mut running.as_mut()?.next;
            Some((slot, next.drain(..next.len().min(CHUNK)).collect()))
        };
        let pass: Vec<(usize, Vec<u32>)> = slots.iter_mut().enumerate().filter_map(of_slot).collect();
        if pass.is_empty() {
            assert_eq!((decoder.free_pages(), waiting.next()), (size.pages, None));
            return seen;
        }
        let pairs: Vec<_> = pass.iter().map(|(slot, tokens)| (*slot, &tokens[..])).collect();
        let logits = decoder.step(&pairs, group).unwrap().values().unwrap().into_owned();
        for ((slot, _), row) in pass.iter().zip(logits.chunks_exact(250)) {
            let Some(Running { prompt, next }) = &mut slots[*slot] else { continue };
            if !next.is_empty() {
                continue;
            }
            seen[*prompt].extend(bits(row));
            if seen[*prompt].len() == steps * row.len() {
                decoder.clear(*slot);
                slots[*slot] = None;
            } else {
                next.push(sampler.choose(row).unwrap());
            }
        }
    }
}

/// Checks that 64 prompts have the same bits alone and in a cache that has pages for about a quarter of them at full length.
fn check_scheduled(dtype: DType, set: InstructionSet, group: &mut ProcessGroup) {
    const STEPS: usize = 4;
    let model = made(&shape([8, 4], 16), dtype, (set, Numerics::Invariant), group);
    // Of each four prompts, the last three begin like the first.
    let prompts: Vec<_> = (0..64).map(|i| tokens(1 + i * 53 % 150, i / 4)).collect();
    let size = CacheSize { sequences: 24, capacity: 256, pages: 16 };
    let alone: Vec<_> =
        prompts.iter().map(|p| greedy(&model, slice::from_ref(p), STEPS, group).remove(0)).collect();
    for passes in [Passes::Eager, Passes::Graph] {
        let together = scheduled(&model, &prompts, STEPS, (size, passes), group);
        for (i, (got, want)) in together.iter().zip(&alone).enumerate() {
            assert!(got == want, "prompt {i} of {}, {dtype}, {set}, {passes:?}", prompts[i].len());
        }
    }
}

#[test]
fn sequences_that_come_and_go_in_few_pages_have_the_logits_of_each_alone() {
    let set = instruction_set::current();
    for (ranks, dtype) in [(1, DType::F32), (2, DType::BF16)] {
        on_loopback(ranks, |group| check_scheduled(dtype, set, group));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sequences_that_come_and_go_in_few_pages_have_the_logits_of_each_alone_on_gpus() {
    let set = instruction_set::current();
    for dtype in [DType::BF16, DType::F32] {
        on_gpus(1, |group| check_scheduled(dtype, set, group));
    }
}

#[test]
fn logits_are_the_same_at_every_world_size_batch_and_chunking_with_every_instruction_set() {
    let shapes = [(shape([8, 4], 32), vec![1, 2, 4, 8]), (shape([6, 3], 16), vec![1, 3, 6])];
    let (text, prompts) = (tokens(70, 3), [1, 9, 2, 30, 64, 65, 5, 17].map(|n| tokens(n, 11 * n)));
    for (shape, sizes) in &shapes {
        assert_eq!(legal_world_sizes(shape, 16, Numerics::Invariant), *sizes);
        for dtype in [DType::BF16, DType::F32] {
            for set in instruction_set::supported() {
                let arithmetic = (set, Numerics::Invariant);
                let alone = on_loopback(1, |group| {
                    let model = made(shape, dtype, arithmetic, group);
                    let each = prompts.iter().map(|p| greedy(&model, slice::from_ref(p), 3, group).remove(0));
                    let each: Vec<_> = each.collect();
                    (forced(&model, &text, text.len(), group), each)
                });
                let (whole, each) = &alone[0];
                for size in sizes {
                    on_loopback(*size, |group| {
                        let model = made(shape, dtype, arithmetic, group);
                        for chunk in [1, 7, 64, text.len()] {
                            let got = forced(&model, &text, chunk, group);
                            assert!(got == *whole, "{size} ranks, chunks of {chunk}, {dtype}, {set}");
                        }
                        let together = greedy(&model, &prompts, 3, group);
                        assert!(
                            together == *each,
                            "{size} ranks, batch of {}, {dtype}, {set}",
                            prompts.len()
                        );
                    });
                }
            }
        }
    }
}

#[test]
fn fast_numerics_have_other_bits_with_another_number_of_ranks() {
    let text = tokens(40, 3);
    let logits = |ranks| {
        let arithmetic = (instruction_set::current(), Numerics::Fast);
        on_loopback(ranks, |group| {
            let model = made(&shape([8, 4], 16), DType::BF16, arithmetic, group);
            forced(&model, &text, text.len(), group)
        })
        .remove(0)
    };
    assert!(logits(1) != logits(2));
}

/// The logits of a fixture's input by position: the same in passes of all kinds, and near the expected ones.
fn rows_of_fixture(name: &str, dtype: DType, group: &mut ProcessGroup) -> Rows {
    let expected = Expected::read(name);
    group.set_numerics(Numerics::Invariant);
    let model = Arc::new(Llama::load(&folder(name), Some(dtype), group).unwrap());
    let whole = forced(&model, &expected.input(), usize::MAX, group);
    let rows: Rows = whole.chunks_exact(expected.vocabulary).map(<[u32]>::to_vec).enumerate().collect();
    if dtype == DType::F32 {
        assert_eq!(whole.len(), expected.logits.len());
        for (got, want) in whole.iter().map(|bits| f32::from_bits(*bits)).zip(&expected.logits) {
            assert!((got - want).abs() <= 1e-5 + 1e-5 * want.abs(), "{name}: {got}, and should be {want}");
        }
        let options = GenerateOptions { max_new_tokens: expected.tokens.len(), ..GenerateOptions::default() };
        let got = model.generate(&expected.prompt, &options, group).unwrap().tokens;
        assert_eq!(got, expected.tokens, "{name}");
    }
    // A scale of the angles that depends on the length of the text makes a prompt differ from its parts.
    if expected.stepwise.is_none() {
        let mut passes = staggered(&model, &expected, Passes::Graph, group);
        passes.extend(mixed(&model, &expected, Passes::Eager, group));
        for (position, row) in passes {
            let ranks = group.world_size();
            assert!(bits(&row) == rows[&position], "{name}, {dtype}, {ranks} ranks, position {position}");
        }
    }
    rows
}

/// Checks that each fixture has the same bits with every legal number of ranks up to `most`, which `on` runs.
fn check_fixtures(most: usize, on: impl Fn(usize, &(dyn Fn(&mut ProcessGroup) -> Rows + Sync)) -> Vec<Rows>) {
    for name in fixtures().chain(rope_fixtures()) {
        let settings = LlamaConfig::from_folder(&folder(name)).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let run = |group: &mut ProcessGroup| rows_of_fixture(name, dtype, group);
            let alone = on(1, &run).remove(0);
            for size in legal_world_sizes(&settings, most, Numerics::Invariant) {
                for rows in on(size, &run) {
                    assert!(rows == alone, "{name}, {dtype}, {size} ranks");
                }
            }
        }
    }
}

#[test]
fn every_fixture_has_its_own_bits_in_passes_of_all_kinds_at_every_world_size() {
    check_fixtures(8, |ranks, run| on_loopback(ranks, run));
}

#[test]
#[ignore = "needs a GPU"]
fn every_fixture_has_its_own_bits_on_every_number_of_gpus() {
    check_fixtures(gpus() as usize, |ranks, run| on_gpus(ranks, run));
}

#[test]
#[ignore = "needs a GPU"]
fn logits_are_the_same_on_every_number_of_gpus_batch_chunking_and_path() {
    let shape = shape([8, 4], 16);
    let (text, prompts) = (tokens(70, 3), [1, 9, 2, 30, 64, 65, 5, 17].map(|n| tokens(n, 11 * n)));
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let arithmetic = (instruction_set::current(), Numerics::Invariant);
        let run = |group: &mut ProcessGroup| {
            let model = made(&shape, dtype, arithmetic, group);
            let whole = forced(&model, &text, text.len(), group);
            for chunk in [1, 7, 64] {
                assert!(forced(&model, &text, chunk, group) == whole, "chunks of {chunk}, {dtype}");
            }
            let each: Vec<_> =
                prompts.iter().map(|p| greedy(&model, slice::from_ref(p), 3, group).remove(0)).collect();
            assert!(greedy(&model, &prompts, 3, group) == each, "a batch of {}, {dtype}", prompts.len());
            (whole, each)
        };
        let alone = on_gpus(1, run).remove(0);
        for size in legal_world_sizes(&shape, gpus() as usize, Numerics::Invariant) {
            for peer_memory in [true, false] {
                let mut config = config(BackendChoice::Nccl);
                config.process_group.peer_memory = peer_memory;
                for got in in_good_order(&config, size, |manager| run(manager.world())) {
                    assert!(got == alone, "{size} GPUs, {dtype}, peer memory {peer_memory}");
                }
            }
        }
    }
}

#[test]
fn the_setting_reaches_models_of_groups_on_shared_memory_and_on_sockets() {
    let name = "llama-gqa";
    let expected = Expected::read(name);
    let run = |group: &mut ProcessGroup| {
        assert_eq!(group.numerics(), Numerics::Invariant);
        let model = Arc::new(Llama::load(&folder(name), Some(DType::BF16), group).unwrap());
        forced(&model, &expected.input(), usize::MAX, group)
    };
    let alone = on_loopback(1, |group| {
        group.set_numerics(Numerics::Invariant);
        run(group)
    });
    for mut config in [config(BackendChoice::Tcp), sockets()] {
        config.model.numerics = Numerics::Invariant;
        for got in with_ranks(&config, 2, |mut manager| run(manager.tensor_parallel())) {
            assert!(got == alone[0]);
        }
        // The numerics of the group that shares the layers count.
        let mut fast = config.clone();
        fast.model.numerics = Numerics::Fast;
        let chosen = |mut manager: ProcessGroupManager| {
            manager.tensor_parallel().set_numerics(Numerics::Invariant);
            let counts = RefCell::new(Vec::new());
            let on_tensor = |read, all| counts.borrow_mut().push((read, all));
            let model = Llama::load_with(&folder(name), Some(DType::BF16), &mut manager, on_tensor).unwrap();
            let (read, all) = counts.into_inner().pop().unwrap();
            assert_eq!(read, all);
            forced(&Arc::new(model), &expected.input(), usize::MAX, &mut manager)
        };
        for got in with_ranks(&fast, 2, chosen) {
            assert!(got == alone[0]);
        }
        config.layout.tensor_parallel = None;
        config.layout.pipeline_parallel = NonZero::new(2).unwrap();
        let staged = |mut manager: ProcessGroupManager| {
            let model = Arc::new(Llama::load(&folder(name), Some(DType::BF16), &mut manager).unwrap());
            forced(&model, &expected.input(), usize::MAX, &mut manager)
        };
        for got in with_ranks(&config, 4, staged) {
            assert!(got == alone[0]);
        }
    }
}

#[test]
fn a_number_of_ranks_that_adds_no_subtrees_is_refused_with_the_legal_ones() {
    let twelve = shape([12, 4], 16);
    assert!(legal_world_sizes(&twelve, 12, Numerics::Fast).contains(&12));
    let error = check_world_size(&twelve, 12, Numerics::Invariant).unwrap_err().to_string();
    assert!(error.contains("each of 12 ranks would not add a whole subtree"), "{error}");
    assert!(error.contains("legal sizes for this model: 1, 2, 4"), "{error}");
}
