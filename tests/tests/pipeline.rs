//! A model whose layers are divided into pipeline stages, against the same model on one stage.

use std::path::Path;
use std::sync::Arc;

use ryzanstein_config::BackendChoice;
use ryzanstein_process_group::{ProcessGroupManager, Rank};
use ryzanstein_tensor_parallel::{CacheSize, Error, GenerateOptions, Llama, Passes, Result};
use ryzanstein_tests::fixtures::write_noise;
use ryzanstein_tests::gpu::need;
use ryzanstein_tests::{config, distance, greatest, same_bits, with_ranks};
use tempfile::TempDir;

/// Tensor-parallel ranks and stages. Five layers do not divide by two or three.
const LAYOUTS: [(usize, usize); 4] = [(1, 2), (2, 2), (1, 3), (1, 5)];

fn model(tied: bool) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90, "max_position_embeddings": 256,
            "tie_word_embeddings": {tied}}}"#
    );
    write_noise(folder.path(), &config);
    folder
}

fn on_stages<T: Send>(
    backend: BackendChoice,
    (tensor, stages): (usize, usize),
    rank: impl Fn(ProcessGroupManager) -> T + Sync,
) -> Vec<T> {
    let mut config = config(backend);
    config.layout.pipeline_parallel = u32::try_from(stages).unwrap().try_into().unwrap();
    with_ranks(&config, tensor * stages, rank)
}

/// The logits of some passes, and greedy tokens.
fn compute(model: Llama, manager: &mut ProcessGroupManager) -> (Vec<f32>, Vec<u32>) {
    let model = Arc::new(model);
    let mut all = Vec::new();
    let mut decoder = model.decoder(CacheSize::full(3, 200), Passes::Graph).unwrap();
    for tokens in [&[3, 1, 4, 1, 5][..], &[9]] {
        all.extend_from_slice(&decoder.logits(0, tokens, manager).unwrap().values().unwrap());
    }
    decoder.clear(0);
    let width = model.config().vocabulary;
    let mut rows = |values: &[f32]| {
        all.extend_from_slice(values);
        values.len() / width
    };
    // Fewer sequences than stages, and more; of different lengths, then of one token each.
    assert_eq!(rows(&decoder.prefill(2, &[7, 8, 9], manager).unwrap().values().unwrap()), 1);
    let mixed = [(1, &[5, 6][..]), (2, &[4]), (0, &[1, 2, 3])];
    assert_eq!(rows(&decoder.step(&mixed, manager).unwrap().values().unwrap()), 3);
    assert_eq!(rows(&decoder.decode(&[(0, 11), (1, 12), (2, 13)], manager).unwrap().values().unwrap()), 3);
    assert_eq!(rows(&decoder.decode(&[(2, 14), (1, 15)], manager).unwrap().values().unwrap()), 2);
    assert_eq!(rows(&decoder.decode(&[(1, 16)], manager).unwrap().values().unwrap()), 1);
    // Three sequences that share pages, which two of them leave at once.
    assert_eq!(rows(&decoder.step(&[(2, &[6; 140])], manager).unwrap().values().unwrap()), 1);
    decoder.fork(2, 0, 144).unwrap();
    decoder.fork(2, 1, 130).unwrap();
    let next = [(0, &[17][..]), (1, &[18, 19]), (2, &[20])];
    assert_eq!(rows(&decoder.step(&next, manager).unwrap().values().unwrap()), 3);
    let options = GenerateOptions { max_new_tokens: 12, ignore_end: true, ..GenerateOptions::default() };
    (all, model.generate(&[1, 2, 3], &options, manager).unwrap().tokens)
}

/// Compares with one stage. On a GPU, fewer rows may take another product: results are near, not the same.
fn same_as_one_stage(
    backend: BackendChoice,
    folders: &[TempDir],
    layouts: &[(usize, usize)],
    load: impl Fn(&Path, &mut ProcessGroupManager) -> Result<Llama> + Sync,
) {
    for (folder, &(tensor, stages)) in folders.iter().flat_map(|f| layouts.iter().map(move |l| (f, l))) {
        let run = |stages| {
            on_stages(backend, (tensor, stages), |mut manager| {
                let result = compute(load(folder.path(), &mut manager).unwrap(), &mut manager);
                manager.finalize().unwrap();
                result
            })
        };
        let (logits, tokens) = run(1).remove(0);
        let largest = greatest(&logits);
        for (rank, (got, chosen)) in run(stages).into_iter().enumerate() {
            let difference = distance(&got, &logits);
            let is_near = backend == BackendChoice::Nccl && difference <= 1e-5 * largest;
            assert!(
                is_near || same_bits(&got, &logits),
                "{tensor} × {stages}, rank {rank}: {difference} of {largest}"
            );
            assert_eq!(chosen, tokens, "{tensor} × {stages}, rank {rank}");
        }
    }
}

#[test]
fn stages_compute_what_one_stage_does_to_the_bit() {
    same_as_one_stage(BackendChoice::Tcp, &[model(false), model(true)], &LAYOUTS, |folder, manager| {
        Llama::load(folder, None, manager)
    });
}

#[test]
#[ignore = "needs 2 GPUs"]
fn stages_on_gpus_compute_what_one_stage_does() {
    let layouts = if need(2) < 4 { &[(1, 2)][..] } else { &[(1, 2), (2, 2)] };
    same_as_one_stage(BackendChoice::Nccl, &[model(false)], layouts, |folder, manager| {
        Llama::load(folder, None, manager)
    });
}

#[test]
fn stages_that_get_their_weights_from_one_rank_compute_the_same() {
    same_as_one_stage(BackendChoice::Tcp, &[model(false), model(true)], &LAYOUTS, |folder, manager| {
        let folder = (manager.rank() == Rank(0)).then_some(folder);
        Llama::load_from_root(folder, None, Rank(0), manager)
    });
}

#[test]
fn more_stages_than_layers_are_refused_on_every_rank_before_weights_are_looked_for() {
    let folder = model(false);
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    for error in on_stages(BackendChoice::Tcp, (1, 6), |mut manager| {
        Llama::load(folder.path(), None, &mut manager).unwrap_err()
    }) {
        let said = error.to_string();
        assert!(said.contains("6 stages does not fit the 5 layers") && said.contains("at most 5"), "{said}");
        assert!(matches!(error, Error::Configuration(_)), "{error:?}");
    }
}

#[test]
fn a_call_with_other_groups_than_those_of_loading_is_refused() {
    let folder = model(false);
    on_stages(BackendChoice::Tcp, (1, 2), |mut manager| {
        let model = Arc::new(Llama::load(folder.path(), None, &mut manager).unwrap());
        let mut decoder = model.decoder(CacheSize::full(1, 4), Passes::Graph).unwrap();
        let error = decoder.prefill(0, &[1, 2], manager.tensor_parallel()).unwrap_err().to_string();
        assert!(error.contains("of 2 and is called as stage 0 of 1"), "{error}");
        // Nothing was sent, so the groups are as good as before.
        decoder.prefill(0, &[1, 2], &mut manager).unwrap();
    });
    on_stages(BackendChoice::Tcp, (2, 1), |mut manager| {
        let model = Arc::new(Llama::load(folder.path(), None, &mut manager).unwrap());
        let mut decoder = model.decoder(CacheSize::full(1, 4), Passes::Graph).unwrap();
        let mut reversed = manager.new_group(&[Rank(1), Rank(0)]).unwrap().unwrap();
        let error = decoder.prefill(0, &[1, 2], &mut reversed).unwrap_err().to_string();
        assert!(error.contains("of 2 and is called with a group in which it is rank"), "{error}");
        decoder.prefill(0, &[1, 2], &mut manager).unwrap();
    });
}

#[test]
fn what_cannot_be_computed_is_refused_before_a_stage_sends_anything() {
    let folder = model(false);
    on_stages(BackendChoice::Tcp, (1, 2), |mut manager| {
        let model = Arc::new(Llama::load(folder.path(), None, &mut manager).unwrap());
        let mut decoder = model.decoder(CacheSize::full(2, 4), Passes::Graph).unwrap();
        for (pairs, expected) in [
            (&[][..], "no sequence gets a token"),
            (&[(0, 1), (0, 2)], "sequence 0 is given twice"),
            (&[(0, 1), (1, 90)], "token 90 is not in the vocabulary of 90"),
            (&[(0, 1), (2, 1)], "no sequence 2"),
        ] {
            let error = decoder.decode(pairs, &mut manager).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        decoder.decode(&[(0, 1), (1, 2)], &mut manager).unwrap();
    });
}

#[test]
fn a_stage_that_is_lost_is_named_by_the_others() {
    let folder = model(false);
    for (layout, lost) in [((1, 3), 1), ((2, 2), 3)] {
        let errors = on_stages(BackendChoice::Tcp, layout, |mut manager| {
            let model = Arc::new(Llama::load(folder.path(), None, &mut manager).unwrap());
            if manager.rank() == Rank(lost) {
                return None;
            }
            let mut decoder = model.decoder(CacheSize::full(1, 4), Passes::Graph).unwrap();
            Some(decoder.prefill(0, &[1, 2], &mut manager).unwrap_err().to_string())
        });
        for (rank, error) in errors.iter().enumerate() {
            let Some(error) = error else { continue };
            // Rank 0 of 2 × 2 shares no group with rank 3, and hears of rank 2, which gives up for it.
            let named = if layout == (2, 2) && rank == 0 { 2 } else { lost };
            let name = format!("rank {named}");
            assert!(error.contains(&name), "{layout:?}: rank {rank} is told {error}");
        }
        assert_eq!(errors.iter().flatten().count(), errors.len() - 1);
    }
}
