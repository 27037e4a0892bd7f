//! Folders as people have them: other names of tensors than the model's, and what transformers makes of them. The fixtures have
//! the usual names, and other tests compare their logits with those of transformers.

use std::collections::BTreeMap;
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::testing::{fixture, on_loopback};

/// Type, shape and bytes of tensors, by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Creates a folder with the settings and weights of a fixture, changed.
fn changed(name: &str, change: impl FnOnce(&mut Value, &mut Tensors)) -> TempDir {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Tensors = stored
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    let mut config =
        serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    change(&mut config, &mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    folder
}

fn renamed(name: &str, rename: impl Fn(&str) -> String) -> TempDir {
    changed(name, |_, tensors| {
        *tensors =
            std::mem::take(tensors).into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
    })
}

/// Loads a model on two ranks, which read the folder, or get their weights from the first. Returns the logits of a prompt.
fn logits(folder: &Path) -> Result<Vec<f32>> {
    let load = |group: &mut ProcessGroup, is_from_root| -> Result<Vec<f32>> {
        let model = if is_from_root {
            let folder = (group.rank() == Rank(0)).then_some(folder);
            Llama::load_from_root(folder, None, Rank(0), group)?
        } else {
            Llama::load(folder, None, group)?
        };
        let mut decoder = Arc::new(model).decoder(CacheSize::full(1, 3), Passes::Eager)?;
        Ok(decoder.logits(0, &[1, 2, 3], group)?.values()?.into_owned())
    };
    let run = |is_from_root| on_loopback(2, |group| load(group, is_from_root)).swap_remove(0);
    let read = run(false)?;
    assert_eq!(run(true)?, read);
    Ok(read)
}

#[track_caller]
fn assert_same(folder: &TempDir, name: &str) {
    assert_eq!(logits(folder.path()).unwrap(), logits(&fixture(name)).unwrap());
}

#[track_caller]
fn assert_refused(folder: &TempDir, words: &[&str]) {
    let error = logits(folder.path()).unwrap_err().to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

fn bare(name: &str) -> String {
    name.strip_prefix("model.").unwrap_or(name).to_owned()
}

#[test]
fn names_with_one_model_more_or_less_are_those_of_the_model() {
    for name in ["llama-mha", "qwen2", "qwen3", "mistral-window"] {
        assert_same(&renamed(name, bare), name);
        assert_same(&renamed(name, |name| format!("model.{name}")), name);
    }
    let head = |name: &str| if name == HEAD { format!("model.{name}") } else { name.into() };
    assert_same(&renamed("llama-mha", head), "llama-mha");
}

#[test]
fn a_base_model_is_a_whole_one_if_its_head_is_the_embedding() {
    let base = |name, class: &str| {
        changed(name, |config, tensors| {
            config["architectures"] = json!([class]);
            tensors.remove(HEAD);
            *tensors =
                std::mem::take(tensors).into_iter().map(|(name, tensor)| (bare(&name), tensor)).collect();
        })
    };
    assert_same(&base("llama-gqa", "LlamaModel"), "llama-gqa");
    assert_same(&base("qwen3", "Qwen3Model"), "qwen3");
    let untied = base("llama-mha", "LlamaModel");
    assert_refused(&untied, &["tensor `lm_head.weight`: the weights have no head", "`tie_word_embeddings`"]);
}

#[test]
fn one_of_a_tied_pair_is_enough_whichever_it_is() {
    let head = |name: &str| if name == EMBEDDING { HEAD.into() } else { name.to_owned() };
    for name in ["llama-gqa", "qwen2", "mistral-window"] {
        assert_same(&renamed(name, head), name);
        assert_same(&renamed(name, |name| bare(&head(name))), name);
    }
    let neither = changed("llama-gqa", |_, tensors| drop(tensors.remove(EMBEDDING)));
    assert_refused(&neither, &["tensor `model.embed_tokens.weight`: it is in none of the weight files"]);
    let untied = changed("llama-mha", |_, tensors| drop(tensors.remove(EMBEDDING)));
    assert_refused(&untied, &["tensor `model.embed_tokens.weight`: it is in none of the weight files"]);
}

#[test]
fn two_names_of_one_tensor_must_have_the_same_values() {
    let twice = |change: fn(&mut Vec<u8>)| {
        changed("llama-mha", |_, tensors| {
            let mut tensor = tensors["model.norm.weight"].clone();
            change(&mut tensor.2);
            tensors.insert("norm.weight".into(), tensor);
        })
    };
    assert_same(&twice(|_| ()), "llama-mha");
    let different = twice(|bytes| bytes[0] ^= 1);
    assert_refused(
        &different,
        &["tensor `norm.weight`: model.safetensors has it too, as `model.norm.weight`"],
    );
}

#[test]
fn names_with_a_further_prefix_are_refused_with_the_command_that_removes_it() {
    for prefix in ["module.", "base_model.model.", "language_model."] {
        let folder = renamed("llama-mha", |name| format!("{prefix}{name}"));
        let found =
            format!("tensor `model.embed_tokens.weight`: the weights have it as `{prefix}model.embed_tokens");
        assert_refused(&folder, &[&found, &format!("k.removeprefix(\"{prefix}\")")]);
    }
}
