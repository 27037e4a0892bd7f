//! How much of a checkpoint each rank reads, on a model large enough that its cut tensors dominate.

use std::path::Path;

use ryzanstein_tensor_parallel::model::tensors;
use ryzanstein_tensor_parallel::{Llama, LlamaConfig};
use ryzanstein_tests::on_loopback;
use safetensors::tensor::{Dtype, TensorView};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 2048, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": false}"#;

/// Writes a checkpoint of noise. Gives the bytes of all its tensors, and of those that every rank needs whole.
fn write(folder: &Path) -> (u64, u64) {
    std::fs::write(folder.join("config.json"), CONFIG).unwrap();
    let config = LlamaConfig::from_folder(folder).unwrap();
    let specs = tensors(&config);
    let data: Vec<Vec<u8>> = specs
        .iter()
        .map(|s| {
            (0..s.shape.iter().product::<usize>()).flat_map(|i| (i as f32).sin().to_le_bytes()).collect()
        })
        .collect();
    let views = specs
        .iter()
        .zip(&data)
        .map(|(s, d)| (s.name.clone(), TensorView::new(Dtype::F32, s.shape.clone(), d).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    // Norms, and the biases of row-parallel layers, which are added once after the reduction.
    let whole = |name: &str| {
        name.contains("norm") || name.ends_with("o_proj.bias") || name.ends_with("down_proj.bias")
    };
    let bytes = |name: Option<&str>| {
        specs
            .iter()
            .zip(&data)
            .filter(|(s, _)| name.is_none() || whole(&s.name))
            .map(|(_, d)| d.len() as u64)
            .sum()
    };
    (bytes(None), bytes(Some("whole")))
}

#[test]
fn each_of_four_ranks_reads_at_most_thirty_hundredths_and_what_all_need() {
    let folder = tempfile::tempdir().unwrap();
    let (all, whole) = write(folder.path());
    let reports = on_loopback(4, |group| *Llama::load(folder.path(), None, group).unwrap().report());
    for (rank, report) in reports.iter().enumerate() {
        let share = (report.bytes_read - whole) as f64 / (all - whole) as f64;
        println!(
            "rank {rank} reads {} of {all} bytes, {whole} of them because all ranks need them: {share:.4}",
            report.bytes_read
        );
        assert_eq!(report.checkpoint_bytes, all);
        assert!(share <= 0.30, "rank {rank}: {share}");
    }
}
