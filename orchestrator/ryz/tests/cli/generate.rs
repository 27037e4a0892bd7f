//! `ryz generate` as a user meets it: the fixtures' logits and tokens as `transformers` computes them, and wrong uses.

use std::path::Path;

use ryzanstein_tests::fixtures::{Expected, fixtures, folder, logits, world_sizes};
use ryzanstein_tests::gpu::{need, some_gpus};
use ryzanstein_tests::{distance, greatest};

use crate::support::{Run, text};

struct Outcome {
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// Largest difference of a logit, relative to the largest logit.
    difference: f32,
}

/// Generates 25 tokens from a fixture's prompt on `ranks` processes.
fn generate(fixture: &str, ranks: usize, backend: &str, more: &[&str]) -> Outcome {
    let out = tempfile::tempdir().expect("a temporary folder");
    let file = out.path().join("logits.safetensors");
    let expected = Expected::read(fixture);
    let prompt: Vec<String> = expected.prompt.iter().map(ToString::to_string).collect();
    let (model, ranks, prompt) = (folder(fixture), ranks.to_string(), prompt.join(","));
    let mut arguments = vec!["generate", "--model", model.to_str().expect("a path"), "--world-size", &ranks];
    arguments.extend(["--backend", backend]);
    arguments.extend(["--token-ids", &prompt, "--max-new-tokens", "25", "--logits-out"]);
    arguments.push(file.to_str().expect("a path"));
    arguments.extend(more);
    let output = Run::new(&arguments, &[]).finish();
    assert!(output.status.success(), "{fixture} on {ranks}: {}", text(&output.stderr));
    let line: serde_json::Value = serde_json::from_str(&text(&output.stdout)).expect("one line of JSON");
    let tokens = serde_json::from_value(line["token_ids"].clone()).expect("tokens");
    let (shape, got) = logits(&file);
    assert_eq!(shape, [expected.input().len(), expected.vocabulary], "{fixture} on {ranks}");
    let difference = distance(&got, &expected.logits) / greatest(&expected.logits);
    Outcome { tokens, logits: got, difference }
}

/// Compares a fixture's logits and tokens with those of `transformers`.
fn compare(fixture: &str, ranks: usize, backend: &str) {
    let outcome = generate(fixture, ranks, backend, &["--dtype", "f32"]);
    assert!(outcome.difference <= 1e-4, "{fixture} on {ranks}: {:e}", outcome.difference);
    assert_eq!(outcome.tokens, Expected::read(fixture).tokens, "{fixture} on {ranks}");
}

/// On processors, whatever GPUs this machine has. `oracle` has each fixture at every world size, with ranks that are threads.
#[test]
fn each_fixture_and_each_number_of_ranks_computes_what_transformers_does() {
    let largest = |fixture| *world_sizes(fixture).last().expect("a size");
    let fewer = [("llama-mha", 1), ("llama-gqa", 2), ("heads-6", 3)];
    for (fixture, ranks) in fixtures().map(|fixture| (fixture, largest(fixture))).chain(fewer) {
        compare(fixture, ranks, "tcp");
    }
}

#[test]
#[ignore = "needs 1 GPU"]
fn a_process_with_a_gpu_computes_what_transformers_does() {
    need(1);
    compare("llama-gqa", 1, "nccl");
}

/// `oracle` has the other fixtures, with ranks that are threads.
#[test]
#[ignore = "needs 2 GPUs"]
fn processes_with_a_gpu_each_compute_what_transformers_does() {
    let gpus = some_gpus();
    for ranks in [2, 4].into_iter().filter(|ranks| *ranks <= gpus) {
        compare("llama-gqa", ranks, "nccl");
    }
}

#[test]
fn sixteen_bit_models_in_their_own_type_stay_within_five_hundredths() {
    for fixture in ["llama-gqa", "qwen2", "llama3-rope"] {
        for ranks in [1, 4] {
            let outcome = generate(fixture, ranks, "tcp", &[]);
            assert!(outcome.difference <= 5e-2, "{fixture} on {ranks}: {:e}", outcome.difference);
            assert_eq!(outcome.tokens, Expected::read(fixture).tokens, "{fixture} on {ranks}");
        }
    }
}

#[test]
fn the_digest_of_logits_is_the_same_on_all_numbers_of_ranks_with_invariant_numerics_alone() {
    let digest = |ranks: &str, numerics: &str, more: &[(&str, &str)]| {
        let model = folder("llama-gqa");
        let mut arguments = vec!["generate", "--model", model.to_str().expect("a path"), "-n", ranks];
        arguments.extend([
            "--backend",
            "tcp",
            "--token-ids",
            "1,2,3,4,5,6,7,8",
            "--max-new-tokens",
            "12",
            "--logits-digest",
        ]);
        let environment = [&[("RYZ_MODEL__NUMERICS", numerics)], more].concat();
        let output = Run::new(&arguments, &environment).finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let line: serde_json::Value = serde_json::from_str(&text(&output.stdout)).expect("one line of JSON");
        line["logits_sha256"].as_str().expect("a digest").to_owned()
    };
    let alone = digest("1", "invariant", &[]);
    assert_eq!(alone.len(), 64);
    for ranks in ["2", "4", "8"] {
        assert_eq!(digest(ranks, "invariant", &[]), alone, "{ranks} ranks");
    }
    let sockets =
        [("RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY", "false"), ("RYZ_LAYOUT__PIPELINE_PARALLEL", "2")];
    assert_eq!(digest("4", "invariant", &sockets), alone);
    assert_ne!(digest("2", "fast", &[]), digest("1", "fast", &[]));
}

#[test]
fn a_check_of_any_number_of_ranks_passes_with_invariant_numerics() {
    let environment = [("RYZ_MODEL__NUMERICS", "invariant")];
    let output = Run::new(&["check", "-n", "3", "--backend", "tcp", "--invariant"], &environment).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("the same bits at every size"), "{}", text(&output.stdout));
}

#[test]
fn a_number_of_ranks_that_invariant_numerics_cannot_have_is_refused_before_anything_is_started() {
    let model = folder("mistral-window");
    let arguments = ["generate", "--model", model.to_str().expect("a path"), "-n", "8", "--token-ids", "1"];
    let refused = |numerics| {
        let output = Run::new(&arguments, &[("RYZ_MODEL__NUMERICS", numerics)]).finish();
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    assert!(refused("invariant").contains("legal sizes for this model: 1, 2, 4"));
    assert!(refused("exact").contains("expected one of fast, invariant"));
}

#[test]
fn a_prompt_in_words_is_answered_in_words() {
    let expected: serde_json::Value = serde_json::from_slice(
        &std::fs::read(folder("llama-mha").join("tokenizer_expected.json")).expect("the expectation"),
    )
    .expect("JSON");
    let model = folder("llama-mha");
    let arguments = [
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--world-size",
        "2",
        "--backend",
        "tcp",
        "--max-new-tokens",
        "25",
        "--prompt",
    ];
    let mut arguments = arguments.to_vec();
    arguments.push(expected["text"].as_str().expect("a text"));
    let output = Run::new(&arguments, &[]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line: serde_json::Value = serde_json::from_str(&text(&output.stdout)).expect("one line of JSON");
    assert!(line["text"].is_string(), "{line}");
    assert_eq!(line["token_ids"].as_array().expect("tokens").len(), 25);
}

/// A model whose tokenizer marks spaces, as those of Llama 2 and Mistral do.
fn model_of_words() -> tempfile::TempDir {
    let model = copy_of("llama-mha");
    let vocab: serde_json::Map<_, _> = (0..100).map(|id| (format!("▁w{id}"), id.into())).collect();
    let space = serde_json::json!({
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true
    });
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": space, "decoder": space,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "▁w0" },
    });
    std::fs::write(model.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    model
}

#[test]
fn the_text_of_the_json_is_that_which_is_streamed() {
    let model = model_of_words();
    let run = |more: &[&str]| {
        let arguments = ["generate", "--model", model.path().to_str().unwrap(), "--backend", "tcp"];
        let prompt = ["--prompt", "w3 w4", "--max-new-tokens", "12", "--ignore-end"];
        let output = Run::new(&[&arguments[..], &prompt, more].concat(), &[]).finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let json = |more: &[&str]| -> serde_json::Value { serde_json::from_str(&run(more)).expect("JSON") };
    let whole = json(&[]);
    let words = whole["token_ids"].as_array().expect("tokens").iter().map(|id| format!(" w{id}"));
    let words: Vec<String> = words.collect();
    assert_eq!(whole["text"], words.concat());
    assert_eq!(run(&["--format", "text"]), format!("w3 w4{}\n", words.concat()));
    // The stop string begins in one token and ends in the next.
    let stop = format!("{}{}", &words[4][2..], words[5]);
    let stopped = json(&["--stop", &stop]);
    let before = words.concat().split(&stop).next().unwrap().to_owned();
    assert_eq!((&stopped["text"], &stopped["stop"]), (&before.clone().into(), &"stop_text".into()));
    assert_eq!(run(&["--stop", &stop, "--format", "text"]), format!("w3 w4{before}\n"));
}

#[test]
fn the_stop_strings_of_the_model_end_its_texts_unless_ends_are_ignored() {
    let model = model_of_words();
    let run = |ranks: &str, more: &[&str]| -> serde_json::Value {
        let arguments =
            ["generate", "--model", model.path().to_str().unwrap(), "--backend", "tcp", "-n", ranks];
        let prompt = ["--prompt", "w3 w4", "--max-new-tokens", "12"];
        let output = Run::new(&[&arguments[..], &prompt, more].concat(), &[]).finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_str(&text(&output.stdout)).expect("JSON")
    };
    let whole = run("1", &[]);
    let answer = whole["text"].as_str().expect("text");
    let fifth = answer.split(' ').nth(5).expect("words");
    let generation = serde_json::json!({ "eos_token_id": 99, "stop_strings": fifth });
    std::fs::write(model.path().join("generation_config.json"), generation.to_string()).expect("written");
    for (ranks, more) in [("1", &[][..]), ("2", &["--load-from-root"])] {
        let stopped = run(ranks, more);
        let before = &answer[..answer.find(fifth).expect("the word")];
        assert_eq!((&stopped["text"], &stopped["stop"]), (&before.into(), &"stop_text".into()), "{more:?}");
    }
    assert_eq!(run("1", &["--ignore-end"])["text"], answer);
}

#[test]
fn ranks_in_different_time_zones_get_one_prompt_from_a_template_that_asks_for_the_time() {
    let model = model_of_words();
    let template = "{{ strftime_now('w%-H w%-M') }}{% for m in messages %} {{ m.content }}{% endfor %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let script = format!(
        "TZ=HERE$((5 * RANK)) exec {} generate --model {} --backend tcp --chat --system w5 --prompt w6",
        env!("CARGO_BIN_EXE_ryz"),
        model.path().display()
    );
    let output = Run::launch(&["-n", "2"], &script).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("\"prompt_tokens\":4"), "{}", text(&output.stdout));
}

#[test]
fn penalties_keep_tokens_from_coming_again() {
    let tokens = |more: &[&str]| {
        let outcome = generate("llama-mha", 2, "tcp", more);
        let distinct: std::collections::BTreeSet<u32> = outcome.tokens.iter().copied().collect();
        (outcome.tokens.len(), distinct.len())
    };
    assert_eq!(tokens(&["--repetition-penalty", "1000"]), (25, 25));
    let (count, without) = tokens(&["--frequency-penalty", "0"]);
    assert!(without < count);
    assert!(tokens(&["--frequency-penalty", "2"]).1 > without);
    assert!(tokens(&["--presence-penalty", "-2"]).1 <= without);
    let model = folder("llama-mha");
    for (flag, value) in
        [("--repetition-penalty", "0"), ("--presence-penalty", "-2.5"), ("--frequency-penalty", "3")]
    {
        let name = flag.trim_start_matches("--").split('-').next().unwrap();
        let (code, said) =
            wrong(&["generate", "--model", model.to_str().unwrap(), "--token-ids", "1", flag, value]);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(name) && said.contains(value), "{said}");
    }
}

#[test]
fn slow_calls_are_told_of_but_not_those_that_prove_a_group() {
    let model = folder("llama-mha");
    let mut arguments = vec!["generate", "--model", model.to_str().unwrap(), "--world-size", "2"];
    arguments.extend(["--backend", "tcp", "--token-ids", "1,2,3", "--max-new-tokens", "2"]);
    let output = Run::new(&arguments, &[("RYZ_PROFILE__SLOW_CALL", "1ns")]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    let slow: Vec<&str> = said.lines().filter(|line| line.contains("slow collective")).collect();
    assert!(slow.iter().any(|line| line.contains("all_reduce(sum)")), "{said}");
    // A group proves itself with 257 and 4099 numbers.
    let proofs = slow.iter().filter(|line| line.contains("bytes=1028 ") || line.contains("bytes=16396 "));
    assert_eq!(proofs.count(), 0, "{said}");
}

/// Runs a wrong use and returns its exit code with what it said.
fn wrong(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Run::new(arguments, &[]).finish();
    (output.status.code(), text(&output.stderr))
}

pub(crate) fn copy_of(fixture: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(folder(fixture)).expect("a folder") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, copy.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    copy
}

#[test]
fn input_that_the_model_can_never_take_is_refused_before_anything_is_loaded() {
    // Damaged weights, which a rank would name if it read them.
    let model = copy_of("llama-mha");
    std::fs::write(model.path().join("model.safetensors"), "").expect("written");
    let refused = |more: &[&str], words: &[&str]| {
        let model = ["--model", model.path().to_str().unwrap(), "--backend", "tcp"];
        let ranks =
            |ranks: &'static str| [&["generate"], &model[..], &["--world-size", ranks], more].concat();
        // Of a launcher's ranks each refuses.
        let launched = [&["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_ryz")], &ranks("2")[..]].concat();
        for arguments in [ranks("1"), ranks("2"), launched] {
            let (code, said) = wrong(&arguments);
            assert_eq!(code, Some(2), "{said}");
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
            assert!(!said.contains("safetensors"), "{said}");
        }
    };
    refused(
        &["--token-ids", "1,100"],
        &["token 100 is not in the vocabulary of 100", "config.json", "0 to 99"],
    );
    // A prompt of 3 and 254 more need 256 positions: the last new one needs none.
    refused(
        &["--token-ids", "1,2,3", "--max-new-tokens", "255"],
        &[
            "--max-new-tokens 255 behind a prompt of 3 tokens needs 257 positions, and the model has 256",
            "at most --max-new-tokens 254",
        ],
    );
    let long = vec!["1"; 257].join(",");
    refused(&["--token-ids", &long], &["the prompt has 257 tokens, and the model takes 256", "shorten"]);
}

#[test]
fn as_many_tokens_as_the_model_has_room_for_are_made() {
    let model = folder("llama-mha");
    let mut arguments =
        vec!["generate", "--model", model.to_str().unwrap(), "--backend", "tcp", "--ignore-end"];
    arguments.extend(["--token-ids", "1,2,3", "--max-new-tokens", "254"]);
    let output = Run::new(&arguments, &[]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line: serde_json::Value = serde_json::from_str(&text(&output.stdout)).expect("one line of JSON");
    assert_eq!(line["token_ids"].as_array().expect("tokens").len(), 254);
}

#[test]
fn a_file_of_logits_is_checked_before_anything_starts_and_keeps_its_content_until_there_are_others() {
    // Damaged weights, which a rank would be the first to read.
    let model = copy_of("llama-mha");
    std::fs::write(model.path().join("model.safetensors"), "").expect("written");
    // Of an earlier run.
    let kept = model.path().join("kept.safetensors");
    std::fs::write(&kept, "logits").expect("written");
    let missing = model.path().join("not there").join("logits.safetensors");
    for ranks in ["1", "2"] {
        let generate = |logits: &Path| {
            let (model, logits) = (model.path().to_str().unwrap(), logits.to_str().unwrap());
            wrong(&[
                "generate",
                "--model",
                model,
                "--world-size",
                ranks,
                "--token-ids",
                "1,2",
                "--logits-out",
                logits,
            ])
        };
        let (code, said) = generate(&missing);
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.starts_with("error: ") && said.contains("--logits-out") && said.contains("not there"),
            "{said}"
        );
        let (code, said) = generate(&kept);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("/model.safetensors: "), "{said}");
        assert_eq!(std::fs::read_to_string(&kept).expect("read"), "logits");
    }
}

#[test]
fn stages_that_do_not_fit_are_refused_before_anything_is_started() {
    let model = folder("llama-gqa");
    let refused = |ranks, stages| {
        let model = model.to_str().unwrap();
        let more = ["-n", ranks, "--pipeline-parallel", stages];
        wrong(&[&["generate", "--model", model, "--token-ids", "1", "--backend", "tcp"][..], &more].concat())
    };
    let (code, said) = refused("3", "3");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("3 stages does not fit the 2 layers") && said.contains("to at most 2"), "{said}");
    let (code, said) = refused("3", "2");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("pipeline_parallel 2") && said.contains("3 ranks"), "{said}");
}

#[test]
fn stages_generate_what_one_does_with_the_same_logits() {
    for (ranks, stages) in [(2, "2"), (4, "2")] {
        let whole = generate("llama-gqa", ranks / 2, "tcp", &["--dtype", "f32"]);
        for more in [&[][..], &["--load-from-root"]] {
            let more = [&["--dtype", "f32", "--pipeline-parallel", stages][..], more].concat();
            let divided = generate("llama-gqa", ranks, "tcp", &more);
            assert_eq!(divided.tokens, whole.tokens, "{ranks} ranks, {more:?}");
            assert_eq!(divided.logits, whole.logits, "{ranks} ranks, {more:?}");
        }
    }
}

#[test]
fn a_rank_without_the_folder_gets_weights_settings_and_tokenizer_from_rank_0() {
    let model = model_of_words();
    let run = |stages: u32, flags: &str| {
        let script = format!(
            "case $RANK in 0) model={}/;; *) model=/no/such/model/;; esac
            exec {} generate --model $model --backend tcp --prompt 'w3 w4' --max-new-tokens 12 --ignore-end \\
            --pipeline-parallel {stages} {flags}",
            model.path().display(),
            env!("CARGO_BIN_EXE_ryz"),
        );
        Run::launch(&["-n", "4"], &script).finish()
    };
    let told = |stages, flags: &str| {
        let output = run(stages, flags);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let line = text(&output.stdout);
        let line = line.split_once('{').expect("a line of JSON").1;
        let line: serde_json::Value = serde_json::from_str(&format!("{{{line}")).expect("JSON");
        let read: Vec<u64> = line["load"]
            .as_array()
            .expect("loads")
            .iter()
            .map(|load| load["bytes_read"].as_u64().expect("bytes"))
            .collect();
        assert!(read[0] > 0 && read[1..].iter().all(|bytes| *bytes == 0), "{read:?}");
        line["text"].as_str().expect("text").to_owned()
    };
    let answer = told(1, "--load-from-root");
    assert_eq!(told(2, "--load-from-root"), answer);
    let word = answer.split(' ').nth(5).expect("twelve words");
    let stopped = told(2, &format!("--load-from-root --stop {word}"));
    assert!(answer.starts_with(&stopped) && stopped.len() < answer.len(), "{stopped} of {answer}");
    // Without the flag, every rank looks for the folder.
    let output = run(1, "");
    assert!(text(&output.stderr).contains("/no/such/model"), "{}", text(&output.stderr));
    assert!(!output.status.success());
}
