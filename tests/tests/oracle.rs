//! Small random checkpoints against what `transformers` computes from them (see `fixtures/README.md`), on processors and on GPUs.

use std::iter;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ryzanstein_config::Numerics;
use ryzanstein_process_group::{DType, ProcessGroup, Rank};
use ryzanstein_tensor_parallel::compute::instruction_set;
use ryzanstein_tensor_parallel::{
    CacheSize, Error, GenerateOptions, Llama, LlamaConfig, Passes, Tokenizer, legal_world_sizes,
};
use ryzanstein_tests::batch::{greedy, mixed, staggered};
use ryzanstein_tests::fixtures::{Expected, fixtures, folder, rope_fixtures, world_sizes};
use ryzanstein_tests::gpu::{need, on_gpus};
use ryzanstein_tests::{distance, greatest, near, on_loopback};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};

/// Where ranks compute, and how many there are at most.
#[derive(Clone, Copy)]
struct Place {
    on_gpus: bool,
    most: usize,
}

const HOST: Place = Place { on_gpus: false, most: 8 };

impl Place {
    /// As many GPUs as there are.
    fn gpus() -> Self {
        Self { on_gpus: true, most: need(1).min(8) }
    }

    /// Runs a job on each rank and returns the results, which must be the same.
    fn run<R: Send + PartialEq>(self, ranks: usize, job: impl Fn(&mut ProcessGroup) -> R + Sync) -> R {
        let mut all = if self.on_gpus { on_gpus(ranks, job) } else { on_loopback(ranks, job) };
        let first = all.remove(0);
        assert!(all.iter().all(|other| *other == first), "ranks disagree");
        first
    }

    fn world_sizes(self, name: &str) -> Vec<usize> {
        let config = LlamaConfig::from_folder(&folder(name)).unwrap();
        legal_world_sizes(&config, self.most, Numerics::Fast)
    }

    /// [`run`](Self::run)s a job with each fixture's model at each world size.
    fn each<R: Send + PartialEq>(
        self,
        names: impl IntoIterator<Item = &'static str>,
        dtype: Option<DType>,
        job: impl Fn(&Arc<Llama>, &Expected, &mut ProcessGroup) -> R + Sync,
    ) {
        for name in names {
            let expected = Expected::read(name);
            for ranks in self.world_sizes(name) {
                println!("{name}, {dtype:?}, {ranks} ranks");
                self.run(ranks, |group| {
                    let model = Arc::new(Llama::load(&folder(name), dtype, group).unwrap());
                    job(&model, &expected, group)
                });
            }
        }
    }

    /// Checks that `f32` logits are about those of the reference.
    #[track_caller]
    fn close(self, got: &[f32], want: &[f32]) {
        let tolerance = if self.on_gpus { 1e-4 } else { 1e-5 };
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let is_close = (got - want).abs() <= tolerance + tolerance * want.abs();
            assert!(is_close, "logit {i}: {got} and should be {want}");
        }
    }

    /// Logits of all positions at once; of the prompt and then token by token, in passes that are launched, and on GPUs also in
    /// recorded ones.
    fn logits(self, model: &Arc<Llama>, expected: &Expected, group: &mut ProcessGroup) -> Vec<Vec<f32>> {
        let input = expected.input();
        let (prompt, rest) = input.split_at(expected.prompt.len());
        let decoder = |passes| model.decoder(CacheSize::full(1, input.len()), passes).unwrap();
        let mut whole = decoder(Passes::Eager);
        let at_once = whole.logits(0, &input, group).unwrap();
        assert_eq!(at_once.shape(), [input.len(), expected.vocabulary]);
        let mut all = vec![at_once.values().unwrap().into_owned()];
        let kinds = if self.on_gpus { &[Passes::Eager, Passes::Graph][..] } else { &[Passes::Eager] };
        for passes in kinds {
            let mut decoder = decoder(*passes);
            let mut values = decoder.logits(0, prompt, group).unwrap().values().unwrap().into_owned();
            decoder.clear(0);
            let last = decoder.prefill(0, prompt, group).unwrap();
            // One row is a product of another kind than many.
            near(&last.values().unwrap(), &values[values.len() - expected.vocabulary..]);
            for token in rest {
                let next = decoder.decode(&[(0, *token)], group).unwrap();
                values.extend_from_slice(&next.values().unwrap());
            }
            all.push(values);
        }
        assert!(
            all[1..].iter().all(|values| *values == all[1]),
            "a recorded pass differs from the eager one"
        );
        all
    }

    fn check_f32_logits(self) {
        self.each(fixtures().chain(rope_fixtures()), Some(DType::F32), |model, expected, group| {
            let all = self.logits(model, expected, group);
            let stepwise = expected.stepwise.as_ref().unwrap_or(&expected.logits);
            for (got, want) in all.iter().zip(iter::once(&expected.logits).chain(iter::repeat(stepwise))) {
                self.close(got, want);
            }
            all
        });
    }

    /// Checks that logits of models in a 16-bit type, by default their own, are near those of the reference.
    fn check_sixteen_bits(self, names: impl IntoIterator<Item = &'static str>, dtype: Option<DType>) {
        self.each(names, dtype, |model, expected, group| {
            let all = self.logits(model, expected, group);
            for got in &all {
                let error = distance(got, &expected.logits) / greatest(&expected.logits);
                println!("{error:.5} of the greatest logit");
                assert!(error <= 5e-2, "off by {error} of the greatest logit");
            }
            all
        });
    }

    /// Checks that greedy decoding gives the tokens of the reference. On GPUs, by the paths that the group chooses, with the norm
    /// in the kernel of the sum where it has that, and by each path that it has.
    fn check_greedy(
        self,
        names: impl IntoIterator<Item = &'static str>,
        dtype: Option<DType>,
        passes: Passes,
    ) {
        self.each(names, dtype, |model, expected, group| {
            let max_new_tokens = expected.tokens.len();
            let options = GenerateOptions { max_new_tokens, passes, ..GenerateOptions::default() };
            let forced = if self.on_gpus && group.world_size() > 1 { group.paths() } else { vec![] };
            for path in iter::once(None).chain(forced.into_iter().map(Some)) {
                group.force_path(path).unwrap();
                let tokens = model.generate(&expected.prompt, &options, group).unwrap().tokens;
                assert_eq!(tokens, expected.tokens, "{passes:?}, {path:?}");
            }
        });
    }

    /// Compares the positions and logits that `run` returns with the reference.
    fn check_positions(
        self,
        run: impl Fn(&Arc<Llama>, &Expected, &mut ProcessGroup) -> Vec<(usize, Vec<f32>)> + Sync,
    ) {
        self.each(fixtures(), Some(DType::F32), |model, expected, group| {
            let rows = run(model, expected, group);
            for (position, got) in &rows {
                self.close(got, expected.row(*position));
            }
            rows
        });
    }

    /// Checks that a model which only the last rank can read has the logits of the reference on all.
    fn check_one_reader(self, name: &str, ranks: usize, limit: f32) {
        let expected = Expected::read(name);
        let root = Rank(ranks as u32 - 1);
        self.run(ranks, |group| {
            let directory = (group.rank() == root).then(|| folder(name));
            let model = Llama::load_from_root(directory.as_deref(), Some(DType::F32), root, group).unwrap();
            let (model, input) = (Arc::new(model), expected.input());
            let mut decoder = model.decoder(CacheSize::full(1, input.len()), Passes::Eager).unwrap();
            let got = decoder.logits(0, &input, group).unwrap();
            assert!(distance(&got.values().unwrap(), &expected.logits) <= limit, "{name}");
            assert_eq!(model.report().bytes_read > 0, group.rank() == root, "{name}");
        });
    }
}

/// The fixtures in a 16-bit type.
fn halves() -> impl Iterator<Item = &'static str> {
    fixtures().filter(|name| is_half(name))
}

fn is_half(name: &str) -> bool {
    Expected::read(name).native.is_some()
}

#[test]
fn the_legal_world_sizes_are_those_the_fixtures_were_made_for() {
    for name in fixtures().chain(rope_fixtures()) {
        assert_eq!(HOST.world_sizes(name), world_sizes(name), "{name}");
    }
}

#[test]
fn f32_logits_equal_the_reference_at_every_position_and_world_size() {
    HOST.check_f32_logits();
}

#[test]
#[ignore = "needs a GPU"]
fn f32_logits_on_gpus_equal_the_reference_at_every_position() {
    Place::gpus().check_f32_logits();
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
fn sixteen_bit_models_in_their_own_type_stay_near_the_f32_reference_and_choose_its_tokens() {
    HOST.check_sixteen_bits(halves(), None);
    HOST.check_greedy(halves(), None, Passes::Graph);
}

#[test]
fn an_f32_model_can_be_run_in_either_sixteen_bit_type() {
    for dtype in [DType::F16, DType::BF16] {
        Place { most: 2, ..HOST }.check_sixteen_bits(["llama-mha"], Some(dtype));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn sixteen_bit_models_on_gpus_stay_near_the_f32_reference() {
    for dtype in [DType::F16, DType::BF16] {
        Place { most: 1, ..Place::gpus() }.check_sixteen_bits(fixtures(), Some(dtype));
    }
}

#[test]
fn greedy_decoding_gives_the_reference_tokens_on_every_rank_and_world_size() {
    HOST.check_greedy(fixtures().chain(rope_fixtures()), Some(DType::F32), Passes::Graph);
}

#[test]
#[ignore = "needs a GPU"]
fn greedy_decoding_on_gpus_gives_the_reference_tokens_recorded_or_not() {
    for passes in [Passes::Eager, Passes::Graph] {
        Place::gpus().check_greedy(fixtures(), Some(DType::F32), passes);
        Place::gpus().check_greedy(halves(), None, passes);
    }
}

#[test]
fn sequences_decoded_together_have_the_logits_of_the_reference_at_every_position() {
    HOST.check_positions(|model, expected, group| staggered(model, expected, Passes::Graph, group));
}

#[test]
#[ignore = "needs a GPU"]
fn sequences_decoded_together_on_gpus_have_the_logits_of_the_reference() {
    Place::gpus().check_positions(|model, expected, group| {
        let eager = staggered(model, expected, Passes::Eager, group);
        let recorded = staggered(model, expected, Passes::Graph, group);
        assert!(eager == recorded, "recorded passes differ from eager ones");
        recorded
    });
}

#[test]
fn prompts_next_tokens_forks_and_truncated_sequences_in_one_pass_have_the_logits_of_the_reference() {
    HOST.check_positions(|model, expected, group| mixed(model, expected, Passes::Graph, group));
}

#[test]
#[ignore = "needs a GPU"]
fn prompts_next_tokens_forks_and_truncated_sequences_in_one_pass_have_the_logits_of_the_reference_on_gpus() {
    Place::gpus().check_positions(|model, expected, group| {
        let all = [Passes::Eager, Passes::Graph].map(|passes| mixed(model, expected, passes, group)).concat();
        for (position, got) in &all {
            near(got, expected.row(*position));
        }
        all
    });
}

#[test]
#[ignore = "needs a GPU"]
fn greedy_passes_that_start_before_their_tokens_are_known_choose_those_of_each_sequence_alone_on_gpus() {
    for name in fixtures() {
        let input = Expected::read(name).input();
        let prompts = [1, Expected::read(name).prompt.len(), 2, 5].map(|begun| input[..begun].to_vec());
        let options = GenerateOptions { max_new_tokens: 12, ..GenerateOptions::default() };
        let options = GenerateOptions { passes: Passes::Eager, ignore_end: true, ..options };
        Place::gpus().each([name], Some(DType::F32), |model, _, group| {
            let alone =
                prompts.each_ref().map(|prompt| model.generate(prompt, &options, group).unwrap().tokens);
            for passes in [Passes::Eager, Passes::Graph] {
                assert_eq!(greedy(model, &prompts, 12, passes, group), alone, "{passes:?}");
            }
            let mut host = ProcessGroup::loopback(1).remove(0);
            let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), &mut host).unwrap());
            let on_host = greedy(&model, &prompts, 12, Passes::Eager, &mut host);
            assert_eq!(on_host, alone, "other tokens than on the host");
            alone
        });
    }
}

#[test]
#[ignore = "needs a GPU"]
fn decoders_of_one_model_leave_each_others_results_alone() {
    Place::gpus().each(["llama-gqa"], Some(DType::F32), |model, expected, group| {
        let input = expected.input();
        let decoder = || model.decoder(CacheSize::full(1, input.len()), Passes::Graph).unwrap();
        let (mut a, mut b) = (decoder(), decoder());
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
            near(&of_a.values().unwrap(), expected.row(at + ahead + 2));
            near(&of_b.values().unwrap(), expected.row(at));
        }
    });
}

#[test]
fn a_model_that_only_one_rank_can_read_is_the_same_on_all() {
    for (name, ranks) in [("llama-gqa", 4), ("llama-bias-headdim", 2), ("heads-6", 3)] {
        HOST.check_one_reader(name, ranks, 4e-5);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_model_that_only_one_rank_can_read_is_the_same_on_all_gpus() {
    let sizes = Place::gpus().world_sizes("llama-gqa");
    Place::gpus().check_one_reader("llama-gqa", sizes[sizes.len() - 1], 1e-4);
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
