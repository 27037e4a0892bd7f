//! Small random checkpoints against what `transformers` computes from them (see `fixtures/README.md`).

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::{DType, ProcessGroup, Rank};
use ryzanstein_tensor_parallel::compute::instruction_set;
use ryzanstein_tensor_parallel::{
    CacheSize, Error, GenerateOptions, Llama, LlamaConfig, Passes, Tokenizer, legal_world_sizes,
};
use ryzanstein_tests::batch::{mixed, staggered};
use ryzanstein_tests::fixtures::{Expected, fixtures, folder, rope_fixtures, world_sizes};
use ryzanstein_tests::{distance, greatest, on_loopback};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};

/// Logits of all positions at once, and the same from the prompt followed by one token at a time.
fn logits(name: &str, dtype: Option<DType>, world_size: usize, expected: &Expected) -> [Vec<f32>; 2] {
    let mut all = on_loopback(world_size, |group| {
        let model = Arc::new(Llama::load(&folder(name), dtype, group).unwrap());
        let input = expected.input();
        let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Eager).unwrap();
        let at_once = decoder.logits(0, &input, group).unwrap();
        assert_eq!(at_once.shape(), [input.len(), expected.vocabulary]);
        let at_once = at_once.values().unwrap().into_owned();

        decoder.clear(0);
        let (prompt, rest) = input.split_at(expected.prompt.len());
        let mut stepwise = decoder.logits(0, prompt, group).unwrap().values().unwrap().into_owned();
        for token in rest {
            stepwise.extend_from_slice(&decoder.decode(&[(0, *token)], group).unwrap().values().unwrap());
        }
        [at_once, stepwise]
    });
    let first = all.remove(0);
    assert!(all.iter().all(|other| *other == first), "{name}, world {world_size}: ranks disagree");
    first
}

/// Compares the results of `run` on every rank, for each fixture and world size, with the reference.
fn at_every_position(
    run: impl Fn(&Arc<Llama>, &Expected, &mut ProcessGroup) -> Vec<(usize, Vec<f32>)> + Sync,
) {
    for name in fixtures() {
        let expected = Expected::read(name);
        for &world_size in world_sizes(name) {
            let mut all = on_loopback(world_size, |group| {
                let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
                run(&model, &expected, group)
            });
            let first = all.remove(0);
            assert!(all.iter().all(|other| *other == first), "{name}, world {world_size}: ranks disagree");
            for (position, got) in first {
                let want = &expected.logits[position * expected.vocabulary..][..expected.vocabulary];
                for (got, want) in got.iter().zip(want) {
                    assert!(
                        (got - want).abs() <= 1e-5 + 1e-5 * want.abs(),
                        "{name}, world {world_size}, position {position}: {got} and should be {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn sequences_decoded_together_have_the_logits_of_the_reference_at_every_position() {
    at_every_position(|model, expected, group| staggered(model, expected, Passes::Graph, group));
}

#[test]
fn prompts_next_tokens_forks_and_truncated_sequences_in_one_pass_have_the_logits_of_the_reference() {
    at_every_position(|model, expected, group| mixed(model, expected, Passes::Graph, group));
}

fn is_half(name: &str) -> bool {
    Expected::read(name).native.is_some()
}

fn greedy(name: &str, dtype: Option<DType>, world_size: usize, expected: &Expected) -> Vec<Vec<u32>> {
    let options = GenerateOptions { max_new_tokens: expected.tokens.len(), ..GenerateOptions::default() };
    on_loopback(world_size, |group| {
        let model = Llama::load(&folder(name), dtype, group).unwrap();
        model.generate(&expected.prompt, &options, group).unwrap().tokens
    })
}

#[test]
fn the_legal_world_sizes_are_those_the_fixtures_were_made_for() {
    for name in fixtures().chain(rope_fixtures()) {
        let config = LlamaConfig::from_folder(&folder(name)).unwrap();
        assert_eq!(legal_world_sizes(&config, 8, Numerics::Fast), world_sizes(name), "{name}");
    }
}

#[test]
fn f32_logits_equal_the_reference_at_every_position_and_world_size() {
    for name in fixtures().chain(rope_fixtures()) {
        let expected = Expected::read(name);
        let stepwise = expected.stepwise.as_ref().unwrap_or(&expected.logits);
        for &world_size in world_sizes(name) {
            let got = logits(name, Some(DType::F32), world_size, &expected);
            for (got, want) in got.iter().zip([&expected.logits, stepwise]) {
                assert_eq!(got.len(), want.len(), "{name}, world {world_size}");
                for (i, (got, want)) in got.iter().zip(want).enumerate() {
                    assert!(
                        (got - want).abs() <= 1e-5 + 1e-5 * want.abs(),
                        "{name}, world {world_size}, logit {i}: {got} and should be {want}"
                    );
                }
            }
        }
    }
}

/// The set that the ignored test below chooses.
const INSTRUCTION_SET: &str = "TESTED_INSTRUCTION_SET";

#[test]
fn every_instruction_set_has_the_logits_and_tokens_of_the_reference() {
    // A process uses one set as long as it lives.
    for set in instruction_set::supported() {
        let test = "the_chosen_instruction_set_has_the_logits_and_tokens_of_the_reference";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", test])
            .env(INSTRUCTION_SET, set.name())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{set}: {text}");
    }
}

#[test]
#[ignore = "run by the test above, in a process for each instruction set"]
fn the_chosen_instruction_set_has_the_logits_and_tokens_of_the_reference() {
    if let Ok(set) = std::env::var(INSTRUCTION_SET) {
        instruction_set::choose(set.parse().unwrap()).unwrap();
        assert_eq!(instruction_set::current().name(), set);
    }
    f32_logits_equal_the_reference_at_every_position_and_world_size();
    sixteen_bit_models_in_their_own_type_stay_near_the_f32_reference_and_choose_its_tokens();
}

#[test]
fn greedy_decoding_gives_the_reference_tokens_on_every_rank_and_world_size() {
    for name in fixtures().chain(rope_fixtures()) {
        let expected = Expected::read(name);
        for &world_size in world_sizes(name) {
            for tokens in greedy(name, Some(DType::F32), world_size, &expected) {
                assert_eq!(tokens, expected.tokens, "{name}, world {world_size}");
            }
        }
    }
}

#[test]
fn sixteen_bit_models_in_their_own_type_stay_near_the_f32_reference_and_choose_its_tokens() {
    for name in fixtures().filter(|name| is_half(name)) {
        let expected = Expected::read(name);
        let scale = greatest(&expected.logits);
        for &world_size in world_sizes(name) {
            for got in logits(name, None, world_size, &expected) {
                let error = distance(&got, &expected.logits) / scale;
                println!("{name}, world {world_size}: {error:.5} of the greatest logit");
                assert!(error <= 5e-2, "{name}, world {world_size}: off by {error} of the greatest logit");
            }
            for tokens in greedy(name, None, world_size, &expected) {
                assert_eq!(tokens, expected.tokens, "{name}, world {world_size}");
            }
        }
    }
}

#[test]
fn an_f32_model_can_be_run_in_either_sixteen_bit_type() {
    let expected = Expected::read("llama-mha");
    let scale = greatest(&expected.logits);
    for dtype in [DType::F16, DType::BF16] {
        for got in logits("llama-mha", Some(dtype), 2, &expected) {
            let error = distance(&got, &expected.logits) / scale;
            assert!(error <= 5e-2, "{dtype}: off by {error} of the greatest logit");
        }
    }
}

#[test]
fn a_model_that_only_one_rank_can_read_is_the_same_on_all() {
    for (name, world_size) in [("llama-gqa", 4), ("llama-bias-headdim", 2), ("heads-6", 3)] {
        let expected = Expected::read(name);
        let root = Rank(1);
        let reports = on_loopback(world_size, |group| {
            let directory = (group.rank() == root).then(|| folder(name));
            let model = Llama::load_from_root(directory.as_deref(), Some(DType::F32), root, group).unwrap();
            let (model, input) = (Arc::new(model), expected.input());
            let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Eager).unwrap();
            let got = decoder.logits(0, &input, group).unwrap();
            assert!(distance(&got.values().unwrap(), &expected.logits) <= 1e-5 * 4.0, "{name}");
            model.report().bytes_read
        });
        for (rank, bytes) in reports.into_iter().enumerate() {
            assert_eq!(bytes > 0, rank == root.index());
        }
    }
}

#[test]
fn a_tied_model_uses_a_head_of_its_own_where_the_checkpoint_has_another() {
    // The same weights with a head: that of the embedding, one that differs in one row, and what the untied model computes.
    let source = std::fs::read(folder("heads-6").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&source).unwrap();
    let embedding = file.tensor("model.embed_tokens.weight").unwrap();
    let config = std::fs::read_to_string(folder("heads-6").join("config.json")).unwrap();
    let write = |head: &[u8], config: &str| {
        let copy = tempfile::tempdir().unwrap();
        let head = TensorView::new(embedding.dtype(), embedding.shape().into(), head).unwrap();
        let tensors = file.tensors().into_iter().chain([("lm_head.weight".into(), head)]);
        std::fs::write(copy.path().join("model.safetensors"), serialize(tensors, None).unwrap()).unwrap();
        std::fs::write(copy.path().join("config.json"), config).unwrap();
        copy
    };
    let logits = |folder: &Path, from_root: bool| {
        let mut all = on_loopback(3, |group| {
            let model = if from_root {
                Llama::load_from_root(Some(folder), None, Rank(1), group).unwrap()
            } else {
                Llama::load(folder, None, group).unwrap()
            };
            let model = Arc::new(model);
            let mut decoder = model.decoder(CacheSize::full(1, 8), Passes::Eager).unwrap();
            let logits = decoder.logits(0, &[5, 7, 11], group).unwrap();
            (logits.values().unwrap().into_owned(), model.report().bytes_read)
        });
        all.swap_remove(1)
    };
    let mut other = embedding.data().to_vec();
    let row = other.len() / embedding.shape()[0];
    other[40 * row..41 * row].fill(0);
    let (tied, bytes) = logits(&folder("heads-6"), false);
    let (copied, bytes_of_copied) = logits(write(embedding.data(), &config).path(), false);
    assert_eq!((copied, bytes_of_copied), (tied.clone(), bytes));
    let untied = config.replace(r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    assert_ne!(untied, config);
    let (want, _) = logits(write(&other, &untied).path(), false);
    assert_ne!(want, tied);
    let different = write(&other, &config);
    assert_eq!(logits(different.path(), false).0, want);
    assert_eq!(logits(different.path(), true).0, want);
}

#[test]
fn a_rank_reads_its_share_and_what_every_rank_holds() {
    // Norms, and KV heads held by several ranks, are read by more than one; nothing else is.
    for name in fixtures() {
        for &world_size in world_sizes(name) {
            let reports =
                on_loopback(world_size, |group| *Llama::load(&folder(name), None, group).unwrap().report());
            let total = reports[0].checkpoint_bytes;
            let config = LlamaConfig::from_folder(&folder(name)).unwrap();
            let size = if is_half(name) { 2 } else { 4 };
            let kv = 2 * config.kv_heads * config.head_dim * (config.hidden + usize::from(config.qkv_bias));
            let copies = world_size.saturating_sub(config.kv_heads) / config.kv_heads.min(world_size);
            let biases = usize::from(config.output_bias) + usize::from(config.mlp_bias);
            let norms = if config.head_norms { 2 * config.layers * config.head_dim } else { 0 };
            let whole = (2 * config.layers + 1 + biases * config.layers) * config.hidden + norms;
            let again = (kv * copies * config.layers + whole * (world_size - 1)) * size;
            let read: u64 = reports.iter().map(|r| r.bytes_read).sum();
            assert_eq!(read, total + again as u64, "{name}, world {world_size}");
        }
    }
}

#[test]
fn a_forward_pass_takes_two_all_reduces_a_layer_one_for_the_embedding_and_one_all_gather() {
    for world_size in [1, 2, 4] {
        on_loopback(world_size, |group| {
            let model = Arc::new(Llama::load(&folder("llama-gqa"), None, group).unwrap());
            let mut decoder = model.decoder(CacheSize::full(1, 8), Passes::Graph).unwrap();
            for tokens in [&[1, 2, 3][..], &[4]] {
                group.profile().clear();
                decoder.prefill(0, tokens, group).unwrap();
                let profile = group.profile();
                assert_eq!(profile.calls("all_reduce"), 2 * model.config().layers as u64 + 1);
                assert_eq!(profile.calls("all_gather"), 1);
                assert_eq!(profile.rows().iter().map(|r| r.calls).sum::<u64>(), 6);
            }
        });
    }
}

#[test]
fn a_world_size_that_does_not_fit_is_refused_with_those_that_do() {
    let results = on_loopback(2, |group| Llama::load(&folder("heads-6"), None, group).unwrap_err());
    for error in results {
        assert!(matches!(error, Error::Configuration(_)), "{error}");
        assert!(error.to_string().contains("legal sizes for this model: 1, 3, 6"), "{error}");
    }
    let errors =
        on_loopback(3, |group| Llama::load(&folder("llama-mha"), None, group).unwrap_err().to_string());
    assert_eq!(
        errors[0],
        "configuration: world size 3 does not divide 8 attention heads; legal sizes for this model: 1, 2, 4, 8"
    );
}

#[test]
fn the_tokenizer_gives_the_reference_ids_and_text() {
    let tokenizer = Tokenizer::open(&folder("llama-mha")).unwrap().unwrap();
    let text = std::fs::read_to_string(folder("llama-mha").join("tokenizer_expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |key: &str| -> Vec<u32> { serde_json::from_value(expected[key].clone()).unwrap() };
    let text = |key: &str| expected[key].as_str().unwrap();
    assert_eq!(tokenizer.encode(text("text")).unwrap(), ids("ids"));
    assert_eq!(tokenizer.decode(&ids("ids")).unwrap(), text("text"));
    assert_eq!(tokenizer.decode(&ids("generated_ids")).unwrap(), text("generated_text"));
    assert!(Tokenizer::open(&folder("llama-gqa")).unwrap().is_none());
}
