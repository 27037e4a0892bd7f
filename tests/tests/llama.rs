//! A model on several ranks: what users ask of it and what goes wrong.

use std::ops::ControlFlow;
use std::sync::Arc;

use ryzanstein_process_group::{DType, ProcessGroup, Rank};
use ryzanstein_tensor_parallel::{
    CacheSize, Error, GenerateOptions, GreedyPass, Llama, NextTokens, Passes, Penalties, Sampling, StopReason,
};
use ryzanstein_tests::batch::greedy;
use ryzanstein_tests::{fixtures::folder, on_loopback};
use tempfile::TempDir;

/// A copy of a fixture that may be damaged.
fn copy(name: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(folder(name).join(file), copy.path().join(file)).unwrap();
    }
    copy
}

#[test]
fn sampling_gives_the_same_tokens_on_every_rank_and_again_with_the_same_seed() {
    let sample = |seed| {
        let sampling = Sampling::Random { temperature: 1.5, top_p: 0.95, top_k: None, seed };
        let options =
            GenerateOptions { max_new_tokens: 30, sampling, ignore_end: true, ..GenerateOptions::default() };
        let penalties = Penalties { repetition: 1.1, presence: 0.5, frequency: 0.5 };
        let options = GenerateOptions { penalties, ..options };
        let all = on_loopback(4, |group| {
            let model = Llama::load(&folder("llama-gqa"), None, group).unwrap();
            model.generate(&[1, 5, 9], &options, group).unwrap()
        });
        assert!(all.iter().all(|g| *g == all[0]), "seed {seed}: {all:?}");
        assert_eq!((all[0].tokens.len(), all[0].stop), (30, StopReason::Length));
        all[0].tokens.clone()
    };
    assert_eq!(sample(3), sample(3));
    assert_ne!(sample(3), sample(4));
}

#[test]
fn generation_stops_after_an_end_token_unless_told_not_to() {
    let folder = copy("llama-mha");
    let greedy = |ignore_end| {
        let options = GenerateOptions { max_new_tokens: 12, ignore_end, ..GenerateOptions::default() };
        let mut seen = Vec::new();
        let mut group = ProcessGroup::loopback(1).remove(0);
        let model = Llama::load(folder.path(), None, &mut group).unwrap();
        let answer = model
            .generate_with(&[1, 2, 3], &options, &mut group, |token| {
                seen.push(token);
                ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!(seen, answer.tokens);
        answer
    };
    let all = greedy(true);
    let end = all.tokens[5];
    let first = all.tokens.iter().position(|t| *t == end).unwrap();
    let settings = format!(r#"{{"eos_token_id":[99999,{end}]}}"#);
    std::fs::write(folder.path().join("generation_config.json"), settings).unwrap();
    let ended = greedy(false);
    assert_eq!(ended.tokens, all.tokens[..=first]);
    assert_eq!(ended.stop, StopReason::End(end));
    assert_eq!(greedy(true), all);
}

#[test]
fn what_a_model_cannot_take_is_refused_on_every_rank_and_the_group_stays_usable() {
    on_loopback(2, |group| {
        let model = Arc::new(Llama::load(&folder("llama-gqa"), None, group).unwrap());
        let refused = |result: Result<(), Error>, expected: &str| {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        };
        let decoder = |capacity| model.decoder(CacheSize::full(1, capacity), Passes::Eager);
        refused(decoder(257).map(|_| ()), "more than the 256 of `max_position_embeddings`");
        let mut alone = decoder(4).unwrap();
        refused(alone.logits(0, &[], group).map(|_| ()), "there are no tokens");
        refused(alone.logits(0, &[1, 100], group).map(|_| ()), "token 100 is not in the vocabulary of 100");
        refused(alone.logits(0, &[1; 5], group).map(|_| ()), "holds 0 of 4");
        alone.logits(0, &[1; 3], group).unwrap();
        refused(alone.logits(0, &[1; 2], group).map(|_| ()), "holds 3 of 4");
        let options = GenerateOptions { max_new_tokens: 255, ..GenerateOptions::default() };
        refused(model.generate(&[1; 3], &options, group).map(|_| ()), "257 positions are more than");
        alone.logits(0, &[1], group).unwrap();
        let mut decoder = model.decoder(CacheSize::full(2, 3), Passes::Graph).unwrap();
        decoder.prefill(0, &[1; 3], group).unwrap();
        refused(decoder.prefill(2, &[1], group).map(|_| ()), "no sequence 2: the KV cache is for 2");
        refused(decoder.decode(&[(1, 1), (0, 1)], group).map(|_| ()), "do not fit sequence 0");
        refused(decoder.decode(&[(1, 1), (1, 1)], group).map(|_| ()), "sequence 1 is given twice");
        refused(decoder.decode(&[], group).map(|_| ()), "no sequence gets a token");
        for token in [100, u32::MAX] {
            let expected = format!("token {token} is not in the vocabulary");
            refused(decoder.decode(&[(1, token)], group).map(|_| ()), &expected);
        }
        refused(decoder.step(&[], group).map(|_| ()), "no sequence gets a token");
        refused(decoder.step(&[(0, &[]), (1, &[1, 1])], group).map(|_| ()), "there are no tokens");
        refused(decoder.step(&[(1, &[1, 1]), (1, &[1])], group).map(|_| ()), "sequence 1 is given twice");
        refused(decoder.step(&[(1, &[1, 1]), (0, &[1])], group).map(|_| ()), "do not fit sequence 0");
        refused(decoder.step(&[(1, &[1, 100])], group).map(|_| ()), "token 100 is not in the vocabulary");
        refused(decoder.fork(0, 2, 1), "no sequence 2: the KV cache is for 2");
        refused(decoder.fork(0, 1, 4), "cannot fork the first 4 positions of sequence 0: it holds 3");
        assert_eq!((decoder.len(0), decoder.len(1)), (3, 0));
        decoder.clear(0);
        assert_eq!((decoder.len(0), decoder.is_empty()), (0, true));
        decoder.decode(&[(1, 1), (0, 1)], group).unwrap();
        assert_eq!((decoder.len(0), decoder.len(1)), (1, 1));
        let size = CacheSize::full(3, 256).with_positions(300);
        let mut decoder = model.decoder(size, Passes::Graph).unwrap();
        decoder.step(&[(0, &[1; 129]), (1, &[1; 128])], group).unwrap();
        refused(
            decoder.decode(&[(1, 1), (0, 1)], group).map(|_| ()),
            "needs 1 free page of 128 positions, and of the 3 of the KV cache 0 are free",
        );
        assert_eq!((decoder.len(0), decoder.len(1), decoder.free_pages()), (129, 128, 0));
        decoder.decode(&[(0, 1)], group).unwrap();
        decoder.truncate(0, 128);
        decoder.decode(&[(1, 1)], group).unwrap();
        assert_eq!((decoder.len(0), decoder.len(1), decoder.free_pages()), (128, 129, 0));
    });
}

#[test]
fn a_rank_that_cannot_load_fails_all_with_its_reason() {
    let damaged = copy("llama-gqa");
    let file = damaged.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 10]).unwrap();
    let errors = on_loopback(4, |group| {
        let rank = group.rank();
        let folder = if rank == Rank(2) { damaged.path().to_owned() } else { folder("llama-gqa") };
        let error = Llama::load(&folder, None, group).unwrap_err();
        group.barrier().unwrap();
        (rank, error)
    });
    for (rank, error) in errors {
        assert!(error.to_string().contains("truncated"), "{error}");
        match error {
            Error::Checkpoint { .. } => assert_eq!(rank, Rank(2)),
            Error::Peer { rank: failed, .. } => assert_eq!(failed, Rank(2)),
            other => panic!("rank {rank}: {other}"),
        }
    }
}

#[test]
fn ranks_with_different_models_refuse_to_go_on() {
    for error in on_loopback(2, |group| {
        let name = if group.rank() == Rank(0) { "llama-gqa" } else { "qwen2" };
        Llama::load(&folder(name), None, group).unwrap_err()
    }) {
        assert!(error.to_string().contains("all must load the same folder"), "{error}");
    }
}

#[test]
fn a_root_that_cannot_load_tells_the_others() {
    let empty = tempfile::tempdir().unwrap();
    for directory in [Some(empty.path()), None] {
        let errors = on_loopback(2, |group| {
            let error = Llama::load_from_root(directory, None, Rank(0), group).unwrap_err();
            group.barrier().unwrap();
            error
        });
        assert!(!matches!(errors[0], Error::Peer { .. }), "{}", errors[0]);
        assert!(matches!(errors[1], Error::Peer { rank: Rank(0), .. }), "{}", errors[1]);
    }
}

#[test]
fn a_root_sends_each_rank_no_more_than_its_own_share() {
    on_loopback(4, |group| {
        let root = Rank(0);
        let directory = (group.rank() == root).then(|| folder("llama-gqa"));
        let model = Llama::load_from_root(directory.as_deref(), None, root, group).unwrap();
        let profile = group.profile();
        let received: f64 =
            profile.rows().iter().filter(|r| r.op == "recv").map(|r| r.bytes_mean * r.calls as f64).sum();
        if group.rank() != root {
            // Query, output and MLP matrices in four parts, keys and values in two, and at most the vocabulary.
            let c = model.config();
            let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
            let layer = (2 * q + 3 * c.intermediate) * c.hidden / 4 + 2 * kv * c.hidden / 2;
            let least = 2 * c.layers * layer;
            let share = received as usize - least;
            assert!(share <= 2 * 64 * c.hidden, "rank {} received {received} bytes", group.rank());
        }
    });
}

/// Returns the tokens after a prompt, each the most likely one by the logits of a pass.
fn by_logits(model: &Arc<Llama>, prompt: &[u32], steps: usize, group: &mut ProcessGroup) -> Vec<u32> {
    let mut decoder = model.decoder(CacheSize::full(1, prompt.len() + steps), Passes::Eager).unwrap();
    let (mut next, mut made) = (prompt.to_vec(), Vec::new());
    for _ in 0..steps {
        let logits = decoder.prefill(0, &next, group).unwrap().values().unwrap().into_owned();
        let greater = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
        next = vec![(0..logits.len()).reduce(greater).unwrap() as u32];
        made.extend_from_slice(&next);
    }
    made
}

#[test]
fn greedy_passes_choose_the_most_likely_tokens_of_sequences_that_come_and_go() {
    for (name, ranks) in [("llama-gqa", 1), ("llama-gqa", 4), ("llama-mha", 8)] {
        let all = on_loopback(ranks, |group| {
            let model = Arc::new(Llama::load(&folder(name), Some(DType::F32), group).unwrap());
            let prompts = [vec![1], vec![5, 9, 3, 7], (0..20).collect(), vec![2, 2]];
            let expected = prompts.each_ref().map(|prompt| by_logits(&model, prompt, 11, group));
            let got = greedy(&model, &prompts, 11, Passes::Graph, group);
            assert_eq!(got, expected, "{name}, {ranks} ranks");
            got
        });
        assert!(all.iter().all(|tokens| *tokens == all[0]));
    }
}

#[test]
fn a_token_that_no_pass_has_chosen_is_refused_and_the_sequences_stay_as_they_were() {
    let mut group = ProcessGroup::loopback(1).remove(0);
    let model = Arc::new(Llama::load(&folder("llama-gqa"), None, &mut group).unwrap());
    let mut decoder = model.decoder(CacheSize::full(2, 20), Passes::Graph).unwrap();
    let refused = |result: Result<GreedyPass, Error>, sequence: usize| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(&format!("chose no token for sequence {sequence}")), "{message}");
    };
    let (known, chosen) = (NextTokens::Known(&[3, 4]), NextTokens::Chosen);
    refused(decoder.start_greedy(&[(0, chosen)], &mut group), 0);
    let pass = decoder.start_greedy(&[(0, known)], &mut group).unwrap();
    refused(decoder.start_greedy(&[(0, chosen), (1, chosen)], &mut group), 1);
    assert_eq!((decoder.len(0), decoder.len(1)), (2, 0));
    let wait = |pass: GreedyPass, group: &mut ProcessGroup| -> Vec<u32> {
        pass.wait(group).unwrap().into_iter().map(Result::unwrap).collect()
    };
    let first = wait(pass, &mut group);
    // What a pass has chosen stays known until the next pass.
    decoder.truncate(0, 2);
    let again = decoder.start_greedy(&[(0, chosen), (1, known)], &mut group).unwrap();
    let again = wait(again, &mut group);
    assert_eq!(again[1], first[0]);
    decoder.truncate(0, 2);
    let told = decoder.start_greedy(&[(0, NextTokens::Known(&first))], &mut group).unwrap();
    assert_eq!(wait(told, &mut group), again[..1]);
    // A pass that returns logits chooses nothing.
    decoder.decode(&[(0, 1)], &mut group).unwrap();
    refused(decoder.start_greedy(&[(0, chosen)], &mut group), 0);
    assert!(!decoder.is_asynchronous());
}

/// Replaces a token's row of the embedding by NaN.
fn damage_embedding(folder: &TempDir, token: usize) {
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let tensor = &header["model.embed_tokens.weight"];
    assert_eq!(tensor["dtype"], "F32");
    let (columns, begin) =
        (tensor["shape"][1].as_u64().unwrap(), tensor["data_offsets"][0].as_u64().unwrap());
    let row = 8 + length + begin as usize + token * columns as usize * 4;
    for value in bytes[row..row + columns as usize * 4].chunks_exact_mut(4) {
        value.copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_sequence_without_finite_logits_fails_alone_in_passes_that_follow_each_other() {
    let folder = copy("llama-mha");
    damage_embedding(&folder, 7);
    for ranks in [1, 2] {
        on_loopback(ranks, |group| {
            let model = Arc::new(Llama::load(folder.path(), None, group).unwrap());
            let expected = by_logits(&model, &[5, 9, 3], 3, group);
            let mut decoder = model.decoder(CacheSize::full(2, 20), Passes::Graph).unwrap();
            let prompts = [(0, NextTokens::Known(&[2, 7][..])), (1, NextTokens::Known(&[5, 9, 3]))];
            let mut pass = decoder.start_greedy(&prompts, group).unwrap();
            for token in expected {
                let chosen = [(0, NextTokens::Chosen), (1, NextTokens::Chosen)];
                let next = decoder.start_greedy(&chosen, group).unwrap();
                let tokens = pass.wait(group).unwrap();
                let message = tokens[0].as_ref().unwrap_err().to_string();
                assert!(message.contains("is not a number"), "{message}");
                assert_eq!(*tokens[1].as_ref().unwrap(), token);
                pass = next;
            }
        });
    }
}
