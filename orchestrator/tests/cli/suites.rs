//! `ryz bench --latency-targets` and `--overlap`, and the share of communication that `ryz generate --profile` tells.

use crate::bench::{bench, lines, refused, well};
use crate::support::{Run, text};

const TINY: [&str; 11] = [
    "--world-size",
    "2",
    "--latency-targets",
    "--shape",
    "64/128/4/2",
    "--layers",
    "2",
    "--batch",
    "1,3",
    "--iters",
    "2",
];

#[test]
fn sharded_steps_equal_unsharded_ones_and_their_efficiency_and_communication_are_told() {
    let output = bench(&[&TINY[..], &["--format", "json"]].concat());
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    let rows: Vec<serde_json::Value> =
        stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let documented = rows.iter().filter(|row| row["target_us"].is_number()).count();
    assert_eq!(documented, 6, "all-reduces and broadcasts of three sizes: {stdout}");
    let steps: Vec<_> = rows.iter().filter(|row| row["step"].is_string()).collect();
    let kinds: Vec<_> = steps.iter().map(|row| (row["step"].as_str(), row["sequences"].as_u64())).collect();
    assert_eq!(
        kinds,
        [(Some("decode"), Some(1)), (Some("decode"), Some(3)), (Some("prefill"), Some(1))],
        "{stdout}"
    );
    for row in steps {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        assert!(row["correct"] == true && number("difference") > 0.0, "sums over shards are rounded: {row}");
        let efficiency = number("one_us") / number("median_us") / 2.0;
        assert!((number("efficiency") - efficiency).abs() < 1e-9, "{row}");
        let parts = row["communication"].as_array().expect("an array");
        let calls =
            |op: &str| parts.iter().find(|part| part["op"] == op).and_then(|part| part["calls"].as_f64());
        assert_eq!((calls("all_reduce"), calls("all_gather")), (Some(5.0), Some(1.0)), "{row}");
        let shares: f64 = parts.iter().filter_map(|part| part["share"].as_f64()).sum();
        assert!(
            (number("communication_share") - shares).abs() < 1e-9 && shares > 0.0 && shares < 1.0,
            "{row}"
        );
    }
    let verdicts: Vec<_> = stderr
        .lines()
        .filter(|line| line.contains("efficiency") || line.contains("communication,"))
        .collect();
    assert!(verdicts.len() == 2 && verdicts.iter().all(|line| line.contains(" %  m")), "{stderr}");
}

#[test]
fn the_table_of_steps_says_what_was_compared() {
    let table = well(&TINY);
    for wanted in [
        "of 50 % means that sharding costs nothing",
        "prefill  64/128/4/2",
        "communication of",
        "limit 0.05: ok",
    ] {
        assert!(table.contains(wanted), "`{wanted}` is not in\n{table}");
    }
    assert!(table.ends_with("all values are right\n"), "{table}");
}

#[test]
fn overlap_is_measured_by_size_of_the_buckets_and_its_gradients_are_right() {
    let small = ["--world-size", "2", "--overlap", "--gradients", "6MB", "--parameters", "6", "--iters", "2"];
    let rows = lines(&small);
    let (overlap, compressed): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["measured"] == "overlap");
    let buckets: Vec<_> =
        overlap.iter().map(|row| (row["bucket_bytes"].as_u64(), row["all_reduces"].as_u64())).collect();
    let all = [
        (None, Some(6)),
        (Some(1_000_000), Some(6)),
        (Some(5_000_000), Some(2)),
        (Some(25_000_000), Some(2)),
        (Some(100_000_000), Some(2)),
    ];
    assert_eq!(buckets, all);
    for row in overlap {
        let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        assert!(row["errors"] == 0 && row["bytes"] == 6_000_000, "{row}");
        let is_hidden = row["bucket_bytes"].is_null() || (0.0..=1.0).contains(&number("hidden"));
        assert!(number("step_us") > 0.0 && is_hidden, "{row}");
    }
    assert_eq!(compressed.len(), 3);
    let table = well(&[&small[..], &["--compute", "idle"]].concat());
    assert!(table.contains("idle: the host waits") && table.contains("all values are right"), "{table}");
}

#[test]
fn what_a_suite_does_not_measure_is_refused_before_anything_is_started() {
    refused(
        &["--world-size", "3", "--latency-targets"],
        2,
        &["3 does not divide 32 attention heads", "16, 32"],
    );
    refused(
        &["--world-size", "2", "--latency-targets", "--shape", "64/3"],
        2,
        &["`64/3` is no shape", "llama-8b"],
    );
    refused(
        &["--world-size", "2", "--latency-targets", "--sizes", "1KB"],
        2,
        &["--latency-targets", "--sizes"],
    );
    refused(&["--world-size", "1", "--overlap"], 2, &["one rank alone", "--world-size 2"]);
    refused(&["--world-size", "2", "--overlap", "--strict"], 2, &["--overlap", "--strict"]);
    refused(&["--world-size", "2", "--overlap", "--format", "csv"], 2, &["--overlap prints a table or JSON"]);
    refused(&["--world-size", "2", "--layers", "3"], 2, &["--latency-targets"]);
}

#[test]
fn a_profile_of_several_ranks_ends_with_the_share_that_communicates() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama-mha");
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
