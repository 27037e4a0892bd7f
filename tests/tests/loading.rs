//! The share of a checkpoint that each rank reads, on a model large enough that its cut tensors dominate.

use std::path::Path;

use ryzanstein_config::BackendChoice;
use ryzanstein_tensor_parallel::model::{Stage, TensorSpec, stage_tensors};
use ryzanstein_tensor_parallel::{Llama, LlamaConfig};
use ryzanstein_tests::fixtures::write_noise;
use ryzanstein_tests::{config, on_loopback, with_ranks};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 2048, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": false}"#;

/// Writes a checkpoint of noise. Gives the bytes of all its tensors, and of those that every rank needs whole.
fn write(folder: &Path) -> (u64, u64) {
    let specs = write_noise(folder, CONFIG);
    // Norms, and the biases of row-parallel layers, which are added once after the reduction.
    let whole = |name: &str| {
        name.contains("norm") || name.ends_with("o_proj.bias") || name.ends_with("down_proj.bias")
    };
    (bytes(&specs), bytes(specs.iter().filter(|spec| whole(&spec.name))))
}

fn bytes<'a>(specs: impl IntoIterator<Item = &'a TensorSpec>) -> u64 {
    specs.into_iter().map(|spec| 4 * spec.shape.iter().product::<usize>() as u64).sum()
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

#[test]
fn each_stage_reads_its_layers_and_each_rank_of_it_a_share() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    for (tensor, stages) in [(1, 2), (2, 2), (1, 3)] {
        let mut config = config(BackendChoice::Tcp);
        config.layout.pipeline_parallel = u32::try_from(stages).unwrap().try_into().unwrap();
        let reports = with_ranks(&config, tensor * stages, |mut manager| {
            *Llama::load(folder.path(), None, &mut manager).unwrap().report()
        });
        let config = LlamaConfig::from_folder(folder.path()).unwrap();
        for (rank, report) in reports.iter().enumerate() {
            let stage = Stage { index: rank / tensor, count: stages };
            let of_stage = bytes(&stage_tensors(&config, stage).unwrap());
            let share = report.bytes_read as f64 / of_stage as f64;
            println!("{tensor} × {stages}, rank {rank} reads {} of {of_stage} bytes", report.bytes_read);
            assert!(share >= 1.0 / tensor as f64 && share <= 1.02 / tensor as f64, "rank {rank}: {share}");
        }
    }
}
