//! `ryz bench` as a user meets it: every operation with right values, and each format.

use std::process::Output;

use crate::support::{Run, text};
use ryzanstein_process_group::schedule::Algorithm;
use ryzanstein_process_group::{Operation, ReduceOp};
use serde_json::Value;

/// On processors, whatever GPUs this machine has.
pub(crate) fn bench(arguments: &[&str]) -> Output {
    Run::new(&[&["bench", "--backend", "tcp"], arguments].concat(), &[]).finish()
}

pub(crate) fn well(arguments: &[&str]) -> String {
    let output = bench(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn lines(arguments: &[&str]) -> Vec<Value> {
    let stdout = well(&[arguments, &["--format", "json"]].concat());
    stdout.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

pub(crate) fn refused(arguments: &[&str], code: i32, words: &[&str]) {
    let output = bench(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{arguments:?}: {stderr}");
}

const FIELDS: [&str; 21] = [
    "algbw_gbs",
    "backend",
    "busbw_gbs",
    "bytes",
    "calls",
    "dtype",
    "errors",
    "expected_error_percent",
    "expected_us",
    "graph",
    "link_share",
    "median_us",
    "meets_target",
    "op",
    "p25_us",
    "p75_us",
    "p99_us",
    "path",
    "reason",
    "target_us",
    "world_size",
];

#[test]
fn each_row_says_why_its_path_was_taken() {
    let asked = ["--world-size", "2", "--op", "all_reduce,gather", "--sizes", "1KB", "--iters", "2"];
    for row in lines(&asked) {
        assert!(row["reason"].as_str().is_some_and(|why| !why.is_empty()), "{row}");
    }
    let forced = lines(&[&asked[..], &["--path", "ring"]].concat());
    assert_eq!(forced[0]["reason"], "it is forced", "{}", forced[0]);
}

#[test]
fn every_operation_is_measured_and_right_among_three_ranks() {
    let rows = lines(&["--world-size", "3", "--op", "all", "--sizes", "1,10KB", "--iters", "4"]);
    // Two sizes of nine operations, and a barrier, which has none.
    assert_eq!(rows.len(), 19);
    for row in &rows {
        let mut fields: Vec<&str> = row.as_object().expect("an object").keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, FIELDS);
        assert_eq!(
            (&row["errors"], &row["world_size"], &row["backend"]),
            (&0.into(), &3.into(), &"tcp".into()),
            "{row}"
        );
        assert!(
            row["median_us"].as_f64() > Some(0.0) && row["p99_us"].as_f64() >= row["median_us"].as_f64(),
            "{row}"
        );
        assert!(row["path"].as_str().is_some_and(|path| path.starts_with("shared_memory/")), "{row}");
    }
    let of = |op: &str| rows.iter().filter(|row| row["op"] == op).collect::<Vec<_>>();
    // One byte is made one element, of a chunk for each rank where there are chunks.
    assert_eq!(
        of("all_reduce").iter().map(|r| r["bytes"].as_u64()).collect::<Vec<_>>(),
        [Some(4), Some(10_000)]
    );
    assert_eq!(
        of("all_gather").iter().map(|r| r["bytes"].as_u64()).collect::<Vec<_>>(),
        [Some(12), Some(9996)]
    );
    assert!(of("all_reduce")[0]["target_us"].is_null(), "targets are for GPUs");
    assert_eq!(of("barrier")[0]["busbw_gbs"].as_f64(), Some(0.0));
    let row = of("reduce_scatter")[1];
    let (algbw, busbw) =
        (row["algbw_gbs"].as_f64().expect("algbw"), row["busbw_gbs"].as_f64().expect("busbw"));
    assert!((busbw - algbw * 2.0 / 3.0).abs() < 1e-9, "{row}");
}

#[test]
fn every_type_and_reduction_is_right() {
    for (dtype, reduction) in [
        ("f64", "avg"),
        ("f16", "sum"),
        ("bf16", "sum"),
        ("i8", "min"),
        ("u8", "product"),
        ("i32", "max"),
        ("u32", "avg"),
        ("i64", "sum"),
        ("u64", "product"),
    ] {
        let rows = lines(&[
            "--world-size",
            "2",
            "--op",
            "all_reduce,reduce",
            "--sizes",
            "5000",
            "--iters",
            "3",
            "--warmup",
            "0",
            "--dtype",
            dtype,
            "--reduction",
            reduction,
        ]);
        assert_eq!(rows.len(), 2);
        let op = if reduction == "sum" { "all_reduce".into() } else { format!("all_reduce({reduction})") };
        assert_eq!((&rows[0]["op"], &rows[0]["dtype"]), (&op.into(), &dtype.into()));
        assert!(rows.iter().all(|row| row["errors"] == 0), "{rows:?}");
    }
}

#[test]
fn paths_are_compared_and_those_that_an_operation_has_not_are_left_out() {
    let arguments =
        ["--world-size", "2", "--op", "all_reduce,all_gather", "--sizes", "8KiB", "--iters", "3", "--path"];
    let paths = |path: &str| {
        let rows = lines(&[&arguments[..], &[path]].concat());
        rows.iter().map(|r| format!("{} {}", r["op"], r["path"]).replace('"', "")).collect::<Vec<_>>()
    };
    assert_eq!(paths("ring"), ["all_reduce shared_memory/ring", "all_gather shared_memory/ring"]);
    let forms = lines(&["-n", "2", "--op", "all_reduce,all_reduce_into", "--sizes", "8KiB", "--iters", "3"]);
    let names: Vec<_> = forms.iter().map(|row| (row["op"].as_str(), row["errors"].as_u64())).collect();
    assert_eq!(names, [(Some("all_reduce"), Some(0)), (Some("all_reduce_into"), Some(0))]);
    let all = paths("all");
    let of = |name: &str, operation: Operation| -> Vec<String> {
        let one_level = Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Hierarchical);
        let suiting = one_level.filter(|algorithm| algorithm.suits(operation));
        suiting.map(|algorithm| format!("{name} shared_memory/{}", algorithm.name())).collect()
    };
    // Before the paths of each operation is the choice of `auto`.
    let reductions = of("all_reduce", Operation::AllReduce(ReduceOp::Sum));
    assert_eq!(all[1..=reductions.len()], reductions);
    assert_eq!(all[reductions.len() + 2..], of("all_gather", Operation::AllGather));
    refused(&[&arguments[..], &["tree"]].concat(), 2, &["--path tree", "shared_memory/recursive_doubling"]);
}

#[test]
fn ranks_agree_on_the_path_of_a_call_that_one_of_them_does_not_make() {
    // The last of three has nobody to exchange messages with.
    let arguments = ["--world-size", "3", "--op", "send_recv", "--sizes", "1MB", "--iters", "3", "--path"];
    let rows = lines(&[&arguments[..], &["direct"]].concat());
    assert_eq!((rows.len(), &rows[0]["path"]), (1, &"shared_memory/direct".into()));
    // No way of a message, though one of the barriers between.
    let none = "nothing was measured";
    refused(&[&arguments[..], &["recursive_doubling"]].concat(), 2, &[none, "--path recursive_doubling"]);
    let both = lines(&[&arguments[..], &["direct,recursive_doubling"]].concat());
    assert_eq!(both.len(), 1, "{both:?}");
}

#[test]
fn each_format_says_the_same() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments =
        ["--world-size", "2", "--min-bytes", "1KB", "--max-bytes", "100KB", "--factor", "10", "--iters", "3"];
    let csv = well(&[&arguments[..], &["--format", "csv"]].concat());
    assert_eq!(
        csv.lines().next(),
        Some(
            "op,dtype,bytes,world_size,backend,path,median_us,p99_us,algbw_gbs,busbw_gbs,errors,target_us,meets_target,\
             link_share,expected_us,expected_error_percent,p25_us,p75_us,calls,graph,host_us"
        )
    );
    let sizes: Vec<_> = csv.lines().skip(1).map(|line| line.split(',').nth(2).unwrap_or_default()).collect();
    assert_eq!(sizes, ["1000", "10000", "100000"]);

    let file = folder.path().join("bench.html");
    let file = file.to_str().expect("a path");
    let table = well(&[&arguments[..], &["--format", "html", "--out", file]].concat());
    assert!(table.contains("all values are right") && table.contains("10 KB"), "{table}");
    let page = std::fs::read_to_string(file).expect("the page");
    assert!(page.starts_with("<!doctype html>") && page.matches("<polyline").count() == 4, "{page}");

    let missing = folder.path().join("not there").join("bench.html");
    let missing = missing.to_str().expect("a path");
    refused(&[&arguments[..], &["--out", missing]].concat(), 1, &["--out", "not there"]);
}

#[test]
fn formats_for_programs_leave_the_verdicts_on_standard_error() {
    let arguments = ["--world-size", "2", "--sizes", "10MB", "--iters", "3", "--strict", "--format"];
    for format in ["json", "csv"] {
        let output = bench(&[&arguments[..], &[format]].concat());
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{format}: {stderr}");
        for wanted in ["best bus bandwidth", "share of the", "scaling efficiency", "not measured", "missed"] {
            assert!(stderr.contains(wanted), "{format}: `{wanted}` is not in\n{stderr}");
        }
        assert!(!stdout.contains("bandwidth"), "{format}: {stdout}");
    }
    // The page has them.
    let output = bench(&[&arguments[..], &["html"]].concat());
    assert!(text(&output.stdout).contains("scaling efficiency") && !text(&output.stderr).contains("scaling"));
}

#[test]
fn a_missed_target_fails_with_strict_only() {
    // Nothing over loopback TCP reaches 90 GB/s.
    let arguments = ["--world-size", "2", "--sizes", "10MB", "--iters", "3"];
    assert!(!well(&arguments).contains("target"), "targets are for GPUs");
    let strict = [&arguments[..], &["--strict"]].concat();
    refused(&strict, 1, &["--strict: missed: ", "all_reduce, best bus bandwidth"]);
    let output = bench(&[&strict[..], &["--format", "json"]].concat());
    let row: Value = serde_json::from_str(text(&output.stdout).lines().next().expect("a row")).expect("JSON");
    assert_eq!(row["target_us"].as_f64(), Some(1000.0), "{row}");
    let is_below = row["median_us"].as_f64().is_some_and(|median| median < 1000.0);
    assert_eq!(row["meets_target"].as_bool(), Some(is_below), "{row}");
    let unjudged = ["--world-size", "2", "--op", "gather", "--sizes", "1KB", "--iters", "3", "--strict"];
    refused(&unjudged, 1, &["--strict: not measured: all_reduce 100 KB", "--latency-targets measures all"]);
}

#[test]
fn an_address_alone_makes_no_rank_and_a_rank_alone_is_refused() {
    let arguments = ["bench", "--backend", "tcp", "--world-size", "2", "--sizes", "1KB", "--iters", "3"];
    // As it is exported for a launcher that is called later.
    let output = Run::new(&arguments, &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("2 ranks"), "{}", text(&output.stdout));

    // As a rank of another launcher has it whose script forgot the address.
    let output = Run::new(&arguments, &[("RANK", "1"), ("WORLD_SIZE", "2")]).finish();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("RANK is set, so this is one of 2 ranks, but MASTER_ADDR")
            && stderr.contains("unset RANK"),
        "{stderr}"
    );
}

#[test]
fn a_run_that_fails_leaves_an_earlier_result_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("result.json");
    let path = file.to_str().expect("a path");
    let arguments = ["bench", "-n", "2", "--backend", "tcp", "--sizes", "1KB", "--iters", "3", "--out", path];
    let output = Run::new(&[&arguments[..], &["--format", "json"]].concat(), &[]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let earlier = std::fs::read_to_string(&file).expect("a result");
    assert!(earlier.starts_with("{\"op\":\"all_reduce\""), "{earlier}");
    let output = Run::new(&[&arguments[..], &["--path", "nowhere"]].concat(), &[]).finish();
    assert!(!output.status.success());
    assert_eq!(std::fs::read_to_string(&file).expect("a result"), earlier);
    let left = std::fs::read_dir(folder.path()).expect("the folder").count();
    assert_eq!(left, 1, "nothing unfinished stays");
}

#[test]
fn each_row_is_compared_with_what_the_cost_model_expects() {
    let rows = lines(&["-n", "2", "--op", "all", "--sizes", "10KB", "--iters", "3"]);
    for row in &rows {
        let (expected, error) = (
            row["expected_us"].as_f64().expect("a model"),
            row["expected_error_percent"].as_f64().expect("an error"),
        );
        let median = row["median_us"].as_f64().expect("a median");
        assert!(expected > 0.0 && (median - expected * (1.0 + error / 100.0)).abs() < 1e-6 * median, "{row}");
        assert_eq!(row["link_share"].is_null(), row["op"] == "barrier", "{row}");
    }
    // One rank sends nothing, so there is nothing to expect.
    let alone = lines(&["-n", "1", "--sizes", "10KB", "--iters", "3"]);
    assert!(alone[0]["expected_us"].is_null() && alone[0]["link_share"].is_null(), "{}", alone[0]);
    let wide = well(&["-n", "2", "--sizes", "10KB", "--iters", "3"]);
    assert!(wide.contains("probed: one link carries") && wide.contains("expected   error"), "{wide}");
    let narrow = well(&["-n", "2", "--sizes", "10KB", "--iters", "3", "--columns", "80"]);
    assert!(!narrow.contains("expected   error"), "{narrow}");
}
