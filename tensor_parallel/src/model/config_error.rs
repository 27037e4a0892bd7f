//! Errors in `config.json`, and in the other files of a model folder that contain no weights.

use serde_json::Value;

use super::architecture::Architecture;

/// An error in a file of a model folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelFileError {
    /// There is no `config.json`.
    #[error(
        "there is no such file; {}",
        .instead.as_deref().unwrap_or(
            "a model is a folder as Hugging Face has it, with config.json, the weights in *.safetensors, and, for text, tokenizer.json"
        )
    )]
    Missing {
        /// What there is instead, and what to do.
        instead: Option<String>,
    },
    /// A file that is not JSON, or not an object.
    #[error("not a JSON object: {0}; fetch the file again, or mend it there")]
    Json(#[source] serde_json::Error),
    /// A setting that is missing, invalid or not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An error of the tokenizer's library.
    #[error(
        "this tokenizer cannot {cannot}: {source}; fetch the model's tokenizer.json again, or remove it and give token ids \
         instead of text"
    )]
    Tokenizer {
        /// The failed operation.
        cannot: &'static str,
        /// The library's error.
        source: tokenizers::Error,
    },
}

/// An error in a setting of `config.json`.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A missing key that every model has.
    #[error("`{key}` is missing; fetch the config.json that belongs to the weights")]
    Missing {
        /// The key.
        key: &'static str,
    },
    /// A value of another JSON type, or out of range.
    #[error("`{key}` must be {expected}, and is {}", shortened(&.found.to_string()))]
    Invalid {
        /// The key.
        key: &'static str,
        /// The expected values.
        expected: &'static str,
        /// The actual value.
        found: Value,
    },
    /// A number that is larger than in any model.
    #[error("`{key}` is {value}, and {limit} is the most that is supported")]
    TooLarge {
        /// The key.
        key: &'static str,
        /// The actual value.
        value: u64,
        /// The maximum value.
        limit: u64,
    },
    /// A valid value that is not supported.
    #[error("`{key}` {found} is not supported, only {supported}")]
    Unsupported {
        /// The key.
        key: &'static str,
        /// The actual value.
        found: String,
        /// The supported values.
        supported: &'static str,
    },
    /// Two sizes, one of which must be a multiple of the other.
    #[error("`{divisor_key}` {divisor} does not divide `{key}` {value}")]
    NotDivisible {
        /// The key of the larger number.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The key of the smaller number.
        divisor_key: &'static str,
        /// Its value.
        divisor: usize,
    },
    /// An architecture that is not supported.
    #[error(
        "architecture `{}` is not supported; supported are {}",
        shortened(.name), Architecture::list(|known| known.class, "and")
    )]
    Architecture {
        /// The name in the file.
        name: String,
    },
    /// A class and a `model_type` of different architectures.
    #[error(
        "`architectures` has `{class}` and `model_type` is `{}`, which do not belong together; fetch the config.json that \
         belongs to the weights",
        shortened(.model_type)
    )]
    Architectures {
        /// The class in the file.
        class: String,
        /// The `model_type` in the file.
        model_type: String,
    },
    /// A missing architecture.
    #[error(
        "neither `architectures` nor `model_type` is there; fetch the config.json that belongs to the weights"
    )]
    NoArchitecture,
    /// Quantized weights.
    #[error("`quantization_config`: quantized weights are not supported, only f32, f16 and bf16")]
    Quantized,
    /// Weights in a file of another name.
    #[error(
        "`transformers_weights` names `{}`, and weights are read only from model.safetensors or the files of its index; rename \
         the file, and remove the key", shortened(.name)
    )]
    WeightsFile {
        /// The name in the file.
        name: String,
    },
    /// Heads of which only a part is rotated.
    #[error(
        "`partial_rotary_factor` {} is not supported with rope type `{kind}`, only 1: as in transformers, this architecture \
         rotates whole heads; download the config.json that belongs to the weights", shortened(&.found.to_string())
    )]
    PartialRotary {
        /// The factor.
        found: Value,
        /// The type.
        kind: &'static str,
    },
    /// An odd head length, which cannot be divided into pairs for rotation.
    #[error("a head of {head_dim} elements cannot be rotated in pairs")]
    OddHead {
        /// Length of one head.
        head_dim: usize,
    },
    /// A list whose length is not the number of layers.
    #[error("`layer_types` must list {layers} layers")]
    LayerTypes {
        /// Number of layers in the model.
        layers: usize,
    },
    /// A layer with a sliding window, but without a window length.
    #[error("`layer_types` has a window and `sliding_window` none")]
    NoWindow,
    /// Rotary settings that differ between layers.
    #[error("`{key}` differs by kind of layer, which is not supported")]
    RopeByLayer {
        /// The key.
        key: &'static str,
    },
    /// A scaling of rotary frequencies that is not supported.
    #[error("rope type `{}` is not supported, only {}", shortened(.name), super::rope::TYPES.join(", "))]
    RopeType {
        /// The name in the file.
        name: String,
    },
    /// `rope_parameters` and `rope_scaling` that say different things.
    #[error(
        "`rope_parameters` and `rope_scaling` contradict each other, each with its own `rope_theta` or that next to it; remove \
         the one that does not belong to the weights"
    )]
    RopeTwice,
    /// A list of factors whose length is not the number of rotary frequencies.
    #[error(
        "`{key}` must be a list of {frequencies} positive numbers, one for each pair of elements of a head"
    )]
    RopeFactorList {
        /// The key.
        key: &'static str,
        /// Number of rotary frequencies.
        frequencies: usize,
    },
    /// Rotary frequencies that are not finite numbers.
    #[error(
        "`rope_theta` {theta} with heads of {head_dim} elements and rope type {kind} gives no finite frequencies"
    )]
    RopeInfinite {
        /// `rope_theta`
        theta: f64,
        /// Length of one head.
        head_dim: usize,
        /// The type.
        kind: &'static str,
    },
    /// Limits of rotary frequencies in the wrong order.
    #[error("`high_freq_factor` {high} must be greater than `low_freq_factor` {low}")]
    RopeFactors {
        /// `low_freq_factor`
        low: f64,
        /// `high_freq_factor`
        high: f64,
    },
    /// An error in a setting within an object.
    #[error("`{key}`: {source}")]
    Within {
        /// The object's key.
        key: &'static str,
        /// The error in the setting.
        source: Box<ConfigError>,
    },
}

/// Shortens a value for a message, because it may be as long as the file.
fn shortened(value: &str) -> String {
    const QUOTED: usize = 100;
    match value.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}
