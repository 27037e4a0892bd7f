use std::path::Path;

use ryzanstein_config::Numerics;
use serde_json::{Value, json};

use super::plan::unused;
use super::*;
use crate::error::{Error, Result};
use crate::rotary::Rotary;

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 100, "eos_token_id": 2,
    })
}

/// Parses the base configuration with some keys changed.
fn with(changes: &Value) -> Result<LlamaConfig> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    LlamaConfig::from_json(Path::new("config.json"), &config.to_string(), None)
}

fn accepted(changes: &Value) -> LlamaConfig {
    with(changes).unwrap()
}

fn refused(changes: &Value) -> String {
    with(changes).unwrap_err().to_string()
}

fn refused_text(config: &str) -> String {
    LlamaConfig::from_json(Path::new("config.json"), config, None).unwrap_err().to_string()
}

#[test]
fn missing_keys_have_the_defaults_of_the_architecture() {
    let llama = with(&json!({})).unwrap();
    assert_eq!((llama.head_dim, llama.norm_epsilon, llama.max_positions), (8, 1e-6, 2048));
    assert_eq!(llama.rotary, Rotary::new(8, 10_000.0));
    assert!(!llama.qkv_bias && !llama.output_bias && !llama.mlp_bias && !llama.tied_embeddings);
    assert_eq!((llama.sliding_windows, llama.eos_tokens), (vec![None; 2], vec![2]));

    let mistral = with(&json!({ "architectures": ["MistralForCausalLM"] })).unwrap();
    assert_eq!(mistral.sliding_windows, [Some(4096); 2]);
    let mistral = with(&json!({ "architectures": ["MistralForCausalLM"], "sliding_window": null })).unwrap();
    assert_eq!(mistral.sliding_windows, [None; 2]);

    let qwen2 =
        json!({ "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 1 });
    let mut qwen2 = qwen2;
    let plain = with(&qwen2).unwrap();
    assert!(plain.qkv_bias && !plain.output_bias && plain.sliding_windows == [None; 2]);
    qwen2["use_sliding_window"] = true.into();
    assert_eq!(with(&qwen2).unwrap().sliding_windows, [None, Some(16)]);
    qwen2["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_eq!(with(&qwen2).unwrap().sliding_windows, [Some(16), None]);

    let mut qwen3 = json!({ "architectures": ["Qwen3ForCausalLM"] });
    let plain = with(&qwen3).unwrap();
    assert!(plain.head_norms && !plain.qkv_bias && !plain.output_bias && !plain.mlp_bias);
    assert_eq!((plain.head_dim, plain.max_positions), (128, 32_768));
    qwen3["attention_bias"] = true.into();
    let biased = with(&qwen3).unwrap();
    assert!(biased.qkv_bias && biased.output_bias && !biased.mlp_bias);
}

#[test]
fn rotary_settings_are_read_in_the_old_and_the_new_form() {
    let scaling = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    });
    let llama3 = |theta| Rotary::llama3(8, theta, 8.0, 128.0, [1.0, 4.0]);
    let mut old = scaling.clone();
    old["rope_type"] = "llama3".into();
    let config = with(&json!({ "rope_theta": 5e5, "rope_scaling": old })).unwrap();
    assert_eq!(config.rotary, llama3(5e5));
    let mut new = old;
    new["rope_theta"] = 7e4.into();
    let config = with(&json!({ "rope_parameters": new })).unwrap();
    assert_eq!(config.rotary, llama3(7e4));
    let linear = json!({ "type": "linear", "factor": 2 });
    // Both, of one meaning, and an empty object, which counts as missing.
    for more in [json!(null), json!({ "rope_type": "linear", "factor": 2, "rope_theta": 1e4 }), json!({})] {
        let config = with(&json!({ "rope_scaling": linear, "rope_parameters": more })).unwrap();
        assert_eq!(config.rotary, Rotary::linear(8, 1e4, 2.0));
    }
}

#[test]
fn missing_rotary_settings_are_those_of_transformers() {
    let scaling = |settings: Value| {
        let changes = json!({
            "max_position_embeddings": 64, "original_max_position_embeddings": settings["top"], "rope_scaling": settings,
        });
        let config = with(&changes).unwrap();
        (config.rotary, config.max_positions)
    };
    let yarn = |factor, amplitude, original| {
        Rotary::yarn(8, 1e4, factor, original, [32.0, 1.0], true).amplified(amplitude)
    };
    let inferred = 0.1 * 4f64.ln() + 1.0;
    let mut settings = json!({ "type": "yarn", "factor": 4 });
    assert_eq!(scaling(settings.clone()), (yarn(4.0, inferred, 64.0), 256));
    settings["original_max_position_embeddings"] = 32.into();
    assert_eq!(scaling(settings.clone()), (yarn(4.0, inferred, 32.0), 128));
    settings["factor"] = Value::Null;
    assert_eq!(scaling(settings.clone()), (yarn(2.0, 0.1 * 2f64.ln() + 1.0, 32.0), 64));
    // The key next to the object counts more.
    settings["top"] = 16.into();
    assert_eq!(scaling(settings.clone()), (yarn(4.0, inferred, 16.0), 64));
    settings["mscale"] = 2.into();
    settings["mscale_all_dim"] = 0.into();
    assert_eq!(scaling(settings.clone()), (yarn(4.0, inferred, 16.0), 64));
    settings["mscale_all_dim"] = 0.5.into();
    let ratio = (0.2 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
    assert_eq!(scaling(settings.clone()), (yarn(4.0, ratio, 16.0), 64));
    settings["attention_factor"] = 1.25.into();
    assert_eq!(scaling(settings), (yarn(4.0, 1.25, 16.0), 64));

    // With frequencies enough to tell one ramp from another.
    let ramp = |more: Value| {
        let mut settings = json!({ "type": "yarn", "factor": 4, "original_max_position_embeddings": 4096 });
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        with(&json!({ "head_dim": 128, "max_position_embeddings": 4096, "rope_scaling": settings }))
            .unwrap()
            .rotary
    };
    let of = |turns, truncate| Rotary::yarn(128, 1e4, 4.0, 4096.0, turns, truncate).amplified(inferred);
    assert_eq!(ramp(json!({})), of([32.0, 1.0], true));
    assert_eq!(ramp(json!({ "beta_fast": 16, "beta_slow": 2, "truncate": false })), of([16.0, 2.0], false));
    let all = [of([32.0, 1.0], true), of([16.0, 1.0], true), of([32.0, 2.0], true), of([32.0, 1.0], false)];
    assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");

    let (short, long) = (vec![1.0, 1.0, 2.0, 2.0], vec![1.0, 2.0, 3.0, 4.0]);
    let mut settings = json!({ "type": "longrope", "short_factor": short, "long_factor": long });
    let longrope =
        |amplitude, original| Rotary::longrope(8, 1e4, original, &short, &long).amplified(amplitude);
    assert_eq!(scaling(settings.clone()), (longrope(1.0, 64.0), 64));
    settings["original_max_position_embeddings"] = 16.into();
    let inferred = (1.0 + 4f64.ln() / 16f64.ln()).sqrt();
    assert_eq!(scaling(settings.clone()), (longrope(inferred, 16.0), 64));
    settings["factor"] = 8.into();
    settings["attention_factor"] = 1.5.into();
    assert_eq!(scaling(settings), (longrope(1.5, 16.0), 128));

    let dynamic = Rotary::dynamic(8, 1e4, 2.5, 64.0);
    assert_eq!(scaling(json!({ "type": "dynamic", "factor": 2.5 })), (dynamic, 160));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        (
            json!({ "architectures": ["MixtralForCausalLM"] }),
            "architecture `MixtralForCausalLM` is not supported",
        ),
        (json!({ "hidden_act": "gelu" }), "`hidden_act` `gelu` is not supported, only `silu`"),
        (json!({ "quantization_config": { "bits": 4 } }), "without quantization, or remove the key"),
        (
            json!({ "architectures": ["LlamaForCausalLM"], "model_type": "qwen2" }),
            "`architectures` has `LlamaForCausalLM` and `model_type` is `qwen2`",
        ),
        (
            json!({ "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 32 }),
            "`num_key_value_heads` 32 does not divide `num_attention_heads` 8",
        ),
        (
            json!({ "rope_scaling": { "rope_type": "ntk", "factor": 4.0 } }),
            "rope type `ntk` is not supported, only default, linear, dynamic, yarn, longrope, llama3",
        ),
        (json!({ "rope_scaling": { "rope_type": "yarn" } }), "`rope_scaling`: `factor` is missing"),
        (
            json!({ "rope_parameters": { "type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1] } }),
            "`rope_parameters`: `long_factor` must be a list of 4 positive numbers",
        ),
        (
            json!({ "rope_parameters": { "type": "longrope", "short_factor": [1, 0, 1, 1], "long_factor": [] } }),
            "`short_factor` must be a list of 4 positive numbers",
        ),
        (json!({ "rope_theta": 1e-300 }), "`rope_theta` 0.000"),
        (
            json!({ "rope_theta": 1, "rope_scaling": { "type": "yarn", "factor": 4 } }),
            "rope type yarn gives no finite",
        ),
        (
            json!({ "rope_scaling": { "type": "linear", "factor": 2 }, "rope_parameters": { "rope_theta": 1e4 } }),
            "`rope_parameters` and `rope_scaling` contradict each other",
        ),
        (json!({ "rope_scaling": { "type": "linear" } }), "`factor` is missing"),
        (json!({ "rope_scaling": { "type": "linear", "factor": -1 } }), "`factor` must be a positive number"),
        (
            json!({ "rope_scaling": { "type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1 } }),
            "`high_freq_factor` 1 must be greater than `low_freq_factor` 4",
        ),
        (
            json!({ "rope_parameters": { "full_attention": { "rope_theta": 1.0 } } }),
            "differs by kind of layer",
        ),
        (
            json!({ "transformers_weights": "mine.safetensors" }),
            "`transformers_weights` names `mine.safetensors`, and weights are read only from model.safetensors",
        ),
        (json!({ "stop_strings": [1] }), "`stop_strings` must be a text or a list of texts"),
        (json!({ "stop_strings": "" }), "`stop_strings` must be a text or a list of texts"),
        (json!({ "num_key_value_heads": 3 }), "does not divide `num_attention_heads` 8"),
        (json!({ "hidden_size": 60 }), "does not divide `hidden_size` 60"),
        (json!({ "head_dim": 7 }), "cannot be rotated in pairs"),
        (json!({ "hidden_size": "64" }), "`hidden_size` must be a positive whole number, and is \"64\""),
        (json!({ "is_causal": false }), "`is_causal` false is not supported"),
        (
            json!({ "per_layer_config": { "1": { "rms_norm_eps": 0.5 } } }),
            "`per_layer_config` is not supported",
        ),
        (json!({ "configuration_files": ["config.4.0.0.json"] }), "`configuration_files` names other files"),
    ];
    for (changes, expected) in cases {
        let message = refused(&changes);
        assert!(message.starts_with("config.json: ") && message.contains(expected), "{changes}: {message}");
    }
    for (key, limit) in [
        ("hidden_size", 1u64 << 28),
        ("intermediate_size", 1 << 28),
        ("num_hidden_layers", 4096),
        ("num_attention_heads", 65_536),
        ("head_dim", 65_536),
        ("vocab_size", 1 << 24),
        ("max_position_embeddings", 1 << 31),
    ] {
        let message = refused(&json!({ key: limit + 1 }));
        let expected = format!("`{key}` is {}, and {limit} is the most that is supported", limit + 1);
        assert!(message.contains(&expected), "{message}");
    }
    let broken = LlamaConfig::from_json(Path::new("config.json"), "{", None).unwrap_err();
    assert!(matches!(broken, Error::Model { .. }), "{broken}");
}

#[test]
fn values_that_no_model_has_are_refused_with_their_key() {
    let refused_as = |key: &str, value: &str| {
        let mut config = base();
        config[key] = "VALUE".into();
        // As text, so that it may be what only Python writes.
        refused_text(&config.to_string().replace("\"VALUE\"", value))
    };
    let sizes =
        ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"];
    for key in sizes {
        let mut without = base();
        without.as_object_mut().unwrap().remove(key);
        for said in [refused_text(&without.to_string()), refused_as(key, "null")] {
            let expected = format!("config.json: `{key}` is missing; fetch the config.json that belongs");
            assert!(said.starts_with(&expected), "{said}");
        }
    }
    let long = format!("\"{}\"", "x".repeat(100_000));
    let no_size = ["0", "-8", "1.5", "\"8\"", "[8]", "true", "{}", "NaN", &long];
    for (keys, values, expected) in [
        (&sizes[..], &no_size[..], "must be a positive whole number"),
        (&sizes, &["9223372036854775807"], "is 9223372036854775807, and"),
        (&["num_key_value_heads", "max_position_embeddings"], &["0"], "must be a positive whole number"),
        (&["rms_norm_eps"], &["-1e-6", "1e39", "\"1e-6\"", "NaN"], "must be a number from 0 on"),
        (&["rope_theta"], &["0", "Infinity"], "must be a positive number"),
        (&["rope_scaling"], &["3"], "must be an object"),
        (&["hidden_act"], &["1"], "must be a text"),
        (
            &["tie_word_embeddings", "attention_bias", "mlp_bias"],
            &["1", "\"yes\"", "[]"],
            "must be true or false",
        ),
        (
            &["eos_token_id"],
            &["\"x\"", "1.5", "[1,\"x\"]", "4294967296"],
            "must be a token or a list of tokens",
        ),
    ] {
        for (key, value) in keys.iter().flat_map(|key| values.iter().map(move |value| (key, value))) {
            let said = refused_as(key, value);
            assert!(said.starts_with(&format!("config.json: `{key}` {expected}")), "{said}");
            assert!(said.len() < 300, "{said}");
        }
    }
}

#[test]
fn what_is_no_json_object_is_refused_with_the_place() {
    let nested = format!("{{\"a\":{}", "[".repeat(100_000));
    for (text, expected) in [
        ("", "EOF while parsing a value at line 1 column 0; fetch the file again"),
        ("null", "invalid type: null"),
        (&"[".repeat(100_000), "invalid type: sequence"),
        (&nested, "recursion limit"),
        ("{\"hidden_size\": 48,}", "trailing comma at line 1 column 20"),
        ("{\"hidden_size\": 48", "EOF while parsing an object"),
        ("{\"hidden_size\": 1e400}", "number out of range"),
        ("<!DOCTYPE html>", "expected value"),
        ("\u{feff}{}", "expected value"),
        ("// a comment\n{}", "expected value"),
    ] {
        let said = refused_text(text);
        assert!(said.starts_with("config.json: not a JSON object: ") && said.contains(expected), "{said}");
    }
    assert!(refused_text("{}").contains("neither `architectures` nor `model_type` is there"));
}

#[test]
fn what_transformers_takes_for_a_supported_value_is_that_value() {
    let plain = accepted(&json!({}));
    let off = json!({ "load_in_4bit": false, "load_in_8bit": false, "quant_method": "bitsandbytes" });
    for changes in [
        json!({ "is_causal": true, "per_layer_config": {}, "configuration_files": [] }),
        json!({ "hidden_act": "swish", "quantization_config": off }),
        json!({ "transformers_weights": "model.safetensors.index.json" }),
        json!({ "rope_scaling": {} }),
        json!({ "rope_scaling": [] }),
        json!({ "rope_scaling": "" }),
        json!({ "rope_scaling": false, "rope_parameters": 0 }),
    ] {
        assert_eq!(accepted(&changes), plain, "{changes}");
    }
    assert_eq!(accepted(&json!({ "rms_norm_eps": 0.0 })).norm_epsilon, 0.0);
    let mistral = |layer_types: Value| {
        accepted(&json!({ "architectures": ["MistralForCausalLM"], "layer_types": layer_types }))
            .sliding_windows
    };
    assert_eq!(mistral(json!(["attention", "sliding_attention"])), [None, Some(4096)]);
}

#[test]
fn an_unknown_class_of_a_known_model_type_is_remarked() {
    for class in ["LLaMAForCausalLM", "MyLlamaForCausalLM", "AutoModelForCausalLM"] {
        let config = accepted(&json!({ "architectures": [class], "model_type": "llama" }));
        assert_eq!(config.architecture.name, "Llama");
        assert!(matches!(&*config.remarks, [remark] if remark.contains(class)), "{:?}", config.remarks);
    }
}

#[test]
fn what_a_generation_config_says_of_the_choice_of_tokens_is_remarked() {
    let remarks = |generation: &Value| ended(&json!({}), Some(generation)).unwrap().remarks;
    let neutral = json!({
        "repetition_penalty": 1, "no_repeat_ngram_size": 0, "bad_words_ids": [], "forced_eos_token_id": null,
        "num_beams": 1, "do_sample": true, "temperature": 0.6
    });
    assert_eq!(remarks(&neutral), [""; 0]);
    let all = json!({ "repetition_penalty": 1.05, "forced_eos_token_id": 0, "suppress_tokens": [1] });
    let keys = ["forced_eos_token_id", "repetition_penalty", "suppress_tokens"];
    let said = remarks(&all);
    assert_eq!(said.len(), keys.len());
    assert!(said.iter().zip(keys).all(|(remark, key)| remark.starts_with(&format!("`{key}`"))), "{said:?}");
    for damaged in ["", "{,}", "[]"] {
        let config =
            LlamaConfig::from_json(Path::new("config.json"), &base().to_string(), Some(damaged)).unwrap();
        assert!(config.remarks[0].starts_with("generation_config.json is ignored: not a JSON object"));
    }
}

#[test]
fn a_folder_without_a_model_is_named_with_what_belongs_there() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    // A folder without the file, no folder, and a file in place of the folder.
    for folder in ["src", "no-such-folder", "Cargo.toml"] {
        let error = LlamaConfig::from_folder(&here.join(folder)).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(&format!("{folder}/config.json: there is no such file")), "{said}");
        assert!(said.contains("*.safetensors") && error.is_permanent(), "{said}");
    }
}

#[test]
fn a_folder_of_another_kind_is_named_with_what_makes_a_model_of_it() {
    for (name, content, words) in [
        ("a.gguf", "GGUF", ["config.json: there is no such file; `a.gguf` is a GGUF file", "python3 -c"]),
        ("consolidated.00.pth", "", ["`consolidated.00.pth` is in Meta's", "Hugging Face format"]),
        (
            "adapter_config.json",
            "{}",
            ["adapter_config.json: this is an adapter of a model", "merge_and_unload"],
        ),
        (
            "pytorch_model.bin",
            "",
            ["config.json: there is no such file; a model is a folder", "tokenizer.json"],
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), content).unwrap();
        let said = LlamaConfig::from_folder(folder.path()).unwrap_err().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{name}: {said}");
    }
}

/// Parses `config.json` with these ends, next to `generation_config.json` if it is given.
fn ended(config: &Value, generation: Option<&Value>) -> Result<LlamaConfig> {
    let mut whole = base();
    whole.as_object_mut().unwrap().remove("eos_token_id");
    whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    let generation = generation.map(ToString::to_string);
    LlamaConfig::from_json(Path::new("config.json"), &whole.to_string(), generation.as_deref())
}

#[test]
fn end_tokens_are_those_of_the_generation_config_or_else_of_the_config() {
    let configs = [
        (json!({}), vec![]),
        (json!({ "eos_token_id": null }), vec![]),
        (json!({ "eos_token_id": [] }), vec![]),
        (json!({ "eos_token_id": 2 }), vec![2]),
        (json!({ "eos_token_id": [2, 3] }), vec![2, 3]),
        (json!({ "eos_token_id": [2, -1] }), vec![2]),
        (json!({ "eos_token_id": -1 }), vec![]),
    ];
    let missing = [json!({}), json!({ "eos_token_id": null }), json!({ "eos_token_id": [] })];
    let given = [
        (json!({ "eos_token_id": 7 }), vec![7]),
        (json!({ "eos_token_id": [7, 8] }), vec![7, 8]),
        // None ends a text.
        (json!({ "eos_token_id": -1 }), vec![]),
    ];
    for (config, own) in configs {
        let alone = ended(&config, None).unwrap();
        assert_eq!((alone.eos_tokens, alone.remarks.len()), (own.clone(), 0), "{config}");
        for (generation, tokens) in &given {
            let parsed = ended(&config, Some(generation)).unwrap();
            assert_eq!((&parsed.eos_tokens, parsed.remarks.len()), (tokens, 0), "{config} {generation}");
        }
        for generation in &missing {
            let parsed = ended(&config, Some(generation)).unwrap();
            let remarks = usize::from(!own.is_empty());
            assert_eq!((&parsed.eos_tokens, parsed.remarks.len()), (&own, remarks), "{config} {generation}");
        }
    }
    for wrong in [json!("</s>"), json!(3.5), json!(true), json!([1, "x"]), json!(1u64 << 32)] {
        let generation = json!({ "eos_token_id": wrong });
        let error = ended(&json!({}), Some(&generation)).unwrap_err().to_string();
        assert!(error.starts_with("generation_config.json: `eos_token_id` must be"), "{error}");
    }
}

#[test]
fn stop_strings_are_those_of_the_generation_config_if_there_is_one() {
    let of =
        |config: Value, generation: Option<Value>| ended(&config, generation.as_ref()).unwrap().stop_strings;
    let one = json!({ "stop_strings": "###" });
    let two = json!({ "stop_strings": ["a", "b"] });
    assert_eq!(of(one.clone(), None), ["###"]);
    assert_eq!(of(two.clone(), Some(one.clone())), ["###"]);
    assert_eq!(of(json!({}), Some(two)), ["a", "b"]);
    for empty in [json!({}), json!({ "stop_strings": null }), json!({ "stop_strings": [] })] {
        assert!(of(one.clone(), Some(empty)).is_empty());
    }
}

#[test]
fn a_part_of_a_head_is_rotated_nowhere() {
    let scaled = json!({ "rope_type": "linear", "factor": 2.0 });
    // A head has 8 elements: 8.4 are 8, as in transformers.
    for (factor, is_whole) in
        [(json!(1), true), (json!(1.05), true), (json!(0.5), false), (json!("x"), false)]
    {
        let within = |object: &Value| {
            let mut object = object.clone();
            object["partial_rotary_factor"] = factor.clone();
            object
        };
        let plain = json!({ "rope_type": "default" });
        for changes in [
            json!({ "partial_rotary_factor": factor }),
            json!({ "partial_rotary_factor": factor, "rope_parameters": plain }),
            json!({ "rope_parameters": within(&plain) }),
            json!({ "rope_scaling": within(&plain) }),
        ] {
            let config = with(&changes).unwrap();
            assert_eq!(config.rotary, with(&json!({})).unwrap().rotary, "{changes}");
            assert_eq!(config.remarks.is_empty(), is_whole, "{changes}");
        }
        for changes in [
            json!({ "partial_rotary_factor": factor, "rope_parameters": scaled }),
            json!({ "partial_rotary_factor": 1, "rope_parameters": within(&scaled) }),
            json!({ "rope_scaling": within(&scaled) }),
        ] {
            match with(&changes) {
                Ok(config) => assert!(is_whole && config.remarks.is_empty(), "{changes}"),
                Err(error) => {
                    let expected =
                        format!("`partial_rotary_factor` {factor} is not supported with rope type `linear`");
                    assert!(!is_whole && error.to_string().contains(&expected), "{changes}: {error}");
                }
            }
        }
    }
}

#[test]
fn the_class_of_a_base_model_is_that_of_its_architecture() {
    for known in ARCHITECTURES {
        let class = known.class.replace("ForCausalLM", "Model");
        assert_eq!(with(&json!({ "architectures": [class] })).unwrap().architecture, known);
    }
    let other = json!({ "architectures": ["LlamaModel"], "model_type": "qwen2" });
    assert!(refused(&other).contains("do not belong together"));
    for class in ["LlamaForSequenceClassification", "BertModel", "Model"] {
        assert!(refused(&json!({ "architectures": [class] })).contains("is not supported"), "{class}");
    }
}

#[test]
fn legal_world_sizes_follow_from_heads_kv_heads_and_intermediate_features() {
    let sizes = |changes: &Value| legal_world_sizes(&with(changes).unwrap(), 16, Numerics::Fast);
    assert_eq!(sizes(&json!({})), [1, 2, 4, 8]);
    assert_eq!(sizes(&json!({ "intermediate_size": 90 })), [1, 2]);
    let three = json!({ "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8 });
    assert_eq!(sizes(&three), [1, 3, 6]);
    let odd = json!({ "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8 });
    assert_eq!(sizes(&odd), [1, 2, 4, 12]);
}

#[test]
fn invariant_world_sizes_add_subtrees_of_one_tree() {
    let sizes = |heads: usize, kv: usize, intermediate: usize| {
        let changes = json!({
            "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 8, "intermediate_size": intermediate,
        });
        legal_world_sizes(&with(&changes).unwrap(), 32, Numerics::Invariant)
    };
    assert_eq!(sizes(8, 2, 96), [1, 2, 4, 8]);
    assert_eq!(sizes(32, 32, 96), [1, 2, 4, 8]);
    assert_eq!(sizes(12, 4, 96), [1, 2, 4]);
    assert_eq!(sizes(6, 3, 96), [1, 3, 6]);
    assert_eq!(sizes(9, 3, 96), [1, 3]);
    assert_eq!(sizes(5, 5, 90), [1, 5]);
    assert_eq!(sizes(8, 8, 90), [1, 2]);
    assert_eq!(sizes(7, 7, 96), [1]);
}

#[test]
fn an_illegal_world_size_is_refused_with_the_reason_and_the_legal_ones() {
    let reason = |changes: &Value, n| {
        check_world_size(&with(changes).unwrap(), n, Numerics::Fast).unwrap_err().to_string()
    };
    assert_eq!(
        reason(&json!({}), 3),
        "configuration: world size 3 does not divide 8 attention heads; legal sizes for this model: 1, 2, 4, 8"
    );
    let kv = json!({ "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8 });
    assert!(reason(&kv, 3).contains("does not divide 4 key/value heads; legal"));
    assert!(
        reason(&json!({ "intermediate_size": 90 }), 4).contains("does not divide 90 intermediate features")
    );
}

#[test]
fn tensors_that_the_model_does_not_use_are_listed_less_those_that_never_matter() {
    let config = with(&json!({})).unwrap();
    let needed: Vec<String> = tensors(&config).unwrap().into_iter().map(|spec| spec.name).collect();
    let more = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.mlp.up_proj.weight",
        "lm_head.weight",
    ];
    let all = |config: &LlamaConfig| {
        let names = needed.iter().map(String::as_str).chain(more);
        unused(config, &tensors(config).unwrap(), names).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(all(&config), ["model.layers.2.mlp.up_proj.weight"]);
    // A tied model needs no head, but files often contain one.
    let tied = with(&json!({ "tie_word_embeddings": true })).unwrap();
    assert_eq!(all(&tied), ["model.layers.2.mlp.up_proj.weight"]);
}

#[test]
fn the_list_of_tensors_has_biases_and_a_head_only_where_the_model_has_them() {
    let names = |changes: &Value| -> Vec<String> {
        tensors(&with(changes).unwrap()).unwrap().into_iter().map(|t| t.name).collect()
    };
    let plain = names(&json!({}));
    assert_eq!(plain.len(), 1 + 2 * 9 + 2);
    assert!(!plain.iter().any(|n| n.ends_with("bias")) && plain.contains(&"lm_head.weight".into()));
    let tied = names(&json!({ "tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true }));
    assert_eq!(tied.len(), 1 + 2 * 16 + 1);
    let qwen2 = names(&json!({ "architectures": ["Qwen2ForCausalLM"] }));
    assert!(qwen2.contains(&"model.layers.1.self_attn.k_proj.bias".into()));
    assert!(!qwen2.contains(&"model.layers.1.self_attn.o_proj.bias".into()));
    let qwen3 = names(&json!({ "architectures": ["Qwen3ForCausalLM"] }));
    assert_eq!(qwen3.len(), plain.len() + 2 * 2);
    assert!(qwen3.contains(&"model.layers.1.self_attn.q_norm.weight".into()));
}

#[test]
fn settings_that_no_model_can_have_are_refused_by_loading() {
    let changes: [fn(&mut LlamaConfig); 5] = [
        |config| config.sliding_windows.clear(),
        |config| config.layers = usize::MAX,
        |config| config.head_dim = usize::MAX - 1,
        |config| config.intermediate = usize::MAX,
        |config| config.vocabulary = usize::MAX,
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut config = with(&json!({})).unwrap();
        change(&mut config);
        assert!(tensors(&config).is_err(), "change {at}");
    }
    for (index, count) in [(0, 0), (5, 2), (usize::MAX, 1)] {
        let refused = stage_tensors(&with(&json!({})).unwrap(), Stage { index, count });
        assert!(refused.is_err(), "stage {index} of {count}");
    }
}
