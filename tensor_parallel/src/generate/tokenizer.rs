//! Encoding of text to tokens and decoding of tokens, by the `tokenizer.json` of a model folder.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use ryzanstein_config::{ByteSize, file};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use tokenizers::{AddedToken, ModelWrapper};

use super::chat::{added_tokens, read_json};
use super::{growth, panics, patterns};
use crate::digest::digest;
use crate::error::{Error, Result};

/// The maximum size of a tokenizer file, twice that of the largest known one.
const LARGEST_FILE: ByteSize = ByteSize::mib(64);

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer {
    file: PathBuf,
    inner: tokenizers::Tokenizer,
    /// The texts of the special tokens.
    special: HashMap<u32, String>,
    digest: u64,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a folder, and the tokens that `tokenizer_config.json` and other files add to it. Returns `None` if
    /// there is none. Ignores its padding and truncation, which are for batches in training.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or is not that of a tokenizer.
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        let Some((tokenizer, _)) = open(directory)? else { return Ok(None) };
        let config: Map<_, _> = read_json(&directory.join("tokenizer_config.json"))?.unwrap_or_default();
        let cleans_up = config.get("clean_up_tokenization_spaces").and_then(Value::as_bool) == Some(true);
        // As in transformers, it has no effect with BPE.
        if cleans_up && !matches!(tokenizer.inner.get_model(), ModelWrapper::BPE(_)) {
            tracing::warn!(
                folder = %directory.display(),
                "`clean_up_tokenization_spaces` of tokenizer_config.json is ignored: texts keep spaces before punctuation, which \
                 transformers removes"
            );
        }
        Ok(Some(tokenizer))
    }

    /// Returns a folder's `tokenizer.json` with the tokens that other files add to it, for ranks that cannot read them, or `None` if
    /// there is none.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn read(directory: &Path) -> Result<Option<Vec<u8>>> {
        let whole = |(tokenizer, text): (Self, Vec<u8>)| {
            caught(&tokenizer.file, "be sent", || {
                let added = to_raw_value(tokenizer.inner.get_added_vocabulary())?;
                let mut fields: BTreeMap<String, &RawValue> = serde_json::from_slice(&text)?;
                fields.insert("added_tokens".into(), &added);
                Ok(serde_json::to_vec(&fields)?)
            })
        };
        open(directory)?.map(whole).transpose()
    }

    /// Parses the bytes of a `tokenizer.json`. Errors name `file`.
    ///
    /// # Errors
    /// Returns an error if they are not a tokenizer.
    pub fn from_bytes(file: &Path, text: Vec<u8>) -> Result<Self> {
        let digest = digest(text.iter().copied());
        let inner = caught(file, "be used", || {
            growth::check_strings(&text)?;
            let mut inner = tokenizers::Tokenizer::from_bytes(text)?;
            growth::check_rules(&(inner.get_normalizer(), inner.get_pre_tokenizer()))?;
            growth::check_rules(&inner.get_decoder())?;
            inner.with_padding(None).with_truncation(None)?;
            if let Some(rules) = patterns::translated(inner.get_normalizer())? {
                inner.with_normalizer(Some(rules))?;
            }
            if let Some(rules) = patterns::translated(inner.get_pre_tokenizer())? {
                inner.with_pre_tokenizer(Some(rules));
            }
            if let Some(rules) = patterns::translated(inner.get_decoder())? {
                inner.with_decoder(Some(rules));
            }
            Ok(inner)
        })?;
        let special = special(&inner);
        Ok(Self { file: file.into(), inner, special, digest })
    }

    /// Adds tokens, or changes the properties of those that it has.
    fn add(&mut self, tokens: Vec<AddedToken>) -> Result<()> {
        let added = caught(&self.file, "be used", || {
            let added = serde_json::to_vec(&tokens)?;
            growth::check_strings(&added)?;
            self.inner.add_tokens(tokens)?;
            Ok(added)
        })?;
        self.special = special(&self.inner);
        self.digest ^= digest(added);
        Ok(())
    }

    /// Encodes text, and adds the special tokens that the model expects around it.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot express the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, true)
    }

    /// Encodes text that already contains its special tokens, such as the result of a [`ChatTemplate`](super::ChatTemplate).
    ///
    /// # Errors
    /// Returns the errors of [`encode`](Self::encode).
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, false)
    }

    /// Returns the text of a special token.
    pub(super) fn special_token(&self, token: u32) -> Option<&str> {
        self.special.get(&token).map(String::as_str)
    }

    /// Returns a hash of the file.
    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    fn encoded(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        caught(&self.file, "encode this text", || {
            Ok(self.inner.encode(text, add_special_tokens)?.get_ids().to_vec())
        })
    }

    /// Decodes tokens, without special tokens.
    ///
    /// # Errors
    /// Returns an error if the tokenizer fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        caught(&self.file, "decode these tokens", || self.inner.decode(tokens, true))
    }
}

/// Reads the tokenizer of a folder. Also returns the bytes of `tokenizer.json`.
fn open(directory: &Path) -> Result<Option<(Tokenizer, Vec<u8>)>> {
    let file = directory.join("tokenizer.json");
    let Some(text) = Error::unless_missing(&file, file::read(&file, LARGEST_FILE))? else { return Ok(None) };
    let mut tokenizer = Tokenizer::from_bytes(&file, text.clone())?;
    let known: BTreeMap<u32, AddedToken> = tokenizer.inner.get_added_tokens_decoder().into_iter().collect();
    tokenizer.add(added_tokens(directory, &known)?)?;
    Ok(Some((tokenizer, text)))
}

/// Returns the texts of the special tokens.
fn special(inner: &tokenizers::Tokenizer) -> HashMap<u32, String> {
    let added = inner.get_added_tokens_decoder().into_iter();
    added.filter(|(_, token)| token.special).map(|(id, token)| (id, token.content)).collect()
}

/// Calls the tokenizers library, which panics on some files.
fn caught<T>(file: &Path, cannot: &str, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let outcome =
        panics::caught(work).unwrap_or_else(|panic| Err(format!("the tokenizers library {panic}").into()));
    outcome.map_err(|error| {
        Error::model(
            file,
            format!(
                "this tokenizer cannot {cannot}: {error}; fetch the model's tokenizer.json again, or remove it and give token ids \
                 instead of text"
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::fixture;

    /// Encodes the prompt `hi` with this `tokenizer.json`.
    fn encoded(tokenizer: &str) -> Result<Vec<u32>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
        Tokenizer::open(folder.path())?.unwrap().encode("hi")
    }

    fn refused(tokenizer: &str, words: &[&str]) {
        let error = encoded(tokenizer).unwrap_err();
        let said = error.to_string();
        assert!(error.is_permanent() && words.iter().all(|word| said.contains(word)), "{tokenizer}: {said}");
        assert!(said.contains("tokenizer.json: ") && said.contains("fetch the model's"), "{said}");
    }

    // Every expectation was read from transformers 5.24.
    #[test]
    fn other_files_add_tokens_and_say_which_are_special() {
        let vocab = json!({ "a": 0, "b": 1, "x": 2, "<": 3, ">": 4, "/": 5, " ": 6, "<v>": 7 });
        let known = json!({
            "id": 7, "content": "<v>", "single_word": false, "lstrip": true, "rstrip": false, "normalized": false, "special": false
        });
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [known], "decoder": { "type": "Fuse" },
            "model": { "type": "BPE", "vocab": vocab, "merges": [] }
        });
        let x = json!({ "content": "<x>", "lstrip": true, "normalized": false, "special": true });
        let (config, map) = ("tokenizer_config.json", "special_tokens_map.json");
        for (file, content, text, tokens, decoded) in [
            (config, json!({}), "a<x><v>b", &[0, 3, 2, 4, 7, 1][..], "a<x><v>b"),
            (config, json!({ "added_tokens_decoder": { "8": x } }), "a <x>b", &[0, 8, 1], "ab"),
            (
                config,
                json!({ "added_tokens_decoder": { "8": { "content": "<x>" } } }),
                "a<x>b",
                &[0, 8, 1],
                "a<x>b",
            ),
            (
                config,
                json!({ "added_tokens_decoder": { "11": x, "9": { "content": "x<" } }, "eos_token": "<>" }),
                "x<<><x>",
                &[8, 10, 9],
                "x<",
            ),
            (config, json!({ "eos_token": "<x>" }), "a<x>b", &[0, 8, 1], "ab"),
            (config, json!({ "eos_token": "<v>" }), "a<v>b", &[0, 7, 1], "ab"),
            (config, json!({ "image_token": "<x>" }), "a<x>b", &[0, 8, 1], "ab"),
            (config, json!({ "extra_special_tokens": ["<x>"] }), "a<x>b", &[0, 8, 1], "ab"),
            (config, json!({ "additional_special_tokens": ["<x>"] }), "a<x>b", &[0, 8, 1], "ab"),
            (map, json!({ "eos_token": "<x>" }), "a<x>b", &[0, 8, 1], "ab"),
            ("added_tokens.json", json!({ "<x>": 8 }), "a<x>b", &[0, 8, 1], "a<x>b"),
            ("added_tokens.json", json!({ "<v>": 7 }), "a <v>b", &[0, 7, 1], "a<v>b"),
            (map, json!({ "mask_token": { "content": "<x>", "lstrip": true } }), "a <x>b", &[0, 8, 1], "ab"),
            (
                config,
                json!({ "mask_token": { "__type": "AddedToken", "content": "<x>", "lstrip": true } }),
                "a <x>b",
                &[0, 8, 1],
                "ab",
            ),
            (config, json!({ "cls_token": "<x>", "pad_token": "<>" }), "a<><x>b", &[0, 8, 9, 1], "ab"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
            std::fs::write(folder.path().join(file), content.to_string()).unwrap();
            let opened = Tokenizer::open(folder.path()).unwrap().unwrap();
            let sent = Tokenizer::read(folder.path()).unwrap().unwrap();
            for tokenizer in [opened, Tokenizer::from_bytes("sent".as_ref(), sent).unwrap()] {
                assert_eq!(tokenizer.encode(text).unwrap(), tokens, "{file} {content}");
                assert_eq!(tokenizer.decode(tokens).unwrap(), decoded, "{file} {content}");
            }
        }
    }

    #[test]
    fn padding_and_truncation_for_batches_in_training_are_ignored() {
        let model = r#""model":{"type":"BPE","vocab":{"h":0,"i":1},"merges":[]}"#;
        for training in [
            r#""padding":{"strategy":{"Fixed":4000000000},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,
                "pad_type_id":0,"pad_token":"x"}"#,
            r#""padding":{"strategy":"BatchLongest","direction":"Left","pad_to_multiple_of":1099511627776,"pad_id":0,
                "pad_type_id":0,"pad_token":"x"}"#,
            r#""truncation":{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0}"#,
        ] {
            assert_eq!(encoded(&format!("{{{training},{model}}}")).unwrap(), [0, 1], "{training}");
        }
    }

    #[test]
    fn rules_that_lengthen_a_text_without_bound_are_refused() {
        let with = |kind: &str, rules: &[String], vocab: &str| {
            let rules = rules.join(",");
            format!(r#"{{{kind}:[{rules}]}},"model":{{"type":"BPE","vocab":{{{vocab}}},"merges":[]}}}}"#)
        };
        let normalizers = r#""normalizer":{"type":"Sequence","normalizers""#;
        let decoders = r#""decoder":{"type":"Sequence","decoders""#;
        let replace = |pattern: &str, content: &str| {
            format!(r#"{{"type":"Replace","pattern":{{{pattern}}},"content":"{content}"}}"#)
        };
        let double = vec![replace(r#""String":"h""#, "hh"); 40];
        refused(
            &with(normalizers, &double, r#""h":0"#),
            &["lengthen a text 1099511627776 times", "the most is 4096"],
        );
        refused(&with(decoders, &double, r#""h":0"#), &["lengthen a text"]);
        refused(
            &with(normalizers, &[replace(r#""Regex":"""#, &"x".repeat(5000))], r#""h":0"#),
            &["5001 times"],
        );
        let byte_level = vec![r#"{"type":"ByteLevel"}"#.to_owned(); 13];
        refused(&with(normalizers, &byte_level, r#""h":0"#), &["8192 times"]);
        refused(
            &with(normalizers, &[], &format!(r#""{}":0"#, "h".repeat(70_000))),
            &["a string of 70000 bytes"],
        );
        let llama = [r#"{"type":"Prepend","prepend":"▁"}"#.into(), replace(r#""String":" ""#, "▁")];
        assert_eq!(encoded(&with(normalizers, &llama, r#""▁":0,"h":1,"i":2"#)).unwrap(), [0, 1, 2]);
    }

    #[test]
    fn patterns_that_cost_too_much_are_refused() {
        let split = |pattern: &str| {
            format!(
                r#"{{"pre_tokenizer":{{"type":"Split","pattern":{{"Regex":"{pattern}"}},"behavior":"Isolated","invert":false}},
                    "model":{{"type":"BPE","vocab":{{"h":0,"i":1}},"merges":[]}}}}"#
            )
        };
        refused(&split("(((h{1000}){1000}){1000})"), &["cannot be used"]);
        refused(&split("(h"), &["Opening parenthesis without closing"]);
        // The library gives a match up after a number of steps.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), split(r"(?:(h+)+\\1?)+(?=x)i")).unwrap();
        let tokens = Tokenizer::open(folder.path()).unwrap().unwrap().encode(&"h".repeat(40)).unwrap();
        assert_eq!(tokens, [0; 40]);
        refused(
            &format!(r#"{{"normalizer":{}"#, r#"{"type":"Sequence","normalizers":["#.repeat(1000)),
            &["recursion"],
        );
    }

    #[test]
    fn patterns_match_at_every_line_as_in_oniguruma() {
        let tokenizer = json!({
            "version": "1.0", "model": { "type": "BPE", "vocab": { "h": 0, "i": 1, "\n": 2 }, "merges": [] },
            "normalizer": { "type": "Replace", "pattern": { "Regex": "^h" }, "content": "i" }
        });
        let tokenizer = Tokenizer::from_bytes("".as_ref(), tokenizer.to_string().into_bytes()).unwrap();
        assert_eq!(tokenizer.encode("h\nhh\n").unwrap(), [1, 2, 1, 0, 2]);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused_with_the_reason() {
        let text = std::fs::read_to_string(fixture("llama-mha/tokenizer.json")).unwrap();
        let good: Value = serde_json::from_str(&text).unwrap();
        for (text, reason) in [
            ("", "EOF while parsing"),
            ("null", "invalid type: null"),
            ("[]", "invalid type: sequence"),
            ("{}", "Model missing"),
            ("<html>", "expected value at line 1"),
            (&text[..500], "EOF while parsing"),
            (&format!("\u{feff}{text}"), "expected value"),
            (&"[".repeat(100_000), "cannot be used"),
        ] {
            refused(text, &[reason]);
        }
        for (key, value, reason) in [
            ("version", r#""2.0""#, "Unknown tokenizer version '2.0'"),
            ("model", "5", "cannot be used"),
            ("added_tokens", r#"[{"id":99999999999,"content":"<z>"}]"#, "expected u32"),
            ("added_tokens", r#"{"a":1}"#, "invalid type: map"),
            ("padding", "5", "expected struct PaddingParams"),
            ("truncation", r#"{"max_length":-1}"#, "expected usize"),
        ] {
            let mut tokenizer = good.clone();
            tokenizer[key] = serde_json::from_str(value).unwrap();
            refused(&tokenizer.to_string(), &[reason]);
        }
        let deep =
            format!(r#""pattern":{{"Regex":"{}"}},"behavior":"Isolated","invert":false"#, "(".repeat(10_000));
        let single = |part: &str| format!(r#""single":[{part}],"pair":[],"special_tokens":{{}}"#);
        let (q, b) =
            (r#"{"SpecialToken":{"id":"<q>","type_id":0}}"#, r#"{"Sequence":{"id":"B","type_id":0}}"#);
        let piece = r#""unk_token":"[UNK]","continuing_subword_prefix":"x","max_input_chars_per_word":9,"vocab":{"a":0}"#;
        for (key, kind, more, reason) in [
            ("model", "Nonsense", r#""vocab":{}"#, &["cannot be used"][..]),
            ("model", "BPE", r#""vocab":[],"merges":[]"#, &["cannot be used"]),
            ("model", "BPE", r#""vocab":{"h":-1},"merges":[]"#, &["integer `-1`, expected u32"]),
            ("model", "BPE", r#""vocab":{"h":4294967296},"merges":[]"#, &["expected u32"]),
            ("model", "BPE", r#""vocab":{"h":1.5},"merges":[]"#, &["expected u32"]),
            ("model", "BPE", r#""vocab":{"h":"0"},"merges":[]"#, &["expected u32"]),
            ("model", "BPE", r#""vocab":{"h":0},"merges":[["h","q"]]"#, &["Token `q` out of vocabulary"]),
            ("model", "BPE", r#""vocab":{"a":0,"b":1,"abc":2},"merges":[["a","b"]]"#, &["Token `ab` out of"]),
            ("model", "BPE", r#""vocab":{"a":0},"merges":["a b c"]"#, &["Merges text file invalid"]),
            ("model", "BPE", r#""vocab":{"a":0},"merges":[1,2]"#, &["cannot be used"]),
            ("model", "BPE", r#""vocab":{"a":0},"merges":[["a"]]"#, &["cannot be used"]),
            ("model", "BPE", r#""vocab":{"a":0},"merges":[],"dropout":2"#, &["between 0 and 1"]),
            (
                "model",
                "BPE",
                r#""vocab":{"a":0},"merges":[],"unk_token":"<x>""#,
                &["Unk token `<x>` not found"],
            ),
            ("model", "Unigram", r#""vocab":[]"#, &["unk_id"]),
            ("model", "Unigram", r#""vocab":[["h",0.0]]"#, &["`unk_id` is missing"]),
            ("model", "Unigram", r#""vocab":[["h",0.0]],"unk_id":7"#, &["UnkIdNotInVocabulary"]),
            ("model", "Unigram", r#""vocab":[["h",0.0]],"unk_id":-1"#, &["expected usize"]),
            ("model", "Unigram", r#""vocab":[["h","x"]],"unk_id":0"#, &["cannot be used"]),
            ("model", "WordPiece", piece, &["Missing [UNK] token"]),
            ("model", "WordLevel", r#""vocab":{"a":0},"unk_token":"<unk>""#, &["Missing [UNK] token"]),
            ("pre_tokenizer", "Metaspace", r#""replacement":"ab""#, &["expected a character"]),
            ("pre_tokenizer", "Digits", r#""individual_digits":3"#, &["expected a boolean"]),
            ("pre_tokenizer", "Split", &deep, &["too deeply nested"]),
            ("normalizer", "Precompiled", r#""precompiled_charsmap":"AAAA""#, &["charsmap"]),
            ("normalizer", "Precompiled", r#""precompiled_charsmap":"!""#, &["cannot be used"]),
            ("normalizer", "Nonsense", r#""x":0"#, &["cannot be used"]),
            // Panics. The first merge is longer than any token.
            (
                "model",
                "BPE",
                r#""vocab":{"a":0,"b":1},"merges":[["a","b"]]"#,
                &["be used", "panicked", "out of range"],
            ),
            (
                "model",
                "BPE",
                r#""vocab":{"a":0,"b":1},"merges":[["a","b"]],"continuing_subword_prefix":"xxxx""#,
                &["panicked"],
            ),
            (
                "pre_tokenizer",
                "FixedLength",
                r#""length":0"#,
                &["encode this text", "panicked", "chunk size"],
            ),
            ("normalizer", "Replace", r#""pattern":{"String":""},"content":"x""#, &["panicked"]),
            ("post_processor", "TemplateProcessing", &single(q), &["panicked"]),
            ("post_processor", "TemplateProcessing", &single(b), &["panicked"]),
        ] {
            let mut tokenizer = if key == "model" { json!({}) } else { good.clone() };
            tokenizer[key] = serde_json::from_str(&format!(r#"{{"type":"{kind}",{more}}}"#)).unwrap();
            refused(&tokenizer.to_string(), reason);
        }
        assert!(!panics::catches_panics(), "only while the library runs");
    }
}
