//! `ryz plan` as a user meets it: a table, JSON and refusals.

use serde_json::json;

use crate::support::{Run, report, text};

/// A folder with nothing but the `config.json` of Llama-3-8B, with some keys changed.
fn llama_3_8b(changes: &serde_json::Value) -> tempfile::TempDir {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16", "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
        "vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0, "tie_word_embeddings": false,
    });
    config.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    folder
}

fn plan(folder: &tempfile::TempDir, more: &[&str]) -> std::process::Output {
    let model = folder.path().to_str().expect("a path");
    Run::new(&[&["plan", "--model", model], more].concat(), &[]).finish()
}

#[test]
fn a_plan_in_json_says_for_every_world_size_what_a_rank_takes_and_whether_it_fits() {
    let folder = llama_3_8b(&json!({}));
    let output = plan(&folder, &["-n", "16", "--memory", "16GB", "--context", "2048", "--format", "json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json = report(&output);
    assert_eq!(json["model"], folder.path().to_str().expect("a path"));
    assert_eq!((&json["memory_bytes"], &json["context"]), (&json!(16_000_000_000_u64), &json!(2048)));
    let sizes = json["sizes"].as_array().expect("sizes");
    let sizes_of = |key: &str, value: bool| -> Vec<u64> {
        let with = sizes.iter().filter(|size| size[key] == value);
        with.map(|size| size["world_size"].as_u64().expect("a number")).collect()
    };
    assert_eq!(sizes_of("legal", true), [1, 2, 4, 8, 16]);
    assert_eq!(sizes_of("fits", false), [1]);
    assert_eq!(sizes[1]["weights_bytes"], 8_030_261_248_u64 + 65 * 4096 * 3);
    assert_eq!(sizes[8]["kv_replication"], 2);
}

#[test]
fn a_plan_as_a_table_says_what_fits_and_why_a_size_is_not_legal() {
    let folder = llama_3_8b(&json!({}));
    let output = plan(&folder, &["--memory", "80GiB", "--batch", "4", "--columns", "80"]);
    let table = text(&output.stdout);
    assert!(output.status.success() && table.lines().all(|line| line.chars().count() <= 80), "{table}");
    for wanted in [
        "8.03 billion parameters, bf16, 4 sequences of 8192 positions",
        "ranks  fits",
        "    2  yes",
        "3 ranks: world size 3 does not divide 32 attention heads",
    ] {
        assert!(table.contains(wanted), "`{wanted}` is not in\n{table}");
    }
}

#[test]
fn models_and_flags_that_make_no_plan_are_refused_with_the_reason() {
    let good = llama_3_8b(&json!({}));
    let mixtral = llama_3_8b(&json!({ "architectures": ["MixtralForCausalLM"] }));
    let empty = tempfile::tempdir().expect("a temporary folder");
    let refused = |folder, more: &[&str], reason: &str| {
        let output = plan(folder, more);
        let said = text(&output.stderr);
        assert!(
            output.status.code() == Some(2) && output.stdout.is_empty() && said.contains(reason),
            "{said}"
        );
    };
    refused(&mixtral, &[], "architecture `MixtralForCausalLM` is not supported");
    refused(&empty, &[], "config.json: there is no such file");
    refused(&good, &["--context", "8193"], "ask for at most --context 8192");
    refused(&good, &["--interconnect", "pigeon"], "there is no interconnect `pigeon`");
    refused(&good, &["--memory", "lots"], "--memory");
    refused(&good, &["--batch", "0"], "--batch");
}
