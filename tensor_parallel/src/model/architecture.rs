//! The supported architectures: one row of [`ARCHITECTURES`] each. What differs between them is in the rows; parsing, the plan,
//! errors and help texts read it there.

use std::fmt;

/// A supported architecture. All of them are Llama with other settings.
#[derive(PartialEq, Eq)]
pub struct Architecture {
    /// Its name for people.
    pub name: &'static str,
    /// Its class in `architectures` of `config.json`.
    pub class: &'static str,
    /// Its `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The class of its tokenizer, if transformers does not take it from `tokenizer_config.json`.
    pub(crate) tokenizer_class: Option<&'static str>,
    /// Values of missing keys, as in transformers.
    pub(super) defaults: Defaults,
    /// Biases of queries, keys and values.
    pub(super) qkv_bias: Bias,
    /// Bias of the output projection of the attention.
    pub(super) output_bias: Bias,
    /// Biases of the projections of the MLP.
    pub(super) mlp_bias: Bias,
    /// True if each head of the queries and of the keys is normalised.
    pub(super) head_norms: bool,
    /// The layers that have a sliding window.
    pub(super) window: Window,
}

/// Values of missing keys.
#[derive(PartialEq, Eq)]
pub(super) struct Defaults {
    pub(super) max_positions: usize,
    /// If `None`, as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// If `None`, the query heads divide the features.
    pub(super) head_dim: Option<usize>,
}

/// The presence of a bias.
#[derive(PartialEq, Eq)]
pub(super) enum Bias {
    Never,
    Always,
    /// If this key is true.
    Key(&'static str),
}

/// The layers that have a sliding window.
#[derive(PartialEq, Eq)]
pub(super) enum Window {
    /// None.
    Never,
    /// All, or those of `layer_types`.
    Layers,
    /// If `use_sliding_window` is true, those from `max_window_layers` on, or those of `layer_types`.
    Switched,
}

/// All supported architectures.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "Llama",
        class: "LlamaForCausalLM",
        model_type: "llama",
        tokenizer_class: None,
        defaults: Defaults { max_positions: 2048, kv_heads: None, head_dim: None },
        qkv_bias: Bias::Key("attention_bias"),
        output_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        head_norms: false,
        window: Window::Never,
    },
    Architecture {
        name: "Mistral",
        class: "MistralForCausalLM",
        model_type: "mistral",
        tokenizer_class: Some("TokenizersBackend"),
        defaults: Defaults { max_positions: 131_072, kv_heads: Some(8), head_dim: None },
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        head_norms: false,
        window: Window::Layers,
    },
    Architecture {
        name: "Qwen2",
        class: "Qwen2ForCausalLM",
        model_type: "qwen2",
        tokenizer_class: Some("Qwen2Tokenizer"),
        defaults: Defaults { max_positions: 32_768, kv_heads: Some(32), head_dim: None },
        qkv_bias: Bias::Always,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        head_norms: false,
        window: Window::Switched,
    },
    Architecture {
        name: "Qwen3",
        class: "Qwen3ForCausalLM",
        model_type: "qwen3",
        tokenizer_class: Some("Qwen2Tokenizer"),
        defaults: Defaults { max_positions: 32_768, kv_heads: Some(32), head_dim: Some(128) },
        qkv_bias: Bias::Key("attention_bias"),
        output_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Never,
        head_norms: true,
        window: Window::Switched,
    },
];

impl Architecture {
    /// Finds an architecture by its class or its `model_type`.
    pub fn find(name: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|known| [known.class, known.model_type].contains(&name))
    }

    /// Returns a property of all architectures as a list for a sentence, with `word` before the last one.
    pub fn list(property: fn(&Self) -> &'static str, word: &str) -> String {
        let all: Vec<_> = ARCHITECTURES.iter().map(property).collect();
        let (last, others) = all.split_last().expect("there is an architecture");
        format!("{} {word} {last}", others.join(", "))
    }
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
