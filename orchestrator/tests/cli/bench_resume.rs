//! `ryz bench --resume`: what an interrupted run has measured stays, and is not measured again.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::bench::{refused, well};
use crate::support::{Run, eventually, text};

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_default()
}

fn resumed<'a>(file: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["-n", "2", "--format", "json", "--resume", "--out", file][..], more].concat()
}

/// What each row is of.
fn kinds(rows: &str) -> Vec<String> {
    let kind = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        format!("{} {} {} {}", row["op"], row["bytes"], row["variant"], row["round"])
    };
    rows.lines().map(kind).collect()
}

#[test]
fn a_killed_run_keeps_its_rows_and_the_next_one_measures_the_rest() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rows.jsonl");
    let path = file.to_str().expect("a path");
    // The last row takes minutes: the kill comes before its end.
    let slow = ["bench", "--backend", "tcp", "--sizes", "1KB,4KB,100MB", "--iters", "1000"];
    let run = Run::new(&[&slow[..], &resumed(path, &[])].concat(), &[]);
    eventually(|| (read(&file).lines().count() == 2).then_some(())).expect("two rows");
    run.signal(Signal::KILL);
    eventually(|| run.family().is_empty().then_some(())).expect("no process stays");
    let kept = read(&file);
    assert_eq!(kept.lines().count(), 2, "{kept}");
    // As a machine that lost its power leaves it.
    std::fs::write(&file, format!("{kept}{{\"op\":\"all_re")).expect("written");

    let quick = resumed(path, &["--sizes", "1KB,4KB,8KB", "--op", "all_reduce,barrier", "--iters", "2"]);
    let told = well(&quick);
    assert!(told.contains("2 rows were in "), "{told}");
    let all = read(&file);
    assert!(all.starts_with(&kept), "what was measured stays as it was: {all}");
    let mut sorted = kinds(&all);
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!((all.lines().count(), sorted.len()), (4, 4), "{all}");

    well(&quick);
    assert_eq!(read(&file), all, "nothing is left to measure");
}

#[test]
fn variants_that_were_measured_are_not_measured_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rows.jsonl");
    let path = file.to_str().expect("a path");
    let arguments = resumed(path, &["--sizes", "1KB", "--iters", "2", "--vary", "algorithm"]);
    let table = well(&arguments);
    let all = read(&file);
    // Five variants and, where the system allows it, one that reads other processes' memory.
    assert!(matches!(all.lines().count(), 15 | 18), "{all}");
    // The second round was interrupted.
    let kept: String = all.split_inclusive('\n').take(7).collect();
    std::fs::write(&file, &kept).expect("written");
    well(&arguments);
    let again = read(&file);
    assert!(again.starts_with(&kept), "{again}");
    assert_eq!(kinds(&again), kinds(&all));
    assert!(table.contains("recursive_doubling  ratio"), "{table}");
}

#[test]
fn a_file_that_holds_something_else_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("letter.txt");
    std::fs::write(&file, "Dear reader,\n").expect("written");
    let path = file.to_str().expect("a path");
    let arguments = resumed(path, &["--sizes", "1KB"]);
    refused(&arguments, 2, &["letter.txt: line 1 is no row"]);
    assert_eq!(read(&file), "Dear reader,\n");
    let output = Run::new(&["bench", "-n", "2", "--backend", "tcp", "--resume"], &[]).finish();
    assert!(text(&output.stderr).contains("--out <FILE>"));
}
