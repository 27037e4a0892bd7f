//! The small examples run, and say what they should.

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ryzanstein_tests::fixtures;

use crate::common::{LONG, built};

/// Runs a program, and returns its lines in alphabetical order.
fn lines(program: &str, arguments: &[&str]) -> Vec<String> {
    let mut child = Command::new(built(program))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + LONG;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!("{program} does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program}: {}", output.status);
    let mut lines: Vec<String> = String::from_utf8(output.stdout).unwrap().lines().map(Into::into).collect();
    lines.sort();
    lines
}

#[test]
fn ranks_are_threads() {
    let expected: Vec<_> = (0..4).map(|rank| format!("rank {rank} of 4: the sum is 6")).collect();
    assert_eq!(lines("examples/threads", &[]), expected);
}

#[test]
fn ranks_are_processes() {
    let processes = built("examples/processes");
    let lines = lines("ryz", &["launch", "-n", "2", "--", processes.to_str().unwrap()]);
    assert_eq!(lines, ["[rank 0] the sum is 3", "[rank 1] the sum is 3"]);
}

#[test]
fn sub_groups_reduce_each_on_their_own() {
    let expected = [("0", 1), ("1", 1), ("2", 5), ("3", 5)]
        .map(|(rank, sum)| format!("rank {rank}: sum of the replica {sum}, average of the replicas 3"));
    assert_eq!(lines("examples/subgroups", &[]), expected);
}

#[test]
fn an_all_reduce_runs_beside_other_work() {
    let expected = [0, 1].map(|rank| format!("rank {rank}: squares 332833500, sum 2"));
    assert_eq!(lines("examples/overlap", &[]), expected);
}

#[test]
fn an_own_tensor_is_a_buffer() {
    let expected = [0, 1].map(|rank| format!("rank {rank}: 2 x 3 of 2"));
    assert_eq!(lines("examples/own_tensor", &[]), expected);
}

#[test]
fn layers_are_shared_by_ranks() {
    let program = built("examples/sharded_layer");
    let lines = lines("ryz", &["launch", "-n", "2", "--", program.to_str().unwrap(), "2"]);
    let expected =
        ["[rank 0] pass 1: 32", "[rank 0] pass 2: 32", "[rank 1] pass 1: 32", "[rank 1] pass 2: 32"];
    assert_eq!(lines, expected);
}

#[test]
fn a_rank_that_leaves_out_a_call_is_named() {
    let mut launch = Command::new(built("ryz"));
    let output =
        launch.args(["launch", "-n", "2", "--"]).arg(built("examples/sharded_layer")).args(["4", "skip"]);
    let output = output.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let words = ["mismatched calls in group `world`", "all_gather", "all_reduce"];
    assert!(!output.status.success() && words.iter().all(|word| said.contains(word)), "{said}");
}

#[test]
fn a_model_shows_its_text() {
    let folder = fixtures::folder("llama-mha");
    let text = lines("examples/stream_text", &[folder.to_str().unwrap(), "the ring"]).concat();
    assert!(text.contains("the ring") && text.len() > "the ring".len(), "{text}");
}

#[test]
fn tensors_of_another_library_are_summed() {
    let text = lines("examples/bring_your_own_stream", &[]).concat();
    assert!(text.contains("rank 0 on a processor") && text.contains("rank 1 on a processor"), "{text}");
}

#[test]
fn a_ring_is_shown_step_by_step_and_moves_least() {
    let lines = lines("examples/ring_steps", &[]);
    let has = |line: &str| assert!(lines.iter().any(|other| other == line), "no `{line}` in {lines:#?}");
    has("step 1: chunk 0 from 0 to 1, chunk 1 from 1 to 2, chunk 2 from 2 to 3, chunk 3 from 3 to 0");
    // After one step, a sum of two ranks; after three, the first of all; at last all of all.
    has("  rank 0:     1     1     1  1001");
    has("  rank 0:     1  1111  1101  1001");
    has("  rank 0:  1111  1111  1111  1111");
    has("ring                         6         1.5           1.5           1.5");
    has("everyone to everyone         3           3             3             3");
    has("gather, average, send        6           3             3             6");
}

#[test]
fn a_monitored_barrier_names_a_late_and_a_missing_rank() {
    let lines = lines("examples/straggler", &[]);
    for rank in 0..4 {
        let said = |words: &str| {
            let start = format!("rank {rank}: {words}");
            assert!(lines.iter().any(|line| line.starts_with(&start)), "no `{start}` in {lines:#?}");
        };
        said("rank 2 came last");
        said("the sum is 6");
        if rank != 2 {
            said("missing: [Rank(2)]");
        }
    }
}
