//! Folders with weights in other formats than a model's in safetensors: what they are, and the command that converts them.

use std::path::Path;

use ryzanstein_config::{ByteSize, file};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::python_json;

const ADAPTER: &str = "adapter_config.json";

/// Limit of the size of `adapter_config.json`.
const LARGEST_FILE: ByteSize = ByteSize::mib(4);

#[derive(Deserialize)]
struct AdapterConfig {
    base_model_name_or_path: Option<String>,
}

/// Refuses a folder with an adapter: transformers would apply it to the model, with other results.
///
/// # Errors
/// Returns [`Error::Checkpoint`] with the command that merges the two.
pub(crate) fn refuse_adapter(directory: &Path) -> Result<()> {
    let path = directory.join(ADAPTER);
    let Some(text) = Error::unless_missing(&path, file::read_text(&path, LARGEST_FILE))? else {
        return Ok(());
    };
    let config = python_json::parse::<AdapterConfig>(&text).ok();
    let base = config.and_then(|config| config.base_model_name_or_path);
    let base = base.map_or_else(|| "a model".into(), |base| format!("`{base}`"));
    let tokenizer = if directory.join("tokenizer.json").exists() { "d" } else { "m.name_or_path" };
    let command = python(
        &format!(
            "import peft, sys, transformers as t; d, o = sys.argv[1:]; \
             m = peft.AutoPeftModelForCausalLM.from_pretrained(d, dtype=\"auto\").merge_and_unload(); m.save_pretrained(o); \
             t.AutoTokenizer.from_pretrained({tokenizer}).save_pretrained(o)"
        ),
        &[&directory.display().to_string(), "merged"],
    );
    let reason = format!(
        "this is an adapter of {base}, and adapters are not applied; merge the two with `{command}`, or remove this file to run the \
         model without it"
    );
    Err(Error::checkpoint(&path, None, reason))
}

/// Returns what a folder without `config.json` has instead, and what to do, if it is a known format.
pub(crate) fn instead_of_model(directory: &Path) -> Option<String> {
    if let Some(name) = files(directory, &["gguf"]).first() {
        let command = python(
            "import sys, transformers as t; d, f = sys.argv[1:]; \
             m = t.AutoModelForCausalLM.from_pretrained(d, gguf_file=f, quantization_config=t.GgufConfig(dequantize=True)); \
             m.save_pretrained(d); t.AutoTokenizer.from_pretrained(d, gguf_file=f).save_pretrained(d)",
            &[&directory.display().to_string(), name],
        );
        return Some(format!("`{name}` is a GGUF file, as llama.cpp has it; convert it with `{command}`"));
    }
    let weights = files(directory, &["safetensors", "bin", "pth"]);
    let called = |prefix| weights.iter().find(|name| name.starts_with(prefix));
    if let Some(name) = called("adapter_model.") {
        return Some(format!(
            "`{name}` is an adapter without its {ADAPTER}; download that too, or the model"
        ));
    }
    called("consolidated.").map(|name| {
        format!("`{name}` is in Meta's or Mistral's own format; download the files of the model in Hugging Face format")
    })
}

/// Returns what a folder without weights in safetensors has instead, and what to do, if it is a known format.
pub(crate) fn instead_of_weights(directory: &Path) -> Option<String> {
    let pickle = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    if let Some(name) = pickle.into_iter().find(|name| directory.join(name).exists()) {
        let command = python(
            "import sys, transformers as t; d = sys.argv[1]; \
             t.AutoModelForCausalLM.from_pretrained(d, dtype=\"auto\").save_pretrained(d)",
            &[&directory.display().to_string()],
        );
        return Some(format!(
            "`{name}` has weights as pickles, which are not read; convert them with `{command}`"
        ));
    }
    if let Some(instead) = instead_of_model(directory) {
        return Some(instead);
    }
    let others = files(directory, &["bin", "pt", "pth", "ckpt", "h5", "msgpack", "onnx"]);
    match (&files(directory, &["safetensors"])[..], &others[..]) {
        ([], []) => None,
        ([], [name, ..]) => {
            Some(format!("`{name}` is in a format that is not read; download the model as safetensors"))
        }
        ([name], _) => {
            let [from, to] = [name.as_str(), super::SINGLE]
                .map(|name| quoted(&directory.join(name).display().to_string()));
            Some(format!("if `{name}` has all weights, rename it with `mv {from} {to}`"))
        }
        ([name, ..], _) => Some(format!(
            "`{name}` and others have no {}, which says what is in them; download it too",
            super::INDEX
        )),
    }
}

/// Returns the command that removes a prefix from the names of all tensors of a folder, if it can be written down safely.
pub(super) fn command_without_prefix(directory: &Path, prefix: &str) -> Option<String> {
    let is_plain = prefix.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    is_plain.then(|| {
        python(
            &format!(
                "import glob, os, sys; from safetensors.torch import load_file, save_file; os.chdir(sys.argv[1]); \
                 [save_file({{k.removeprefix(\"{prefix}\"): v.clone() for k, v in load_file(f).items()}}, f, \
                 {{\"format\": \"pt\"}}) for f in glob.glob(\"*.safetensors\")]"
            ),
            &[&directory.display().to_string()],
        )
    })
}

/// Returns the names of a folder's files with these extensions, sorted. There are none if it cannot be read: this is for messages.
pub(super) fn files(directory: &Path, extensions: &[&str]) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let has_one = |name: &String| {
        let extension = Path::new(name).extension();
        extension.is_some_and(|extension| extensions.iter().any(|one| extension == *one))
    };
    let mut names: Vec<String> = names.filter(has_one).collect();
    names.sort();
    names
}

/// Returns a command that runs a script, which has no single quotes, with arguments.
fn python(script: &str, arguments: &[&str]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|argument| quoted(argument)).collect();
    format!("python3 -c '{script}' {}", arguments.join(" "))
}

/// Quotes an argument for a shell, if necessary.
fn quoted(argument: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:@,".contains(c);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return argument.into();
    }
    format!("'{}'", argument.replace('\'', r"'\''"))
}
