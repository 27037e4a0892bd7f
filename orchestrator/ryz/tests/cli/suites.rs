//! `ryz bench --latency-targets` and `--vary overlap`, and the share of communication that `ryz generate --profile` tells. What they
//! measure is tested with the suite.

use crate::bench::{bench, refused, well};
use crate::support::{Run, text};

#[test]
fn every_documented_target_is_measured_and_judged() {
    let output = bench(&["--world-size", "2", "--latency-targets", "--iters", "1", "--format", "json"]);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    let rows: Vec<serde_json::Value> =
        stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let documented =
        rows.iter().filter(|row| row["target_us"].is_number() && row["meets_target"].is_boolean());
    assert_eq!(documented.count(), 6, "all-reduces and broadcasts of three sizes: {stdout}");
    let steps: Vec<_> = rows.iter().filter(|row| row["step"].is_string()).collect();
    let kinds: Vec<_> = steps.iter().map(|row| (row["step"].as_str(), row["sequences"].as_u64())).collect();
    let decode = |sequences| (Some("decode"), Some(sequences));
    assert_eq!(kinds, [decode(1), decode(8), (Some("prefill"), Some(1))], "{stdout}");
    assert!(steps.iter().all(|row| row["correct"] == true && row["shape"] == "llama-8b"), "{stdout}");
    for wanted in ["best bus bandwidth", "scaling efficiency", "communication, share of a step"] {
        let verdict = stderr.lines().find(|line| line.contains(wanted));
        assert!(verdict.is_some_and(|line| line.ends_with("met") || line.ends_with("missed")), "{stderr}");
    }
}

#[test]
fn overlap_is_told_for_each_size_of_the_buckets() {
    let table = well(&["--world-size", "2", "--vary", "overlap", "--iters", "1"]);
    assert!(table.starts_with("64 MB of f32 gradients in 64 parameters, 2 ranks on tcp"), "{table}");
    for wanted in ["buckets of", "100 MB", "all values are right"] {
        assert!(table.contains(wanted), "`{wanted}` is not in\n{table}");
    }
}

#[test]
fn what_a_suite_does_not_measure_is_refused_before_anything_is_started() {
    let two = |more: &[&'static str]| [&["--world-size", "2"], more].concat();
    refused(
        &["--world-size", "3", "--latency-targets"],
        2,
        &["3 does not divide 32 attention heads", "16, 32"],
    );
    refused(&two(&["--latency-targets", "--sizes", "1KB"]), 2, &["--latency-targets", "--sizes"]);
    refused(
        &two(&["--latency-targets", "--format", "csv"]),
        2,
        &["--latency-targets prints a table or JSON"],
    );
    refused(&["--world-size", "1", "--vary", "overlap"], 2, &["one rank alone", "--world-size 2"]);
    refused(&two(&["--vary", "overlap", "--strict"]), 2, &["--vary", "--strict"]);
    refused(&two(&["--vary", "overlap", "--format", "csv"]), 2, &["--vary overlap prints a table or JSON"]);
    refused(&two(&["--vary", "overlap", "--graph"]), 2, &["does not take --graph"]);
}

#[test]
fn a_profile_of_several_ranks_ends_with_the_share_that_communicates() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/llama-mha");
    let generate = |ranks| {
        let asked = ["--token-ids", "1,15,27", "--max-new-tokens", "4", "--ignore-end", "--profile"];
        let command = ["generate", "--backend", "tcp", "-n", ranks, "--model", model];
        let output = Run::new(&[&command[..], &asked].concat(), &[]).finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let told = generate("2");
    assert!(told.contains("calls/step") && told.contains("% of a step (target < 20 %): "), "{told}");
    assert!(!generate("1").contains("calls/step"));
}
