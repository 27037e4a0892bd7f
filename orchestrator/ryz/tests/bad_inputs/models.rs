//! The files of a model's folder, and prompts.

use ryzanstein_tests::fixtures;
use serde_json::{Value, json};

use crate::support::{Case, Content};

const ONE_TOKEN: &str = "generate --backend tcp --model {} --max-new-tokens 1 --token-ids 1";
const IN_WORDS: &str = "generate --backend tcp --model {} --max-new-tokens 1 --prompt hello";

fn parsed(file: &str) -> Value {
    let text = std::fs::read(fixtures::folder("llama-mha").join(file)).expect("a file");
    serde_json::from_slice(&text).expect("JSON")
}

/// `config.json` with one key replaced, or removed.
fn config(key: &str, value: Option<&str>, words: &[&str]) -> Case {
    let mut config = parsed("config.json");
    let settings = config.as_object_mut().expect("an object");
    settings.remove(key);
    // As text, so that it may be what no JSON library writes.
    let mut text = serde_json::to_string(settings).expect("JSON");
    if let Some(value) = value {
        text = format!("{{\"{key}\":{value},{}", &text[1..]);
    }
    let words: Vec<&str> = words.iter().copied().chain(["{}", "config.json"]).collect();
    Case::new(ONE_TOKEN, &words)
        .model()
        .named(&format!("{key} = {}", value.unwrap_or("nothing")))
        .file("config.json", text)
}

/// Settings of a model that no model has.
pub(crate) fn configs() -> Vec<Case> {
    let mut cases = Vec::new();
    for key in ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
    {
        cases.push(config(
            key,
            None,
            &[&format!("`{key}` is missing"), "fetch the config.json that belongs"],
        ));
        cases.push(config(
            key,
            Some("null"),
            &[&format!("`{key}` is missing"), "fetch the config.json that belongs"],
        ));
        for value in ["0", "-8", "1.5", "\"8\"", "[8]", "true", "{}", "1e400"] {
            let words = if value == "1e400" {
                "number out of range".to_owned()
            } else {
                format!("`{key}` must be a positive whole number")
            };
            cases.push(config(key, Some(value), &[&words]));
        }
        cases.push(config(key, Some("NaN"), &[&format!("`{key}` must be a positive whole number")]));
        cases.push(config(
            key,
            Some("9223372036854775807"),
            &[&format!("`{key}` is"), "the most that is supported"],
        ));
    }
    let set = |key, value, words: &[&str]| config(key, Some(value), words);
    cases.extend([
        set("num_attention_heads", "7", &["`num_attention_heads` 7 does not divide `hidden_size` 48"]),
        set("num_key_value_heads", "3", &["`num_key_value_heads` 3 does not divide `num_attention_heads` 8"]),
        set("num_key_value_heads", "0", &["`num_key_value_heads` must be a positive whole number"]),
        set("num_key_value_heads", "16", &["`num_key_value_heads` 16 does not divide"]),
        set("head_dim", "3", &["a head of 3 elements cannot be rotated in pairs"]),
        set("head_dim", "4294967296", &["`head_dim` is 4294967296", "the most that is supported"]),
        set("max_position_embeddings", "0", &["`max_position_embeddings` must be a positive whole number"]),
        set(
            "max_position_embeddings",
            "99999999999",
            &["`max_position_embeddings` is 99999999999", "the most"],
        ),
        set("rms_norm_eps", "-1e-6", &["`rms_norm_eps` must be a number from 0 on"]),
        set("rms_norm_eps", "\"1e-6\"", &["`rms_norm_eps` must be a number from 0 on"]),
        set("rms_norm_eps", "NaN", &["`rms_norm_eps` must be a number from 0 on, and is \"NaN\""]),
        set("rope_theta", "0", &["`rope_theta` must be a positive number"]),
        set("rope_theta", "Infinity", &["`rope_theta` must be a positive number"]),
        set("rope_scaling", "3", &["`rope_scaling` must be an object"]),
        set(
            "rope_scaling",
            r#"{"rope_type":"ntk","factor":4}"#,
            &["rope type `ntk` is not supported", "llama3"],
        ),
        set("rope_scaling", r#"{"rope_type":"linear"}"#, &["`rope_scaling`: `factor` is missing"]),
        set("rope_scaling", r#"{"rope_type":"linear","factor":-1}"#, &["`factor` must be a positive number"]),
        set(
            "rope_scaling",
            r#"{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":1}"#,
            &["`high_freq_factor` 1 must be greater than `low_freq_factor` 4"],
        ),
        set(
            "rope_parameters",
            r#"{"full_attention":{"rope_type":"default"}}"#,
            &["differs by kind of layer"],
        ),
        set(
            "rope_parameters",
            r#"{"rope_type":"linear","factor":2,"partial_rotary_factor":0.5}"#,
            &["`partial_rotary_factor` 0.5 is not supported with rope type `linear`", "rotates whole heads"],
        ),
        set("transformers_weights", "\"mine.safetensors\"", &["`transformers_weights`", "rename the file"]),
        set("hidden_act", "\"gelu\"", &["`hidden_act` `gelu` is not supported, only `silu`"]),
        set("hidden_act", "1", &["`hidden_act` must be a text"]),
        set("tie_word_embeddings", "\"yes\"", &["`tie_word_embeddings` must be true or false"]),
        set("attention_bias", "1", &["`attention_bias` must be true or false"]),
        set("mlp_bias", "[]", &["`mlp_bias` must be true or false"]),
        set("model_type", "\"bert\"", &["`model_type` is `bert`", "do not belong together"]),
        set(
            "quantization_config",
            "{\"bits\":4}",
            &["quantized weights are not supported", "remove the key"],
        ),
        set("is_causal", "false", &["`is_causal` false is not supported"]),
        set("eos_token_id", "1.5", &["`eos_token_id` must be a token or a list of tokens"]),
        set("eos_token_id", "[1,\"x\"]", &["`eos_token_id` must be a token or a list of tokens"]),
        set("eos_token_id", "4294967296", &["`eos_token_id` must be a token"]),
        set("num_hidden_layers", "3", &["model.layers.2.", "in none of the weight files", "the same model"]),
        set("vocab_size", "200", &["expected shape [200, 48], found [100, 48]", "is config.json that of"]),
        set("hidden_size", "64", &["expected shape", "found"]),
        set(
            "intermediate_size",
            "32",
            &["mlp.", "expected shape", "24", "32", "is config.json that of these weights?"],
        ),
        set("attention_bias", "true", &["q_proj.bias", "in none of the weight files"]),
        set(
            "hidden_size",
            &format!("\"{}\"", "x".repeat(100_000)),
            &["`hidden_size` must be a positive whole number"],
        )
        .named("a long text"),
        set("model_type", &format!("\"{}\"", "x".repeat(100_000)), &["do not belong together"])
            .named("a long name"),
    ]);
    let whole = |text: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/config.json"]).collect();
        Case::new(ONE_TOKEN, &words).model().named(&text[..text.len().min(40)]).file("config.json", text)
    };
    cases.extend([
        whole("", &["not a JSON object", "EOF", "line 1 column 0", "fetch the file again"]),
        whole("null", &["not a JSON object", "invalid type: null"]),
        whole("[]", &["not a JSON object", "invalid type: sequence"]),
        whole("{}", &["neither `architectures` nor `model_type` is there"]),
        whole("{\"hidden_size\": 48,}", &["not a JSON object", "trailing comma", "line 1 column"]),
        whole("{\"hidden_size\": 48", &["not a JSON object", "EOF"]),
        whole("<!DOCTYPE html>", &["not a JSON object", "expected value"]),
        whole("\u{feff}{}", &["not a JSON object", "expected value"]),
        whole("// a comment\n{}", &["not a JSON object", "expected value"]),
        whole(&"[".repeat(100_000), &["not a JSON object"]),
        whole(&format!("{{\"a\":{}", "[".repeat(100_000)), &["not a JSON object", "recursion limit"]),
        Case::new(
            "generate --model /no/such/model --token-ids 1",
            &["/no/such/model/config.json", "there is no such file"],
        ),
        Case::new("generate --model {}/file --token-ids 1", &["{}/file", "a model is a folder"])
            .file("file", "x"),
        Case::new(
            "generate --model {} --token-ids 1",
            &["{}/config.json", "a model is a folder as Hugging Face"],
        ),
        Case::new("generate --token-ids 1", &["no model", "--model DIR", "model.directory"]),
    ]);
    let generation = |text: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/generation_config.json"]).collect();
        Case::new(ONE_TOKEN, &words).model().named(text).file("generation_config.json", text)
    };
    cases.extend([
        generation("{\"eos_token_id\": \"</s>\"}", &["`eos_token_id` must be a token or a list of tokens"]),
        generation("{\"stop_strings\": [1]}", &["`stop_strings` must be a text or a list of texts"]),
        generation("{\"stop_strings\": \"x\"}", &["`stop_strings`", "has no tokenizer.json", "--ignore-end"])
            .file("tokenizer.json", Content::Absent),
    ]);
    cases
}

/// Pipes, folders and the like where a file should be.
pub(crate) fn no_files() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, largest) in [
        ("config.json", Some("more than 4MiB")),
        ("generation_config.json", Some("more than 4MiB")),
        ("tokenizer.json", Some("more than 64MiB")),
        ("model.safetensors", None),
        ("model.safetensors.index.json", Some("more than 64MiB")),
    ] {
        for (content, word) in [
            (Content::Pipe, "this is a pipe"),
            (Content::Folder, "this is a folder"),
            (Content::Socket, "this is a socket"),
            (Content::Device, "this is a device"),
            (Content::Sparse(1 << 40), largest.unwrap_or("Cannot allocate memory")),
            ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n".into(), "run `git lfs pull`"),
        ] {
            let is_out_of_memory = word.contains("allocate");
            let case = Case::new(ONE_TOKEN, &[&format!("{{}}/{name}: "), word]).model().named(word);
            let case =
                if name.contains("index") { case.file("model.safetensors", Content::Absent) } else { case };
            cases.push(case.file(name, content).code(if is_out_of_memory { 1 } else { 2 }));
        }
    }
    // One file of several.
    let index = r#"{"weight_map":{"model.norm.weight":"part.safetensors"}}"#;
    for (content, words) in [
        (Content::Pipe, ["{}/part.safetensors: ", "this is a pipe"]),
        (Content::Folder, ["{}/part.safetensors: ", "this is a folder"]),
        (Content::Absent, ["{}/model.safetensors.index.json: ", "`part.safetensors` is not in this folder"]),
    ] {
        cases.push(
            Case::new(ONE_TOKEN, &words)
                .model()
                .file("model.safetensors", Content::Absent)
                .file("model.safetensors.index.json", index)
                .file("part.safetensors", content),
        );
    }
    cases
}

/// Indices that do not fit the folder.
pub(crate) fn indices() -> Vec<Case> {
    let index = |text: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/model.safetensors.index.json"]).collect();
        Case::new(ONE_TOKEN, &words)
            .model()
            .named(text)
            .file("model.safetensors", Content::Absent)
            .file(
                "part.safetensors",
                safetensors(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4),
            )
            .file("model.safetensors.index.json", text)
    };
    let outside = |name: &str| {
        let text = json!({ "weight_map": { "a": name } }).to_string();
        index(&text, &["no plain file name", "an index may only name files in its own folder"])
    };
    let mut cases: Vec<Case> =
        ["../part.safetensors", "/etc/passwd", "sub/part.safetensors", "..", ".", "", "part.safetensors/"]
            .map(outside)
            .into();
    cases.extend([
        index("", &["no index of weights", "EOF", "download it again"]),
        index("[]", &["no index of weights"]),
        index("{}", &["no index of weights", "missing field `weight_map`"]),
        index(r#"{"weight_map":[]}"#, &["no index of weights", "invalid type"]),
        index(r#"{"weight_map":{"a":1}}"#, &["tensor `a`", "expected the name of a file", "found 1"]),
        index(
            r#"{"weight_map":{"model.embed_tokens.weight":"part.safetensors"}}"#,
            &["tensor `model.embed_tokens.weight`", "not in `part.safetensors`, where this index says it is"],
        ),
        Case::new(ONE_TOKEN, &["{}: ", "in none of the weight files"])
            .model()
            .file("model.safetensors", Content::Absent)
            .file("model.safetensors.index.json", r#"{"weight_map":{}}"#),
        Case::new(ONE_TOKEN, &["neither model.safetensors nor model.safetensors.index.json"])
            .model()
            .file("model.safetensors", Content::Absent),
    ]);
    cases
}

/// Folders of adapters, and with weights in other formats.
pub(crate) fn other_formats() -> Vec<Case> {
    let instead = |name: &str, words: &[&str]| {
        Case::new(ONE_TOKEN, words)
            .model()
            .named(name)
            .file("model.safetensors", Content::Absent)
            .file(name, "x")
    };
    let plan = |name: &str, content: &str, words: &[&str]| {
        Case::new("plan --model {}", words).named(name).file(name, content)
    };
    let adapter = r#"{"base_model_name_or_path": "acme/base"}"#;
    let is_adapter =
        ["{}/adapter_config.json: this is an adapter of `acme/base`", "merge_and_unload", "merged`"];
    vec![
        instead(
            "pytorch_model.bin",
            &["{}: ", "`pytorch_model.bin` has weights as pickles", "save_pretrained(d)' {}`"],
        ),
        instead("a.gguf", &["{}: ", "`a.gguf` is a GGUF file", "' {} a.gguf`"]),
        instead("consolidated.safetensors", &["{}: ", "`consolidated.safetensors`", "Hugging Face format"]),
        instead("mine.safetensors", &["{}: ", "`mv {}/mine.safetensors {}/model.safetensors`"])
            .file("expected.safetensors", Content::Absent),
        Case::new(ONE_TOKEN, &is_adapter).model().file("adapter_config.json", adapter),
        plan("adapter_config.json", adapter, &is_adapter),
        plan(
            "a.gguf",
            "GGUF",
            &["{}/config.json: there is no such file; `a.gguf` is a GGUF file", "python3 -c"],
        ),
    ]
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
}

/// Weight files that are damaged, or of other kinds.
pub(crate) fn weights() -> Vec<Case> {
    let weights = |what: &str, bytes: Vec<u8>, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/model.safetensors"]).collect();
        Case::new(ONE_TOKEN, &words).model().named(what).file("model.safetensors", bytes)
    };
    let header = |json: &str, data: usize, words: &[&str]| weights(json, safetensors(json, data), words);
    let good = std::fs::read(fixtures::folder("llama-mha").join("model.safetensors")).expect("weights");
    let one = |entry: &str| format!("{{\"a\":{entry}}}");
    let mut cases = vec![
        weights("nothing", vec![], &["the file is empty", "download it again"]),
        weights("four bytes", vec![0; 4], &["4 bytes are no safetensors file"]),
        weights("eight zeros", vec![0; 8], &["the header is not valid", "EOF"]),
        weights("many zeros", vec![0; 4096], &["the header is not valid"]),
        weights(
            "no end",
            vec![0xff; 64],
            &["claim a header of 18446744073709551615 bytes", "download the file"],
        ),
        weights("a web page", b"<!DOCTYPE html><html></html>".to_vec(), &["claim a header of", "convert it"]),
        weights("a pickle", b"PK\x03\x04\0\0\0\0\0\0archive/data.pkl".to_vec(), &["model.safetensors"]),
        weights("cut in the header", good[..100].to_vec(), &["the file ends before: it is truncated"]),
        weights(
            "cut in the data",
            good[..good.len() / 2].to_vec(),
            &["it is truncated", "download it again"],
        ),
        weights("one byte short", good[..good.len() - 1].to_vec(), &["it is truncated"]),
        weights("one byte more", [&good[..], &[0]].concat(), &["1 bytes at the end belong to no tensor"]),
        header("[]", 0, &["the header is not valid", "invalid type: sequence"]),
        header("null", 0, &["the header is not valid"]),
        header("{", 0, &["the header is not valid", "EOF"]),
        header("{}x", 0, &["the header is not valid", "trailing characters"]),
        header("{}", 4, &["4 bytes at the end belong to no tensor"]),
        Case::new(ONE_TOKEN, &["in none of the weight files"])
            .model()
            .named("no tensor")
            .file("model.safetensors", safetensors("{}", 0)),
    ];
    for (entry, data, word) in [
        ("3", 0, "the header entry is not valid"),
        ("{}", 0, "missing field"),
        (r#"{"dtype":"F32","shape":[1]}"#, 4, "missing field `data_offsets`"),
        (r#"{"dtype":32,"shape":[1],"data_offsets":[0,4]}"#, 4, "invalid type"),
        (r#"{"dtype":"F32","shape":4,"data_offsets":[0,4]}"#, 4, "invalid type"),
        (r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, 4, "invalid value"),
        (r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#, 4, "invalid type"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#, 4, "invalid length"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, 4, "before they start"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,8]}"#, 4, "it is truncated"),
        (r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, 4, "does not fill its 4 bytes"),
        (r#"{"dtype":"F64","shape":[1],"data_offsets":[0,4]}"#, 4, "does not fill its 4 bytes"),
        (r#"{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]}"#, 4, "does not fill"),
        (r#"{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}"#, 4, "does not fill"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}"#, 4, "it is truncated"),
        (r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#, 8, "should start at"),
    ] {
        cases.push(header(&one(entry), data, &["tensor `a`", word]));
    }
    let f32 = |from: usize, to: usize| {
        format!(r#"{{"dtype":"F32","shape":[{}],"data_offsets":[{from},{to}]}}"#, (to - from) / 4)
    };
    let two = |a: String, b: String| format!("{{\"a\":{a},\"b\":{b}}}");
    cases.extend([
        header(&two(f32(0, 8), f32(4, 12)), 12, &["tensor `b`", "should start at", "corrupt"]),
        header(&two(f32(0, 4), f32(8, 12)), 12, &["tensor `b`", "should start at", "corrupt"]),
        header(&two(f32(0, 8), f32(0, 8)), 8, &["should start at", "corrupt"]),
        header(&format!("{{\"a\":{0},\"a\":{0}}}", f32(0, 4)), 4, &["tensor `a`", "has this name twice"]),
    ]);
    // The embedding, in types that are not supported.
    let needed = "model.embed_tokens.weight";
    for (dtype, size) in [("I8", 1), ("F64", 8), ("F8_E4M3", 1), ("I32", 4), ("F33", 4), ("f32", 4)] {
        let bytes = 100 * 48 * size;
        let entry = json!({ needed: { "dtype": dtype, "shape": [100, 48], "data_offsets": [0, bytes] } });
        let found = format!("found {dtype}");
        cases.push(header(&entry.to_string(), bytes, &[needed, "expected type F32, F16 or BF16", &found]));
    }
    cases
}

/// Weights with more tensors than the model uses: no error, but a warning.
pub(crate) fn unused() -> Vec<Case> {
    let good = std::fs::read(fixtures::folder("llama-mha").join("model.safetensors")).expect("weights");
    let (length, rest) = good.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).expect("JSON");
    let mut weights = |name: &str, data: &mut Vec<u8>| {
        let end = data.len();
        data.extend([0; 4]);
        header[name] = json!({ "dtype": "F32", "shape": [1], "data_offsets": [end, end + 4] });
        let header = header.to_string();
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    };
    let mut data = data.to_vec();
    let harmless = weights("model.layers.0.self_attn.rotary_emb.inv_freq", &mut data);
    let warned = weights("model.layers.9.mlp.up_proj.weight", &mut data);
    let words = [
        "the checkpoint has tensors that this model does not use",
        "compare config.json",
        "count=1",
        "model.layers.9.mlp.up_proj.weight",
        "{\"load\":",
    ];
    let case = |words: &[&str], weights| {
        Case::new(ONE_TOKEN, words).model().file("model.safetensors", weights).code(0)
    };
    vec![
        case(&words, warned),
        case(&["{\"load\":"], harmless).without("does not use").named("rotary frequencies"),
    ]
}

/// Settings that the model does not follow: no error, but a warning.
pub(crate) fn ignored() -> Vec<Case> {
    let case = |name: &str, content: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{\"load\":"]).collect();
        Case::new(ONE_TOKEN, &words).model().named(content).file(name, content).code(0)
    };
    let mut config = parsed("config.json");
    config["partial_rotary_factor"] = json!(0.5);
    let ends =
        ["`eos_token_id` is missing or empty in generation_config.json", "config.json ends a text: [2]"];
    vec![
        case("config.json", &config.to_string(), &["`partial_rotary_factor` 0.5 of config.json is ignored"]),
        case("generation_config.json", "{}", &ends),
        case("generation_config.json", "{\"eos_token_id\": []}", &ends),
        case("generation_config.json", "{\"eos_token_id\": 2}", &[]).without("ends a text"),
        case("generation_config.json", "{\"eos_token_id\": -1}", &[]).without("ends a text"),
        case("generation_config.json", "{,}", &["generation_config.json is ignored: not a JSON object"]),
        case(
            "generation_config.json",
            "{\"repetition_penalty\": 1.05}",
            &["`repetition_penalty` of generation_config.json is ignored"],
        ),
    ]
}

/// Tokenizers at which their library fails, and files that are none.
pub(crate) fn tokenizers() -> Vec<Case> {
    let whole = |text: String, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/"]).collect();
        Case::new(IN_WORDS, &words)
            .model()
            .named(&text.chars().take(60).collect::<String>())
            .file("tokenizer.json", text)
    };
    let refused = |text: &str, words: &[&str]| {
        let words: Vec<&str> = words
            .iter()
            .copied()
            .chain(["tokenizer.json: ", "fetch the model's tokenizer.json again"])
            .collect();
        whole(text.to_owned(), &words)
    };
    let model = |model: Value, words: &[&str]| refused(&json!({ "model": model }).to_string(), words);
    let bpe = |vocab: Value, merges: Value, words: &[&str]| {
        model(json!({ "type": "BPE", "vocab": vocab, "merges": merges }), words)
    };
    let with = |key: &str, value: Value, words: &[&str]| {
        let mut tokenizer = parsed("tokenizer.json");
        tokenizer[key] = value;
        refused(&tokenizer.to_string(), words).named(key)
    };
    let good = parsed("tokenizer.json").to_string();
    vec![
        refused("", &["EOF while parsing"]),
        refused("null", &["invalid type: null"]),
        refused("[]", &["invalid type: sequence"]),
        refused("{}", &["Model missing"]),
        refused("<!DOCTYPE html>", &["expected value at line 1"]),
        refused(&good[..500], &["EOF while parsing"]),
        refused(&format!("\u{feff}{good}"), &["expected value"]),
        refused(&"[".repeat(100_000), &["cannot be used"]),
        with("version", json!("2.0"), &["Unknown tokenizer version '2.0'"]),
        model(json!({ "type": "Nonsense" }), &["cannot be used"]),
        model(json!(5), &["cannot be used"]),
        bpe(json!([]), json!([]), &["cannot be used"]),
        bpe(json!({ "h": -1 }), json!([]), &["integer `-1`, expected u32"]),
        bpe(json!({ "h": 4_294_967_296_u64 }), json!([]), &["expected u32"]),
        bpe(json!({ "h": 1.5 }), json!([]), &["expected u32"]),
        bpe(json!({ "h": "0" }), json!([]), &["expected u32"]),
        bpe(json!({ "a": 0, "b": 1 }), json!([["a", "b"]]), &["panicked", "out of range"]),
        bpe(json!({ "a": 0, "b": 1, "abc": 2 }), json!([["a", "b"]]), &["Token `ab` out of vocabulary"]),
        bpe(json!({ "a": 0 }), json!([["a", "q"]]), &["Token `q` out of vocabulary"]),
        bpe(json!({ "a": 0 }), json!(["a b c"]), &["Merges text file invalid"]),
        bpe(json!({ "a": 0 }), json!([1, 2]), &["cannot be used"]),
        bpe(json!({ "a": 0 }), json!([["a"]]), &["cannot be used"]),
        model(
            json!({ "type": "BPE", "vocab": { "a": 0, "b": 1 }, "merges": [["a", "b"]], "continuing_subword_prefix": "####" }),
            &["panicked"],
        ),
        model(json!({ "type": "BPE", "vocab": { "h": 0 }, "merges": [], "dropout": 2 }), &["between 0 and 1"]),
        model(
            json!({ "type": "BPE", "vocab": { "a": 0 }, "merges": [], "unk_token": "<x>" }),
            &["Unk token `<x>` not found in the vocabulary"],
        ),
        model(json!({ "type": "Unigram", "vocab": [] }), &["unk_id"]),
        model(json!({ "type": "Unigram", "vocab": [["h", 0.0]] }), &["`unk_id` is missing"]),
        model(json!({ "type": "Unigram", "vocab": [["h", 0.0]], "unk_id": 7 }), &["UnkIdNotInVocabulary"]),
        model(json!({ "type": "Unigram", "vocab": [["h", 0.0]], "unk_id": -1 }), &["expected usize"]),
        model(json!({ "type": "Unigram", "vocab": [["h", "x"]], "unk_id": 0 }), &["cannot be used"]),
        model(
            json!({ "type": "WordPiece", "vocab": { "a": 0 }, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100 }),
            &["Missing [UNK] token"],
        ),
        model(json!({ "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "<unk>" }), &["Missing [UNK] token"]),
        with("pre_tokenizer", json!({ "type": "FixedLength", "length": 0 }), &["panicked", "chunk size"]),
        with("pre_tokenizer", json!({ "type": "Metaspace", "replacement": "ab" }), &["expected a character"]),
        with("pre_tokenizer", json!({ "type": "Digits", "individual_digits": 3 }), &["expected a boolean"]),
        with(
            "pre_tokenizer",
            json!({ "type": "Split", "pattern": { "Regex": "(" }, "behavior": "Isolated", "invert": false }),
            &["Opening parenthesis without closing"],
        ),
        with(
            "pre_tokenizer",
            json!({ "type": "Split", "pattern": { "Regex": "(".repeat(10_000) }, "behavior": "Isolated", "invert": false }),
            &["too deeply nested"],
        ),
        with("normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }), &["charsmap"]),
        with("normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "!" }), &["cannot be used"]),
        with("normalizer", json!({ "type": "Nonsense" }), &["cannot be used"]),
        with("normalizer", json!({ "type": "Replace", "pattern": { "String": "" }, "content": "x" }), &["panicked"]),
        with(
            "post_processor",
            json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<q>", "type_id": 0 } }], "pair": [],
                "special_tokens": {} }),
            &["panicked"],
        ),
        with(
            "post_processor",
            json!({ "type": "TemplateProcessing", "single": [{ "Sequence": { "id": "B", "type_id": 0 } }], "pair": [],
                "special_tokens": {} }),
            &["panicked"],
        ),
        with("added_tokens", json!([{ "id": 99_999_999_999_u64, "content": "<z>" }]), &["expected u32"]),
        with("added_tokens", json!({ "a": 1 }), &["invalid type: map"]),
        with("padding", json!(5), &["expected struct PaddingParams"]),
        with("truncation", json!({ "max_length": -1 }), &["expected usize"]),
        // Tokens of another model.
        whole(
            json!({ "model": { "type": "BPE", "vocab": { "h": u32::MAX, "e": 1, "l": 2, "o": 3 }, "merges": [] } }).to_string(),
            &["token 4294967295 is not in the vocabulary of 100", "belongs to another model"],
        ),
        Case::new(IN_WORDS, &["the prompt has no tokens", "at least one"])
            .model()
            .named("no vocabulary")
            .file("tokenizer.json", r#"{"model":{"type":"BPE","vocab":{},"merges":[]}}"#),
    ]
}

/// Chat templates that take too much of something, or are none.
pub(crate) fn templates() -> Vec<Case> {
    let template = |template: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}", "chat_template.jinja"]).collect();
        let name: String = template.chars().take(60).collect();
        Case::new(&format!("{IN_WORDS} --chat"), &words)
            .model()
            .named(&name)
            .file("chat_template.jinja", template)
    };
    let grown = |step: &str| {
        format!(
            "{{% set ns = namespace(x='a') %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        )
    };
    let nested = "{% set ns = namespace(v=[]) %}{% for i in range(10) %}{% for j in range(100000) %}\
        {% set ns.v = [ns.v] %}{% endfor %}{% endfor %}{{ ns.v }}";
    let loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let memory = &["more than 1GiB of memory"];
    vec![
        template(&grown("ns.x ~ ns.x"), memory),
        // On a slow machine, time ends it first.
        template(&grown("ns.x.replace('a', 'aa')"), &["it takes more than"]),
        template("{{ '%1000000000d' % 1 }}", memory),
        template("{{ [1] | tojson(indent=10 ** 10) }}", memory),
        template("{{ range(100000) | join('a' * 100000) }}", memory),
        template("{{ 'a' * 10 ** 9 }}", &["repeated string is too large"]),
        template("{{ range(10 ** 12) | list }}", &["range has too many elements"]),
        // On a slow machine, time ends it first.
        template(loops, &["it takes more than"]),
        template(nested, &["nests values, expressions or blocks too deeply"]),
        template(&format!("{{{{ {}1 }}}}", "not ".repeat(100_000)), &["more than 4096 tokens"]),
        template(&format!("{{{{ {}1{} }}}}", "(".repeat(1000), ")".repeat(1000)), &["recursion limit"]),
        template(&"{% if 1 %}".repeat(100_000), &["recursion limit"]),
        template(&"{% elif 1 %}".repeat(100_000), &["more than 1024 `elif`"]),
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", &["recursion limit"]),
        template("{{ raise_exception('a' * 10 ** 7) }}", &["aaa…"]),
        template("{{ messages | nothing }}", &["unknown filter"]),
        template("{% if %}", &["syntax error"]),
    ]
}

/// Prompts, and how many tokens are asked for.
pub(crate) fn prompts() -> Vec<Case> {
    let generate =
        |more: &str, words: &[&str]| Case::new(&format!("generate --model {{}} {more}"), words).model();
    vec![
        generate("", &["required", "--prompt", "--token-ids"]),
        generate("--prompt a --token-ids 1", &["cannot be used with"]),
        generate("--token-ids", &["a value is required for '--token-ids"]),
        generate("--token-ids", &["invalid value ''", "--token-ids"]).argument(""),
        generate("--token-ids 1,,2", &["invalid value ''", "--token-ids"]),
        generate("--token-ids 1,x", &["invalid value 'x'", "--token-ids"]),
        generate("--token-ids=-1", &["invalid value '-1'", "--token-ids"]),
        generate("--token-ids -1", &["invalid value '-1'", "--token-ids"]),
        generate("--token-ids 4294967296", &["invalid value '4294967296'", "--token-ids"]),
        generate("--token-ids 1.5", &["invalid value '1.5'", "--token-ids"]),
        generate("--token-ids 100", &["token 100 is not in the vocabulary of 100", "give ids from 0 to 99"]),
        generate("--token-ids 4294967295", &["token 4294967295 is not in the vocabulary", "0 to 99"]),
        generate(
            &format!("--token-ids {}", vec!["1"; 257].join(",")),
            &["257 tokens", "256", "shorten the prompt"],
        )
        .named("a long prompt"),
        generate(
            "--token-ids 1 --max-new-tokens 257",
            &["needs 257 positions", "at most --max-new-tokens 256"],
        ),
        generate("--token-ids 1 --max-new-tokens 4294967295", &["at most --max-new-tokens 256"]),
        generate("--token-ids 1 --max-new-tokens 4294967296", &["--max-new-tokens", "a whole number from 0"]),
        generate("--token-ids 1 --max-new-tokens -1", &["--max-new-tokens", "a whole number from 0"]),
        generate("--token-ids 1 --max-new-tokens many", &["--max-new-tokens", "a whole number from 0"]),
        generate("--token-ids 1 --temperature hot", &["--temperature", "a number, 0 or more"]),
        generate("--token-ids 1 --temperature nan", &["--temperature", "a number, 0 or more"]),
        generate("--token-ids 1 --temperature -0.1", &["--temperature", "a number, 0 or more"]),
        generate("--token-ids 1 --top-p 0", &["--top-p", "more than 0 and at most 1"]),
        generate("--token-ids 1 --top-p 1.01", &["--top-p", "more than 0 and at most 1"]),
        generate("--token-ids 1 --seed x", &["--seed", "a whole number from 0"]),
        generate("--token-ids 1 --seed -1", &["--seed", "a whole number from 0", "not `-1`"]),
        generate("--token-ids 1 --top-k -1", &["--top-k", "a whole number from 0", "not `-1`"]),
        generate("--token-ids 1 --top-p -0.5", &["--top-p", "more than 0 and at most 1"]),
        generate("--token-ids 1 --dtype f64", &["--dtype", "one of"]),
        generate("--token-ids 1 --backend mpi", &["--backend", "one of auto"]),
        generate("--token-ids 1 --world-size 3", &["does not divide 8 attention heads", "1, 2, 4, 8"]),
        generate("--token-ids 1 --world-size 4294967295", &["--world-size", "from 1 to 65536"]),
        generate("--token-ids 1 --world-size 65536", &["attention heads", "legal sizes for this model"]),
        generate(
            "--token-ids 1 --logits-out {}/absent/x",
            &["--logits-out", "{}/absent/x", "existing writable folder"],
        ),
        generate("--token-ids 1 --logits-out {}", &["--logits-out", "cannot write"]),
        generate("--prompt hello", &["needs a tokenizer", "--token-ids instead"])
            .file("tokenizer.json", Content::Absent),
    ]
}
