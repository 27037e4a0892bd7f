//! The special tokens of a model folder, which chat templates use by name.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::read_json;
use crate::error::Result;
use crate::model::Architecture;

/// The texts of special tokens, by name.
pub(super) type SpecialTokens = BTreeMap<String, String>;

/// The tokens that a class of tokenizers has by default. The others have none.
fn defaults(class: &str) -> &'static [(&'static str, &'static str)] {
    const END_OF_TEXT: &str = "<|endoftext|>";
    match class.strip_suffix("Fast").unwrap_or(class) {
        "LlamaTokenizer" | "CodeLlamaTokenizer" => {
            &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")]
        }
        "Qwen2Tokenizer" => {
            &[("eos_token", END_OF_TEXT), ("unk_token", END_OF_TEXT), ("pad_token", END_OF_TEXT)]
        }
        "GPT2Tokenizer" => {
            &[("bos_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("unk_token", END_OF_TEXT)]
        }
        "GemmaTokenizer" => &[
            ("bos_token", "<bos>"),
            ("eos_token", "<eos>"),
            ("unk_token", "<unk>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        _ => &[],
    }
}

/// Collects the special tokens as transformers does: from the class of the tokenizer, from `config` (that is
/// `tokenizer_config.json`), from `special_tokens_map.json` if `config` does not list the added tokens, and from the padding of
/// `tokenizer.json`.
///
/// # Errors
/// Returns an error that names the file that is invalid or cannot be read.
pub(super) fn collect(folder: &Path, mut config: Map<String, Value>) -> Result<SpecialTokens> {
    if !config.contains_key("added_tokens_decoder") {
        config.extend(read_json::<Map<_, _>>(&folder.join("special_tokens_map.json"))?.unwrap_or_default());
    }
    let class = class(folder, &config)?;
    let by_class = defaults(&class).iter().map(|(name, token)| ((*name).into(), (*token).into()));
    let mut tokens: SpecialTokens = by_class.collect();
    let further = ["extra_special_tokens", "model_specific_special_tokens"].map(|key| config.remove(key));
    let further = further.into_iter().filter_map(|named| match named {
        Some(Value::Object(named)) => Some(named),
        _ => None,
    });
    config.retain(|name, _| name.ends_with("_token"));
    config.extend(further.flatten());
    for (name, value) in &config {
        if value.is_null() {
            tokens.remove(name);
        } else if let Some(token) = text(value) {
            tokens.insert(name.clone(), token.into());
        }
    }
    if !config.contains_key("pad_token") && !tokens.contains_key("pad_token") {
        let padding =
            read_json::<TokenizerFile>(&folder.join("tokenizer.json"))?.and_then(|file| file.padding);
        tokens.extend(padding.map(|padding| ("pad_token".into(), padding.pad_token)));
    }
    Ok(tokens)
}

/// Returns the tokens that the files next to `tokenizer.json` add to it, as transformers does: those that they list, by number, and
/// the texts of special tokens.
///
/// # Errors
/// Returns the errors of [`collect`].
pub(in crate::generate) fn added(folder: &Path) -> Result<(Vec<AddedToken>, Vec<String>)> {
    let config: Map<_, _> = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let listed: BTreeMap<u64, AddedToken> = if let Some(listed) = config.get("added_tokens_decoder") {
        let listed = listed.as_object().into_iter().flatten();
        listed.filter_map(|(id, value)| Some((id.parse().ok()?, token(value)?))).collect()
    } else {
        let listed: Map<_, _> = read_json(&folder.join("added_tokens.json"))?.unwrap_or_default();
        listed.iter().filter_map(|(text, id)| Some((id.as_u64()?, AddedToken::from(text, false)))).collect()
    };
    let lists = ["extra_special_tokens", "additional_special_tokens"].map(|key| config.get(key));
    let further = lists.into_iter().flatten().filter_map(Value::as_array).flatten();
    let further: Vec<String> = further.filter_map(text).map(Into::into).collect();
    let named = collect(folder, config)?.into_values().chain(further).collect();
    Ok((listed.into_values().collect(), named))
}

/// Returns a token of a list.
fn token(value: &Value) -> Option<AddedToken> {
    let flag = |name: &str, default| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    let token = AddedToken::from(text(value)?, flag("special", false));
    let normalized = flag("normalized", token.normalized);
    let token = token.normalized(normalized).single_word(flag("single_word", false));
    Some(token.lstrip(flag("lstrip", false)).rstrip(flag("rstrip", false)))
}

/// Returns the class of the tokenizer. For some models it does not depend on `tokenizer_config.json`.
fn class(folder: &Path, config: &Map<String, Value>) -> Result<String> {
    let model = read_json::<Map<String, Value>>(&folder.join("config.json"))?.unwrap_or_default();
    let known = model.get("model_type").and_then(Value::as_str).and_then(Architecture::find);
    let class = known.and_then(|known| known.tokenizer_class);
    let named = || config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    Ok(class.unwrap_or_else(named).into())
}

#[derive(Deserialize)]
struct TokenizerFile {
    padding: Option<Padding>,
}

#[derive(Deserialize)]
struct Padding {
    pad_token: String,
}

/// Returns the text of a token: a string, or an object in old files.
fn text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the tokens of a folder with these files as one line.
    fn collected(files: &[(&str, Value)]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Map::new();
        for (name, content) in files {
            match content {
                Value::Object(object) if *name == "tokenizer_config.json" => config = object.clone(),
                _ => std::fs::write(folder.path().join(name), content.to_string()).unwrap(),
            }
        }
        let tokens = collect(folder.path(), config).unwrap();
        tokens.iter().map(|(name, token)| format!("{name}={token}")).collect::<Vec<_>>().join(" ")
    }

    fn configured(config: &Value) -> String {
        collected(&[("tokenizer_config.json", config.clone())])
    }

    // Every expectation was read from transformers 5.24.

    #[test]
    fn names_and_objects_of_the_configuration_are_tokens() {
        let config = json!({
            "bos_token": "<s>", "x_token": { "__type": "AddedToken", "content": "<x>" }, "sep_token": null,
            "add_bos_token": true, "name": "no token", "extra_special_tokens": { "foo": "<f>", "bar_token": "<b>" },
            "model_specific_special_tokens": { "q": "<q>" },
        });
        assert_eq!(configured(&config), "bar_token=<b> bos_token=<s> foo=<f> q=<q> x_token=<x>");
        assert_eq!(configured(&json!({ "additional_special_tokens": ["<a>"] })), "");
    }

    #[test]
    fn classes_have_defaults_that_null_removes() {
        let llama = "bos_token=<s> eos_token=</s> unk_token=<unk>";
        assert_eq!(configured(&json!({ "tokenizer_class": "LlamaTokenizerFast" })), llama);
        let without = json!({ "tokenizer_class": "LlamaTokenizer", "bos_token": null });
        assert_eq!(configured(&without), "eos_token=</s> unk_token=<unk>");
        assert_eq!(configured(&json!({ "tokenizer_class": "PreTrainedTokenizerFast" })), "");
        let of_model = |model_type: &str| {
            let class = json!({ "tokenizer_class": "LlamaTokenizer" });
            collected(&[
                ("tokenizer_config.json", class),
                ("config.json", json!({ "model_type": model_type })),
            ])
        };
        assert_eq!(of_model("llama"), llama);
        assert_eq!(of_model("mistral"), "");
        let end = "<|endoftext|>";
        for model in ["qwen2", "qwen3"] {
            assert_eq!(of_model(model), format!("eos_token={end} pad_token={end} unk_token={end}"));
        }
    }

    #[test]
    fn the_special_tokens_map_counts_only_without_a_list_of_added_tokens() {
        let map = json!({ "bos_token": "<b>", "eos_token": { "content": "<e>" }, "foo": "bar", "img_token": "<i>" });
        let with = |config| {
            collected(&[("tokenizer_config.json", config), ("special_tokens_map.json", map.clone())])
        };
        assert_eq!(with(json!({ "bos_token": "<s>" })), "bos_token=<b> eos_token=<e> img_token=<i>");
        assert_eq!(with(json!({ "bos_token": "<s>", "added_tokens_decoder": {} })), "bos_token=<s>");
    }

    #[test]
    fn the_padding_of_the_tokenizer_names_a_token_unless_the_configuration_does() {
        let tokenizer = ("tokenizer.json", json!({ "padding": { "pad_token": "<p>", "pad_id": 3 } }));
        let with = |config| collected(&[("tokenizer_config.json", config), tokenizer.clone()]);
        assert_eq!(with(json!({})), "pad_token=<p>");
        assert_eq!(with(json!({ "pad_token": null })), "");
        assert_eq!(with(json!({ "pad_token": "<q>" })), "pad_token=<q>");
    }
}
