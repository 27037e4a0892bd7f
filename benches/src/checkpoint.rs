//! Writes a bf16 checkpoint of pattern values in the shapes of an 8-billion-parameter Llama, with any number of layers.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

const HIDDEN: usize = 4096;
const INNER: usize = 14336;
const KEY_VALUE: usize = 1024;
/// Size of the vocabulary.
pub const VOCABULARY: usize = 32000;
/// The file with the weights.
const FILE: &str = "model.safetensors";
/// Bytes per write; a checkpoint is longer.
const PIECE: usize = 8 << 20;

/// Returns names and shapes, in the order of the file.
fn tensors(layers: usize) -> Vec<(String, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[HIDDEN]);
        add("self_attn.q_proj", &[HIDDEN, HIDDEN]);
        add("self_attn.k_proj", &[KEY_VALUE, HIDDEN]);
        add("self_attn.v_proj", &[KEY_VALUE, HIDDEN]);
        add("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        add("post_attention_layernorm", &[HIDDEN]);
        add("mlp.gate_proj", &[INNER, HIDDEN]);
        add("mlp.up_proj", &[INNER, HIDDEN]);
        add("mlp.down_proj", &[HIDDEN, INNER]);
    }
    all.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    all.push(("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]));
    all
}

/// Writes `config.json` and the weights: 436 MB per layer, plus 0.5 GB.
///
/// # Errors
/// Returns the operating system's error when the folder is not writable or full.
pub fn write(folder: &Path, layers: usize) -> io::Result<()> {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors(layers) {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name, entry);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(PIECE, File::create(folder.join(FILE))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    // Small numbers of both signs.
    let piece: Vec<u8> =
        (0..PIECE / 2).flat_map(|i| [(i % 251) as u8, 0x3c | ((i % 2) << 7) as u8]).collect();
    let mut left = end;
    while left > 0 {
        let now = left.min(PIECE);
        file.write_all(&piece[..now])?;
        left -= now;
    }
    file.flush()
}
