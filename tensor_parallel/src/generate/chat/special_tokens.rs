//! The special tokens of a model folder, which chat templates use by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::read_json;
use crate::error::Result;
use crate::model::Architecture;

const CONFIG: &str = "tokenizer_config.json";
const TOKENS_MAP: &str = "special_tokens_map.json";
/// The keys with further special tokens: an object by name, or a list.
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
const MODEL_SPECIFIC: &str = "model_specific_special_tokens";
/// The names of the usual special tokens, in the order in which transformers adds them.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

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
pub(super) fn collect(folder: &Path, config: Map<String, Value>) -> Result<SpecialTokens> {
    let tokens = values(folder, config)?;
    Ok(tokens.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?.into()))).collect())
}

/// Returns the special tokens of [`collect`] as the strings and objects of the files.
fn values(folder: &Path, mut config: Map<String, Value>) -> Result<Map<String, Value>> {
    if !config.contains_key("added_tokens_decoder") {
        config.extend(read_json::<Map<_, _>>(&folder.join(TOKENS_MAP))?.unwrap_or_default());
    }
    let class = class(folder, &config)?;
    let by_class = defaults(&class).iter().map(|(name, token)| ((*name).into(), (*token).into()));
    let mut tokens: Map<String, Value> = by_class.collect();
    let further = [EXTRA, MODEL_SPECIFIC].map(|key| config.remove(key));
    let further = further.into_iter().filter_map(|named| match named {
        Some(Value::Object(named)) => Some(named),
        _ => None,
    });
    config.retain(|name, _| name.ends_with("_token"));
    config.extend(further.flatten());
    for (name, value) in &config {
        if value.is_null() {
            tokens.remove(name);
        } else if text(value).is_some() {
            tokens.insert(name.clone(), value.clone());
        }
    }
    if !config.contains_key("pad_token") && !tokens.contains_key("pad_token") {
        let padding =
            read_json::<TokenizerFile>(&folder.join("tokenizer.json"))?.and_then(|file| file.padding);
        tokens.extend(padding.map(|padding| ("pad_token".into(), padding.pad_token.into())));
    }
    Ok(tokens)
}

/// Returns the tokens that the files next to `tokenizer.json` add to it or change, as transformers does: those that they list, by
/// number, then the special tokens that are new. `known` are the added tokens of `tokenizer.json` itself.
///
/// # Errors
/// Returns the errors of [`collect`].
pub(in crate::generate) fn added(
    folder: &Path,
    known: &BTreeMap<u32, AddedToken>,
) -> Result<Vec<AddedToken>> {
    let config: Map<_, _> = read_json(&folder.join(CONFIG))?.unwrap_or_default();
    let decoder = config.get("added_tokens_decoder");
    let files: &[&str] = if decoder.is_some() { &[CONFIG] } else { &[TOKENS_MAP, CONFIG] };
    let order = order(folder, files)?;
    let mut named: Vec<(String, Value)> = values(folder, config.clone())?.into_iter().collect();
    named.sort_by_key(|(name, _)| order.iter().position(|known| known == name));
    let is_named = |token: &str| named.iter().any(|(_, value)| text(value) == Some(token));
    let map: Map<_, _> = match decoder {
        Some(_) => Map::new(),
        None => read_json(&folder.join(TOKENS_MAP))?.unwrap_or_default(),
    };
    let lists = [(&config, EXTRA), (&config, ADDITIONAL), (&map, EXTRA), (&map, ADDITIONAL)];
    let lists = lists.map(|(file, key)| file.get(key)?.as_array().filter(|list| !list.is_empty()));
    let mut listed: BTreeMap<u64, AddedToken> = BTreeMap::new();
    if let Some(decoder) = decoder {
        let tokens = decoder.as_object().into_iter().flatten();
        let tokens = tokens
            .filter_map(|(id, value)| Some((id.parse::<u64>().ok()?, token(value, is_named(text(value)?))?)));
        listed.extend(tokens);
    } else {
        let is_special = |token: &str| {
            let usual = NAMES.iter().filter_map(|name| {
                map.get(*name).and_then(text).or_else(|| config.get(*name).and_then(Value::as_str))
            });
            let further = lists.into_iter().take(3).flatten().flatten().filter_map(text);
            usual.chain(further).any(|special| special == token)
        };
        let tokens: Map<_, _> = read_json(&folder.join("added_tokens.json"))?.unwrap_or_default();
        let tokens = tokens.iter().filter_map(|(text, id)| {
            let token = AddedToken::from(text, is_special(text));
            let special = token.special || is_named(text);
            Some((id.as_u64()?, token.special(special)))
        });
        listed.extend(tokens);
        // `tokenizer.json` has all the properties of its tokens, so it takes precedence.
        listed.extend(known.iter().map(|(id, token)| {
            (u64::from(*id), token.clone().special(token.special || is_named(&token.content)))
        }));
    }
    let mut tokens: Vec<AddedToken> = listed.into_values().collect();
    let present: BTreeSet<String> =
        known.values().chain(&tokens).map(|token| token.content.clone()).collect();
    let further = lists.into_iter().flatten().next().into_iter().flatten();
    let further = further.map(|value| token(value, value.is_string() || text(value).is_some_and(is_named)));
    let new = named.iter().map(|(_, value)| token(value, true)).chain(further).flatten();
    tokens.extend(new.filter(|token| !present.contains(&token.content)));
    Ok(tokens)
}

/// Returns a token of a list or with a name.
fn token(value: &Value, special: bool) -> Option<AddedToken> {
    let flag = |name: &str, default| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    let token = AddedToken::from(text(value)?, special || flag("special", false));
    let normalized = flag("normalized", token.normalized);
    let token = token.normalized(normalized).single_word(flag("single_word", false));
    Some(token.lstrip(flag("lstrip", false)).rstrip(flag("rstrip", false)))
}

/// Returns the names of special tokens in the order in which transformers adds them: the usual ones, then the others as in the
/// files.
fn order(folder: &Path, files: &[&str]) -> Result<Vec<String>> {
    let mut names = NAMES.map(String::from).to_vec();
    for file in files {
        let entries = read_json::<Entries>(&folder.join(file))?.unwrap_or_default();
        let further = [EXTRA, MODEL_SPECIFIC].into_iter().filter_map(|key| entries.get(key));
        let further: Vec<Entries> =
            further.filter_map(|value| serde_json::from_str(value.get()).ok()).collect();
        names.extend(entries.into_keys().chain(further.into_iter().flat_map(IndexMap::into_keys)));
    }
    Ok(names)
}

/// The entries of an object in the order of the file.
type Entries = IndexMap<String, Box<RawValue>>;

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

    #[test]
    fn new_tokens_come_in_the_order_of_transformers() {
        let folder = tempfile::tempdir().unwrap();
        let config = r#"{ "z_token": "<z>", "mask_token": "<m>", "extra_special_tokens": { "y": "<y>", "x": "<x>" },
            "pad_token": "<p>", "b_token": "<b>", "bos_token": "<s>" }"#;
        std::fs::write(folder.path().join(CONFIG), config).unwrap();
        let tokens = added(folder.path(), &BTreeMap::new()).unwrap();
        let texts: Vec<_> = tokens.iter().map(|token| token.content.as_str()).collect();
        assert_eq!(texts, ["<s>", "<p>", "<m>", "<z>", "<b>", "<y>", "<x>"]);
    }
}
