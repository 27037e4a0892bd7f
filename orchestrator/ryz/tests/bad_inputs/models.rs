//! The files of a model's folder, and prompts. The library's own tests have its refusals one by one; here is that the command
//! prints them, with the file, and ends well.

use ryzanstein_tests::fixtures;
use serde_json::{Value, json};

use crate::support::{Case, Content};

const ONE_TOKEN: &str = "generate --backend tcp --model {} --max-new-tokens 1 --token-ids 1";
const IN_WORDS: &str = "generate --backend tcp --model {} --max-new-tokens 1 --prompt hello";

fn parsed(file: &str) -> Value {
    let text = std::fs::read(fixtures::folder("llama-mha").join(file)).expect("a file");
    serde_json::from_slice(&text).expect("JSON")
}

/// Settings of a model that no model has.
pub(crate) fn configs() -> Vec<Case> {
    const CONFIG: &str = "config.json";
    let case = |name: &str, text: &str, words: &[&str]| {
        Case::new(ONE_TOKEN, words).model().named(words[0]).file(name, text)
    };
    let with = |key: &str, value: Value| {
        let mut config = parsed(CONFIG);
        config[key] = value;
        config.to_string()
    };
    let (long, nested) = ("x".repeat(100_000), format!("{{\"a\":{}", "[".repeat(100_000)));
    vec![
        case(CONFIG, "{\"a\": 48,}", &["{}/config.json: not a JSON object: trailing comma at line 1 column"]),
        case(CONFIG, &nested, &["{}/config.json: not a JSON object: recursion limit"]),
        case(
            CONFIG,
            &with("hidden_size", json!(long)),
            &["{}/config.json: `hidden_size` must be a positive"],
        ),
        case(
            CONFIG,
            &with("vocab_size", json!(i64::MAX)),
            &["{}/config.json: `vocab_size` is 922337203685477"],
        ),
        case(CONFIG, &with("vocab_size", json!(200)), &["expected shape [200, 48], found [100, 48]", "{}/"]),
        case(
            CONFIG,
            &with("num_hidden_layers", json!(3)),
            &["{}: tensor `model.layers.2.", "in none of the weight files", "the same model"],
        ),
        case(
            "generation_config.json",
            "{\"eos_token_id\": \"</s>\"}",
            &["{}/generation_config.json: `eos_token_id` must be a token"],
        ),
        case(
            "generation_config.json",
            "{\"stop_strings\": \"x\"}",
            &["`stop_strings` of {}/generation_config.json", "has no tokenizer.json", "--ignore-end"],
        )
        .file("tokenizer.json", Content::Absent),
        Case::new(
            "generate --model /no/such/model --token-ids 1",
            &["/no/such/model/config.json: there is no such file", "a model is a folder as Hugging Face"],
        ),
        Case::new("generate --token-ids 1", &["no model", "--model DIR", "model.directory"]),
    ]
}

/// Pipes, which nobody writes to, and endless files where a file should be.
pub(crate) fn no_files() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, largest) in [
        ("config.json", "more than 4MiB"),
        ("generation_config.json", "more than 4MiB"),
        ("tokenizer.json", "more than 64MiB"),
        ("model.safetensors", "Cannot allocate memory"),
        ("model.safetensors.index.json", "more than 64MiB"),
    ] {
        for (content, word) in [(Content::Pipe, "this is a pipe"), (Content::Sparse(1 << 40), largest)] {
            let code = if word.contains("allocate") { 1 } else { 2 };
            let case = Case::new(ONE_TOKEN, &[&format!("{{}}/{name}: "), word]).model().named(word);
            let case =
                if name.contains("index") { case.file("model.safetensors", Content::Absent) } else { case };
            cases.push(case.file(name, content).code(code));
        }
    }
    cases
}

/// Folders whose weights are damaged, or of another format.
pub(crate) fn weights() -> Vec<Case> {
    let instead = |name: &str, content: &[u8], words: &[&str]| {
        let case = Case::new(ONE_TOKEN, words).model().named(words[1]);
        case.file("model.safetensors", Content::Absent).file(name, content.to_vec())
    };
    let good = std::fs::read(fixtures::folder("llama-mha").join("model.safetensors")).expect("weights");
    let file = "{}/model.safetensors: ";
    let outside = br#"{"weight_map":{"a":"../part.safetensors"}}"#;
    let adapter = r#"{"base_model_name_or_path": "acme/base"}"#;
    let is_adapter =
        ["{}/adapter_config.json: this is an adapter of `acme/base`", "merge_and_unload", "merged`"];
    vec![
        instead("model.safetensors", b"", &[file, "the file is empty; download it again"]),
        instead("model.safetensors", b"<!DOCTYPE html>", &[file, "claim a header of", "convert it"]),
        instead("model.safetensors", &good[..good.len() / 2], &[file, "tensor `", "it is truncated"]),
        instead(
            "model.safetensors.index.json",
            outside,
            &["{}/model.safetensors.index.json: tensor `a`: ", "only name files in its own folder"],
        ),
        instead("a.gguf", b"x", &["{}: ", "`a.gguf` is a GGUF file", "' {} a.gguf`"]),
        instead("mine.safetensors", b"x", &["{}: ", "`mv {}/mine.safetensors {}/model.safetensors`"])
            .file("expected.safetensors", Content::Absent),
        Case::new("plan --model {}", &is_adapter).file("adapter_config.json", adapter),
    ]
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

/// Tokenizers at which their library fails or panics, and those of other models.
pub(crate) fn tokenizers() -> Vec<Case> {
    let tokenizer = |text: &str, words: &[&str]| {
        Case::new(IN_WORDS, words).model().named(text).file("tokenizer.json", text)
    };
    let refused = |text: &str, word: &str| {
        tokenizer(text, &["{}/tokenizer.json: ", "fetch the model's tokenizer.json again", word])
    };
    vec![
        refused("<!DOCTYPE html>", "expected value at line 1"),
        refused(r#"{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[["a","b"]]}}"#, "panicked"),
        refused(
            r#"{"pre_tokenizer":{"type":"FixedLength","length":0},"model":{"type":"BPE","vocab":{"h":0},"merges":[]}}"#,
            "panicked",
        ),
        tokenizer(
            r#"{"model":{"type":"BPE","vocab":{"h":4294967295,"e":1,"l":2,"o":3},"merges":[]}}"#,
            &["{}/", "token 4294967295 is not in the vocabulary of 100", "belongs to another model"],
        ),
        tokenizer(
            r#"{"model":{"type":"BPE","vocab":{},"merges":[]}}"#,
            &["the prompt has no tokens", "at least one"],
        ),
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
        // On a slow machine, time ends it first.
        template(loops, &["it takes more than"]),
        template(nested, &["nests values, expressions or blocks too deeply"]),
        template("{% if %}", &["syntax error"]),
        template("{# nothing #}", &["renders a prompt without tokens", "omit --chat"]),
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
