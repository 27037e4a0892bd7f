//! `ryz bench --vary`: variants side by side.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::Value;

use crate::bench::{bench, lines, well};
use crate::support::{Run, eventually, text};

const SMALL: [&str; 6] = ["--world-size", "2", "--sizes", "1KB", "--iters", "2"];

fn varied(what: &str) -> Vec<Value> {
    lines(&[&SMALL[..], &["--vary", what]].concat())
}

fn variants(rows: &[Value]) -> BTreeSet<&str> {
    rows.iter().map(|row| row["variant"].as_str().expect("a variant")).collect()
}

#[test]
fn every_schedule_takes_its_turn_in_every_round() {
    let rows = varied("algorithm");
    let schedules = ["direct", "halving_doubling", "recursive_doubling", "ring"];
    for name in ["auto"].into_iter().chain(schedules) {
        let of_variant: Vec<&Value> = rows.iter().filter(|row| row["variant"] == name).collect();
        let rounds: Vec<_> = of_variant.iter().map(|row| row["round"].as_u64()).collect();
        assert_eq!(rounds, [Some(1), Some(2), Some(3)], "{name}");
        assert!(of_variant.iter().all(|row| row["errors"] == 0), "{name}");
        if name != "auto" {
            assert!(
                of_variant.iter().all(|row| row["path"] == format!("shared_memory/{name}")),
                "{name}: {rows:?}"
            );
        }
    }
    let order: Vec<&str> = rows.iter().take(2).filter_map(|row| row["variant"].as_str()).collect();
    assert_eq!(order, ["auto", "ring"], "in turns");
}

#[test]
fn the_table_has_a_column_and_a_ratio_for_each_variant_and_says_what_was_set() {
    let arguments = [&SMALL[..], &["--vary", "copies"]].concat();
    let table = well(&arguments);
    assert!(table.contains("tcp: RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY=false"), "{table}");
    let head = table.lines().find(|line| line.starts_with("operation")).expect("a head");
    let words: Vec<&str> = head.split_whitespace().collect();
    assert_eq!(words, ["operation", "bytes", "shared_memory", "tcp", "ratio"], "{table}");
    let narrow = well(&[&arguments[..], &["--columns", "45"]].concat());
    assert!(narrow.lines().any(|line| line.contains("1 KB  tcp ")), "{narrow}");
}

#[test]
fn starts_are_measured_from_a_call_to_a_whole_job() {
    let rows = varied("start");
    assert_eq!(variants(&rows), BTreeSet::from(["initialize", "new_group", "reuse"]));
    for row in &rows {
        let shape = (&row["errors"], &row["calls"], &row["bytes"]);
        assert_eq!(shape, (&0.into(), &2.into(), &1000.into()), "{row}");
        assert!(row["path"].as_str().is_some_and(|path| path.starts_with("shared_memory/")), "{row}");
    }
}

#[test]
fn an_operation_without_a_variants_path_has_a_dash() {
    let table = well(&[&SMALL[..], &["--op", "all_gather", "--vary", "algorithm"]].concat());
    let row = table.lines().find(|line| line.starts_with("all_gather")).expect("a row");
    assert!(row.contains("  -  "), "{table}");
}

#[test]
fn what_the_user_has_set_is_not_overridden() {
    let arguments = [&["bench", "--backend", "tcp"][..], &SMALL, &["--vary", "copies"]].concat();
    let set = [("RYZ_PROCESS_GROUP__TCP__SHARED_MEMORY", "true")];
    let output = Run::new(&arguments, &set).finish();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("SHARED_MEMORY") && stderr.contains("the environment"), "{stderr}");

    let arguments = [&["bench", "--backend", "nccl"][..], &SMALL, &["--vary", "algorithm"]].concat();
    let output = Run::new(&arguments, &[("NCCL_ALGO", "Ring")]).finish();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("NCCL_ALGO") && stderr.contains("the environment"), "{stderr}");
}

#[test]
fn a_variant_that_fails_is_named() {
    // The ranks fail: no memory holds this.
    let output = bench(&["--world-size", "2", "--sizes", "1TB", "--vary", "copies"]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--vary copies: shared_memory failed in round 1"), "{stderr}");
}

#[test]
fn ctrl_c_ends_the_whole_comparison() {
    let arguments =
        ["bench", "--backend", "tcp", "-n", "2", "--vary", "copies", "--sizes", "100MB", "--iters", "1000"];
    let run = Run::new(&arguments, &[]);
    // The ranks are at it.
    eventually(|| (run.family().len() >= 4).then_some(())).expect("ranks");
    run.signal(Signal::INT);
    let output = run.finish();
    let stderr = text(&output.stderr);
    assert!(!output.status.success() && stderr.contains("shared_memory failed in round 1"), "{stderr}");
}

#[test]
fn variants_under_a_launcher_are_refused() {
    let arguments = [&["bench", "--backend", "tcp", "--vary", "start"][..], &SMALL].concat();
    let output = Run::new(&arguments, &[("RANK", "0"), ("WORLD_SIZE", "2")]).finish();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("without a launcher"), "{stderr}");
}
