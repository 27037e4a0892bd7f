//! What can be wrong with `config.json`, and with the other files of a model folder that hold no weights.

use serde_json::Value;

/// Why a file of a model folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// There is no `config.json`.
    #[error(
        "there is no such file; a model is a folder as Hugging Face has it, with config.json, the weights in *.safetensors, \
         and, for text, tokenizer.json"
    )]
    Missing,
    /// A file that is not JSON, or no object.
    #[error("not a JSON object: {0}; fetch the file again, or mend it there")]
    Json(#[source] serde_json::Error),
    /// A setting that is missing, nonsense or not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// What the tokenizer's own library reports.
    #[error(
        "this tokenizer cannot {cannot}: {source}; fetch the model's tokenizer.json again, or remove it and give token ids \
         instead of text"
    )]
    Tokenizer {
        /// What was asked of it.
        cannot: &'static str,
        /// The library's error.
        source: tokenizers::Error,
    },
}

/// What is wrong with a setting of `config.json`.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key that every model has.
    #[error("`{key}` is missing; fetch the config.json that belongs to the weights")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value of another JSON type, or out of the key's range.
    #[error("`{key}` must be {expected}, and is {}", shortened(&.found.to_string()))]
    Invalid {
        /// The key.
        key: &'static str,
        /// What the key takes.
        expected: &'static str,
        /// What it has.
        found: Value,
    },
    /// A number beyond what any model has.
    #[error("`{key}` is {value}, and {limit} is the most that is supported")]
    TooLarge {
        /// The key.
        key: &'static str,
        /// What it has.
        value: u64,
        /// The most it may have.
        limit: u64,
    },
    /// A value that some model may have, but none that is supported.
    #[error("`{key}` {found} is not supported, only {supported}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// What it has.
        found: String,
        /// What is supported.
        supported: &'static str,
    },
    /// Two sizes of which one must be a multiple of the other.
    #[error("`{divisor_key}` {divisor} does not divide `{key}` {value}")]
    NotDivisible {
        /// The key of the larger number.
        key: &'static str,
        /// What it has.
        value: usize,
        /// The key of the smaller number.
        divisor_key: &'static str,
        /// What it has.
        divisor: usize,
    },
    /// Another architecture.
    #[error(
        "architecture `{}` is not supported; supported are LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM",
        shortened(.name)
    )]
    Architecture {
        /// As the file names it.
        name: String,
    },
    /// No architecture at all.
    #[error(
        "neither `architectures` nor `model_type` is there; fetch the config.json that belongs to the weights"
    )]
    NoArchitecture,
    /// Quantized weights.
    #[error("`quantization_config`: quantized weights are not supported, only f32, f16 and bf16")]
    Quantized,
    /// An odd head, of which no pairs of elements can be rotated.
    #[error("a head of {head_dim} elements cannot be rotated in pairs")]
    OddHead {
        /// Length of one head.
        head_dim: usize,
    },
    /// A list that is not as long as the model has layers.
    #[error("`layer_types` must list {layers} layers")]
    LayerTypes {
        /// Layers of the model.
        layers: usize,
    },
    /// A layer with a window of no length.
    #[error("`layer_types` has a window and `sliding_window` none")]
    NoWindow,
    /// Rotary settings that differ from layer to layer.
    #[error("`{key}` differs by kind of layer, which is not supported")]
    RopeByLayer {
        /// The key.
        key: &'static str,
    },
    /// Another scaling of rotary frequencies.
    #[error("rope type `{name}` is not supported, only default, linear and llama3")]
    RopeType {
        /// As the file names it.
        name: String,
    },
    /// Limits of rotary frequencies in the wrong order.
    #[error("`high_freq_factor` {high} must be greater than `low_freq_factor` {low}")]
    RopeFactors {
        /// `low_freq_factor`
        low: f64,
        /// `high_freq_factor`
        high: f64,
    },
    /// A setting within an object.
    #[error("`{key}`: {source}")]
    Within {
        /// The object's key.
        key: &'static str,
        /// What is wrong in it.
        source: Box<ConfigError>,
    },
}

/// What is quoted of a value that may be as long as the file.
fn shortened(value: &str) -> String {
    const QUOTED: usize = 100;
    match value.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

impl ConfigError {
    /// Heads of which only a part is rotated.
    pub(super) fn unsupported_rotary_factor(factor: f64) -> Self {
        Self::Unsupported { key: "partial_rotary_factor", found: factor.to_string(), supported: "1" }
    }
}
