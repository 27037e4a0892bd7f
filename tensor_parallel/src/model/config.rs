//! `config.json` of a Hugging Face folder, parsed once into the settings of the model. Errors name the setting that is not
//! supported.

use std::path::Path;

use ryzanstein_config::{ByteSize, file};
use ryzanstein_process_group::DType;
use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Bias, Window};
use super::json::{JsonObject, shortened};
use super::rope;
use crate::checkpoint::other_format::{instead_of_model, refuse_adapter};
use crate::checkpoint::{INDEX, SINGLE};
use crate::error::{Error, RequestError, Result};
use crate::python_json;
use crate::rotary::Rotary;

/// All settings of a Llama-like model.
#[derive(Clone, PartialEq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the settings are independent")]
pub struct LlamaConfig {
    /// The architecture.
    pub architecture: &'static Architecture,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Number of features between layers.
    pub hidden: usize,
    /// Number of features inside the MLP.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Length of one head.
    pub head_dim: usize,
    /// The maximum sequence length: `max_position_embeddings`, or what the scaling of the rotary frequencies extends it to.
    pub max_positions: usize,
    /// A constant that the norms add to the mean square.
    pub norm_epsilon: f32,
    /// The rotary frequencies.
    pub rotary: Rotary,
    /// True if queries, keys and values have biases.
    pub qkv_bias: bool,
    /// True if the output projection of the attention has a bias.
    pub output_bias: bool,
    /// True if the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// True if each head of the queries and of the keys is normalised before the rotation.
    pub head_norms: bool,
    /// True if embedding and head share one matrix.
    pub tied_embeddings: bool,
    /// Number of positions that a query attends to, by layer; all if there is no window.
    pub sliding_windows: Vec<Option<usize>>,
    /// Tokens that end a text (EOS).
    pub eos_tokens: Vec<u32>,
    /// Strings that end a text. [`Llama`](crate::Llama) itself knows only tokens: pass them to a
    /// [`TextStream`](crate::generate::TextStream), as [`TextModel`](crate::generate::TextModel) does.
    pub stop_strings: Vec<String>,
    /// Remarks on statements of the files that the model ignores. Loading logs them.
    pub remarks: Vec<String>,
    /// The type of the stored weights according to the file; `None` if it is missing or not supported. Loading takes the type
    /// from the weights themselves.
    pub stored_dtype: Option<DType>,
}

// Limits far above those of any model. These sizes determine how much memory is allocated before they are compared with the
// weights, so a damaged file must not exhaust the memory.
const MOST_LAYERS: u64 = 1 << 12;
const MOST_HEADS: u64 = 1 << 16;
const LONGEST_HEAD: u64 = 1 << 16;
const MOST_TOKENS: u64 = 1 << 24;
const MOST_FEATURES: u64 = 1 << 28;

/// Keys of `generation_config.json` that change the greedy choice too, each with the number that changes nothing. Those of sampling
/// alone, such as `temperature`, are defaults of another program: a request here is greedy unless it says otherwise.
const CHOICE_OF_TOKENS: [(&str, Option<f64>); 13] = [
    ("bad_words_ids", None),
    ("begin_suppress_tokens", None),
    ("exponential_decay_length_penalty", None),
    ("forced_bos_token_id", None),
    ("forced_eos_token_id", None),
    ("guidance_scale", Some(1.0)),
    ("min_length", Some(0.0)),
    ("min_new_tokens", Some(0.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("num_beams", Some(1.0)),
    ("repetition_penalty", Some(1.0)),
    ("sequence_bias", None),
    ("suppress_tokens", None),
];

/// Limit of the file's size, far above that of any `config.json`.
const LARGEST_FILE: ByteSize = ByteSize::mib(4);

impl LlamaConfig {
    /// Reads `config.json` of a folder, and `generation_config.json` for the tokens and strings that end a text.
    ///
    /// # Errors
    /// Returns an error that names the file and the key that is missing, invalid or not supported.
    pub fn from_folder(directory: &Path) -> Result<Self> {
        let (config, generation) = read_folder(directory)?;
        Self::from_json(&directory.join("config.json"), &config, generation.as_deref())
    }

    /// Checks that the model supports sequences of this length.
    pub(super) fn check_positions(&self, positions: usize) -> Result<(), RequestError> {
        let max_positions = self.max_positions;
        if positions > max_positions {
            return Err(RequestError::TooLong { positions, max_positions });
        }
        Ok(())
    }

    /// Parses the text of `config.json` and of `generation_config.json`; errors name `file`.
    ///
    /// # Errors
    /// Returns an error that names the key that is missing, invalid or not supported.
    pub fn from_json(file: &Path, config: &str, generation: Option<&str>) -> Result<Self> {
        let object = |text: &str| {
            python_json::parse::<Map<String, Value>>(text)
                .map_err(|e| format!("not a JSON object: {e}; fetch the file again, or mend it there"))
        };
        let map = object(config).map_err(|e| Error::model(file, e))?;
        let mut parsed = parse(&JsonObject(&map)).map_err(|e| Error::model(file, e))?;
        match generation.map(object) {
            None => {}
            Some(Ok(map)) => parsed
                .read_generation(&JsonObject(&map))
                .map_err(|e| Error::model(&file.with_file_name("generation_config.json"), e))?,
            // As in transformers, the model is complete without this file.
            Some(Err(reason)) => {
                parsed.remarks.push(format!("generation_config.json is ignored: {reason}"));
            }
        }
        Ok(parsed)
    }

    /// Takes over the contents of `generation_config.json`.
    fn read_generation(&mut self, keys: &JsonObject<'_>) -> Result<(), String> {
        let (tokens, strings) = ends(keys)?;
        self.stop_strings = strings;
        if let Some(tokens) = tokens {
            self.eos_tokens = tokens;
        } else if !self.eos_tokens.is_empty() {
            self.remarks.push(format!(
                "`eos_token_id` is missing or empty in generation_config.json, so that of config.json ends a text: {:?}; \
                 transformers would not end it",
                self.eos_tokens
            ));
        }
        let has_effect = |(key, neutral): &(&str, Option<f64>)| {
            let is_neutral = |v: &Value| v.as_f64().is_some_and(|n| Some(n) == *neutral) || *v == json!([]);
            keys.get(key).is_some_and(|v| !is_neutral(v))
        };
        for (key, _) in CHOICE_OF_TOKENS.iter().filter(|choice| has_effect(choice)) {
            self.remarks.push(format!(
                "`{key}` of generation_config.json is ignored: each request says how its tokens are chosen"
            ));
        }
        Ok(())
    }
}

/// Returns the text of `config.json` and, if it exists, of `generation_config.json`.
pub(super) fn read_folder(directory: &Path) -> Result<(String, Option<String>)> {
    let path = directory.join("config.json");
    let config = file::read_text(&path, LARGEST_FILE).map_err(|error| {
        if !error.is_not_found() {
            return Error::file(&path, error);
        }
        refuse_adapter(directory).err().unwrap_or_else(|| {
            let instead = instead_of_model(directory).unwrap_or_else(|| {
                "a model is a folder as Hugging Face has it, with config.json, the weights in *.safetensors, and, for text, \
                 tokenizer.json"
                    .into()
            });
            Error::model(&path, format!("there is no such file; {instead}"))
        })
    })?;
    let path = directory.join("generation_config.json");
    Ok((config, Error::unless_missing(&path, file::read_text(&path, LARGEST_FILE))?))
}

/// Returns the architecture, with a remark if its class is not known.
fn architecture(keys: &JsonObject<'_>) -> Result<(&'static Architecture, Option<String>), String> {
    let class = keys.get("architectures").and_then(|v| v.get(0)).and_then(Value::as_str);
    let model_type = keys.text("model_type")?;
    let find = |name: &str| {
        // The class of a base model, whose weights may do for the whole one.
        let base = name.strip_suffix("Model").map(|name| format!("{name}ForCausalLM"));
        let known = Architecture::find(name).or_else(|| Architecture::find(&base?));
        known.ok_or_else(|| {
            let supported = Architecture::list(|known| known.class, "and");
            format!("architecture `{}` is not supported; supported are {supported}", shortened(name))
        })
    };
    match (class, model_type) {
        (Some(class), Some(model_type)) => match (find(class), Architecture::find(model_type)) {
            (Ok(known), _) if known.model_type == model_type => Ok((known, None)),
            (Ok(_), _) => Err(format!(
                "`architectures` has `{class}` and `model_type` is `{}`, which do not belong together; fetch the config.json \
                 that belongs to the weights",
                shortened(model_type)
            )),
            // As in transformers. A model of another kind has other weights, which loading refuses.
            (Err(_), Some(known)) => Ok((
                known,
                Some(format!(
                    "`architectures` has `{}`, which is not known: as in transformers, the model is that of `model_type`, \
                     `{model_type}`",
                    shortened(class)
                )),
            )),
            (Err(unknown), None) => Err(unknown),
        },
        (Some(name), None) | (None, Some(name)) => find(name).map(|known| (known, None)),
        (None, None) => Err(
            "neither `architectures` nor `model_type` is there; fetch the config.json that belongs to the \
                             weights"
                .into(),
        ),
    }
}

fn parse(keys: &JsonObject<'_>) -> Result<LlamaConfig, String> {
    let (architecture, remark) = architecture(keys)?;
    let is_off = |quantization: &Value| {
        ["load_in_4bit", "load_in_8bit"].iter().all(|key| quantization.get(key) == Some(&json!(false)))
    };
    if keys.get("quantization_config").is_some_and(|quantization| !is_off(quantization)) {
        return Err("`quantization_config`: quantized weights are not supported, only f32, f16 and bf16; download the model \
                    without quantization, or remove the key if it was left from before the weights were converted"
            .into());
    }
    if keys.get("is_causal") == Some(&json!(false)) {
        return Err(
            "`is_causal` false is not supported: a token attends to itself and those before it only".into()
        );
    }
    if keys.truthy("per_layer_config").is_some() {
        return Err("`per_layer_config` is not supported: all layers have the same settings".into());
    }
    if keys.truthy("configuration_files").is_some() {
        return Err("`configuration_files` names other files for other versions of transformers, and only config.json is read; \
                    replace it by the file that belongs to your version"
            .into());
    }
    if let Some(other) = keys.text("hidden_act")?.filter(|a| !["silu", "swish"].contains(a)) {
        return Err(format!("`hidden_act` `{other}` is not supported, only `silu`"));
    }
    if let Some(name) = keys.text("transformers_weights")?.filter(|name| ![SINGLE, INDEX].contains(name)) {
        return Err(format!(
            "`transformers_weights` names `{}`, and weights are read only from model.safetensors or the files of its index; \
             rename the file, and remove the key",
            shortened(name)
        ));
    }
    let hidden = keys.required("hidden_size", MOST_FEATURES)?;
    let heads = keys.required("num_attention_heads", MOST_HEADS)?;
    let Architecture { defaults, .. } = architecture;
    // A missing key takes the default of transformers; an explicit null means as many as query heads.
    let default = if keys.0.contains_key("num_key_value_heads") { None } else { defaults.kv_heads };
    let kv_heads = keys.size("num_key_value_heads")?.or(default).unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!(
            "`num_key_value_heads` {kv_heads} does not divide `num_attention_heads` {heads}"
        ));
    }
    let head_dim = match keys.size_up_to("head_dim", LONGEST_HEAD)?.or(defaults.head_dim) {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(format!("`num_attention_heads` {heads} does not divide `hidden_size` {hidden}")),
    };
    if !head_dim.is_multiple_of(2) {
        return Err(format!("a head of {head_dim} elements cannot be rotated in pairs"));
    }
    let layers = keys.required("num_hidden_layers", MOST_LAYERS)?;
    let positions = keys.size("max_position_embeddings")?.unwrap_or(defaults.max_positions);
    let rope = rope::parse(keys, head_dim, positions)?;
    let bias = |bias: &Bias| match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Key(key) => keys.flag(key),
    };
    let (eos_tokens, stop_strings) = ends(keys)?;
    let from_zero = |v: &Value| v.as_f64().map(|n| n as f32).filter(|n| *n >= 0.0 && n.is_finite());
    let epsilon = keys.optional("rms_norm_eps", "a number from 0 on", from_zero)?;
    Ok(LlamaConfig {
        architecture,
        vocabulary: keys.required("vocab_size", MOST_TOKENS)?,
        hidden,
        intermediate: keys.required("intermediate_size", MOST_FEATURES)?,
        layers,
        heads,
        kv_heads,
        head_dim,
        max_positions: rope.max_positions,
        norm_epsilon: epsilon.unwrap_or(1e-6),
        rotary: rope.rotary,
        qkv_bias: bias(&architecture.qkv_bias)?,
        output_bias: bias(&architecture.output_bias)?,
        mlp_bias: bias(&architecture.mlp_bias)?,
        head_norms: architecture.head_norms,
        tied_embeddings: keys.flag("tie_word_embeddings")?,
        sliding_windows: sliding_windows(keys, &architecture.window, layers)?,
        eos_tokens: eos_tokens.unwrap_or_default(),
        stop_strings,
        remarks: remark.into_iter().chain(rope.remark).collect(),
        stored_dtype: stored_dtype(keys),
    })
}

fn sliding_windows(
    keys: &JsonObject<'_>,
    layers_with: &Window,
    layers: usize,
) -> Result<Vec<Option<usize>>, String> {
    // A missing key takes the default of transformers; an explicit null means no window.
    let window =
        if keys.0.contains_key("sliding_window") { keys.size("sliding_window")? } else { Some(4096) };
    let (window, first) = match layers_with {
        Window::Never => return Ok(vec![None; layers]),
        Window::Layers => (window, 0),
        Window::Switched if !keys.flag("use_sliding_window")? => (None, 0),
        Window::Switched => {
            let first = keys.optional("max_window_layers", "a whole number", Value::as_u64)?.unwrap_or(28);
            (window, first as usize)
        }
    };
    let Some(types) = keys.get("layer_types") else {
        return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    let types = types.as_array().filter(|t| t.len() == layers);
    types
        .ok_or_else(|| format!("`layer_types` must list {layers} layers"))?
        .iter()
        .map(|t| match (t.as_str(), window) {
            (Some("full_attention" | "attention"), _) => Ok(None),
            (Some("sliding_attention"), Some(window)) => Ok(Some(window)),
            (Some("sliding_attention"), None) => {
                Err("`layer_types` has a window and `sliding_window` none".into())
            }
            _ => Err(format!(
                "`layer_types` {} is not supported, only full_attention and sliding_attention",
                shortened(&t.to_string())
            )),
        })
        .collect()
}

/// Returns the type of the weights. Newer files have `dtype`, older ones `torch_dtype`.
fn stored_dtype(keys: &JsonObject<'_>) -> Option<DType> {
    match keys.get("dtype").or_else(|| keys.get("torch_dtype"))?.as_str()? {
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }
}

/// Returns the tokens and strings that end a text. An empty list of tokens counts as missing; a negative number stands for no token.
fn ends(keys: &JsonObject<'_>) -> Result<(Option<Vec<u32>>, Vec<String>), String> {
    let token = |v: &Value| match v.as_i64()? {
        ..0 => Some(None),
        n => u32::try_from(n).ok().map(Some),
    };
    let text = |v: &Value| v.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let tokens = one_or_several(keys, "eos_token_id", "a token or a list of tokens", token)?;
    let tokens = (!tokens.is_empty()).then(|| tokens.into_iter().flatten().collect());
    Ok((tokens, one_or_several(keys, "stop_strings", "a text or a list of texts that are not empty", text)?))
}

fn one_or_several<T>(
    keys: &JsonObject<'_>,
    key: &str,
    expected: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<T>, String> {
    let all = keys.optional(key, expected, |value| match value.as_array() {
        Some(list) => list.iter().map(read).collect(),
        None => read(value).map(|one| vec![one]),
    })?;
    Ok(all.unwrap_or_default())
}
