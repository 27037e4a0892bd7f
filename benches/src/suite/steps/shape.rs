//! Shapes of a model's layers.

use ryzanstein_tensor_parallel::{Error, LlamaConfig};

/// The shape of a model's layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelShape {
    /// Name of the shape.
    pub name: String,
    /// Number of features between layers.
    pub hidden: usize,
    /// Number of features inside the MLP.
    pub intermediate: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Tokens in the vocabulary for each layer of the whole model: an excerpt of the layers gets a proportional part of the
    /// vocabulary, so that embedding and head take the same share of a step as in the whole model.
    pub tokens_per_layer: usize,
}

impl ModelShape {
    /// Returns the shape of Llama 3 with 8 billion parameters: 32 layers.
    pub fn llama_8b() -> Self {
        Self::new("llama-8b", [4096, 14_336, 32, 8], 128_256 / 32)
    }

    /// Returns the shape of Llama 3 with 70 billion parameters: 80 layers.
    pub fn llama_70b() -> Self {
        Self::new("llama-70b", [8192, 28_672, 64, 8], 128_256 / 80)
    }

    /// Creates any other shape: hidden size, intermediate size, query heads, and heads of keys and values.
    pub fn new(
        name: &str,
        [hidden, intermediate, heads, kv_heads]: [usize; 4],
        tokens_per_layer: usize,
    ) -> Self {
        Self { name: name.into(), hidden, intermediate, heads, kv_heads, tokens_per_layer }
    }

    /// Returns the settings of a model of this many layers.
    ///
    /// # Errors
    /// [`Error::Model`](Error) for invalid sizes.
    pub fn config(&self, layers: usize) -> Result<LlamaConfig, Error> {
        let Self { hidden, intermediate, heads, kv_heads, tokens_per_layer, .. } = self;
        let vocabulary = tokens_per_layer * layers;
        let json = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": {hidden},
                "intermediate_size": {intermediate}, "num_hidden_layers": {layers}, "num_attention_heads": {heads},
                "num_key_value_heads": {kv_heads}, "vocab_size": {vocabulary}, "hidden_act": "silu",
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                "tie_word_embeddings": false}}"#
        );
        LlamaConfig::from_json("the shape's own config.json".as_ref(), &json, None)
    }
}
