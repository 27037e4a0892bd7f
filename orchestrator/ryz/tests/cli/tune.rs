//! `ryz tune` as a user meets it: a table that jobs use, and wrong uses.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::support::{Run, text};

/// On processors, whatever GPUs this machine has, with this folder of states.
fn ryz(state: &Path, arguments: &[&str], more: &[(&str, &str)]) -> Output {
    let state = state.to_str().expect("a path");
    let own = [("XDG_STATE_HOME", state), ("NCCL_CONF_FILE", "/nowhere"), ("RYZ_LOG__LEVEL", "info")];
    Run::new(arguments, &[&own[..], more].concat()).finish()
}

fn well(output: &Output) -> (String, String) {
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    (stdout, stderr)
}

fn refused(output: &Output, words: &[&str]) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
}

const TUNE: [&str; 8] =
    ["tune", "-n", "2", "--backend", "tcp", "--op", "all_reduce,all_gather", "--sizes=1KB,64KB"];

#[test]
fn tuning_measures_every_path_and_writes_only_what_it_is_told_to() {
    let state = tempfile::tempdir().expect("a folder");
    let file = state.path().join("ryzanstein/paths.json");
    let (stdout, stderr) = well(&ryz(state.path(), &TUNE, &[]));
    assert!(
        stdout.contains("Every path on its own") && stderr.contains("all_gather: 2 sizes measured"),
        "{stdout}"
    );
    let mut table = stdout.lines().filter(|line| line.starts_with("operation ") || line.starts_with("all_"));
    assert!(table.all(|line| line.len() <= 80), "{stdout}");
    assert!(stdout.contains(&format!("nothing was written; --apply writes {}", file.display())), "{stdout}");
    assert!(!file.exists());

    let (stdout, _) = well(&ryz(state.path(), &[&TUNE[..], &["--apply", "--format", "json"]].concat(), &[]));
    let report: Value = serde_json::from_str(&stdout).expect("one object");
    let measured = report["measured"].as_array().expect("an array");
    let paths = |row: &Value| row["paths"].as_array().expect("an array").len();
    // Where the system forbids reading another process's memory, one less.
    assert!(measured.len() == 4 && paths(&measured[0]) >= 4 && paths(&measured[3]) >= 2, "{report}");
    assert_eq!(report["written"].as_str(), file.to_str(), "{report}");
    let table: Value =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("the table")).expect("JSON");
    assert_eq!(table["ranges"], report["ranges"]);
    let taken = report["turns"].as_array().expect("an array").iter().filter(|turn| turn["taken"] == true);
    for turn in taken {
        assert!(turn["gain"].as_f64() > Some(1.1), "{turn}");
    }
}

/// A table of this machine that sends all-reduces between two ranks from 1 KB to 10 KB round the ring, which nothing built in does.
fn ring_table(folder: &Path) -> String {
    let file = folder.join("table.json");
    let name = file.to_str().expect("a path").to_owned();
    // The machine as the program names it.
    well(&ryz(
        folder,
        &["tune", "-n", "2", "--backend", "tcp", "--op", "scatter", "--sizes", "1KB", "--out", &name],
        &[],
    ));
    let mut table: Value =
        serde_json::from_str(&std::fs::read_to_string(&file).expect("written")).expect("JSON");
    table["ranges"] = serde_json::json!([{
        "world_size": 2, "operation": "all_reduce", "from_bytes": 1000, "to_bytes": 10_000, "path": "shared_memory/ring",
        "date": "2026-11-22", "bytes": 1000, "us": 61.2, "against": "shared_memory/direct", "against_us": 95.0
    }]);
    std::fs::write(&file, table.to_string()).expect("written");
    name
}

fn paths_of(output: &Output) -> Vec<(u64, String, String)> {
    let (stdout, _) = well(output);
    let rows = stdout.lines().map(|line| serde_json::from_str::<Value>(line).expect("a row"));
    let word = |row: &Value, key: &str| row[key].as_str().expect("text").to_owned();
    rows.map(|row| (row["bytes"].as_u64().expect("bytes"), word(&row, "path"), word(&row, "reason")))
        .collect()
}

#[test]
fn jobs_take_the_measured_paths_and_say_so() {
    let state = tempfile::tempdir().expect("a folder");
    let name = ring_table(state.path());
    let measured =
        "measured by ryz tune on 2026-11-22: 61.2 us against 95 us of shared_memory/direct, at 1 KB";
    let bench = |ranks: &str, more: &[(&str, &str)]| {
        let arguments =
            ["bench", "-n", ranks, "--backend", "tcp", "--sizes", "1KB,10KB,12KB", "--iters", "2"];
        ryz(state.path(), &[&arguments[..], &["--format", "json"]].concat(), more)
    };
    let setting = ("RYZ_PROCESS_GROUP__TUNING", &*name);
    let rows = paths_of(&bench("2", &[setting]));
    for (bytes, path, reason) in &rows {
        let is_inside = *bytes <= 10_000;
        assert_eq!((path == "shared_memory/ring", reason == measured), (is_inside, is_inside), "{rows:?}");
    }
    assert!(paths_of(&bench("2", &[])).iter().all(|(.., reason)| !reason.contains("ryz tune")));
    // Of three ranks, the table has nothing, and says so.
    let three = bench("3", &[setting]);
    assert!(text(&three.stderr).contains("has nothing for 3 ranks (only for: 2)"), "{}", text(&three.stderr));
    assert!(paths_of(&three).iter().all(|(.., reason)| !reason.contains("ryz tune")));

    // Where `ryz tune --apply` writes it, it is found without a setting, and can be turned off.
    let file = state.path().join("ryzanstein/paths.json");
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("made");
    std::fs::copy(&name, &file).expect("copied");
    assert_eq!(paths_of(&bench("2", &[]))[0].2, measured);
    assert!(!paths_of(&bench("2", &[("RYZ_PROCESS_GROUP__TUNING", "off")]))[0].2.contains("ryz tune"));
    let check = well(&ryz(state.path(), &["check", "-n", "2"], &[("RYZ_PROCESS_GROUP__BACKEND", "tcp")])).0;
    assert!(check.contains(measured), "{check}");

    // A range may begin at 0 bytes.
    let table = std::fs::read_to_string(&file).expect("the table");
    std::fs::write(&file, table.replace("\"from_bytes\":1000", "\"from_bytes\":0")).expect("written");
    assert_eq!(paths_of(&bench("2", &[]))[0].2, measured);

    // A table there that does not fit is left alone, with a warning.
    std::fs::write(&file, table.replace("\"cpus\":", "\"cpus\":9")).expect("written");
    let foreign = bench("2", &[]);
    assert!(
        text(&foreign.stderr).contains("is not used, and the built-in table of paths decides"),
        "{}",
        text(&foreign.stderr)
    );
    assert!(paths_of(&foreign).iter().all(|(.., reason)| !reason.contains("ryz tune")));
}

#[test]
fn a_named_table_that_cannot_be_used_ends_the_job_with_the_reason() {
    let state = tempfile::tempdir().expect("a folder");
    let file = state.path().join("broken.json");
    let name = file.to_str().expect("a path").to_owned();
    let bench = || {
        let arguments = ["bench", "-n", "2", "--backend", "tcp", "--sizes", "1KB", "--iters", "2"];
        ryz(state.path(), &arguments, &[("RYZ_PROCESS_GROUP__TUNING", &name)])
    };
    refused(&bench(), &["process_group.tuning", "broken.json"]);
    std::fs::write(&file, "{\"format\": 1").expect("written");
    refused(&bench(), &["no table of `ryz tune`", "write it again"]);
    std::fs::write(&file, "{\"format\": 1, \"version\": \"0.0.0\"}").expect("written");
    refused(&bench(), &["measured with version 0.0.0", "measure again"]);
}

#[test]
fn wrong_uses_are_refused_before_anything_starts() {
    let state = tempfile::tempdir().expect("a folder");
    let tune = |arguments: &[&str]| ryz(state.path(), &[&["tune"], arguments].concat(), &[]);
    refused(&tune(&[]), &["--world-size N"]);
    refused(&tune(&["-n", "1"]), &["2 or more"]);
    refused(&tune(&["-n", "2", "--op", "barrier"]), &["barrier has one path only", "all_reduce"]);
    refused(&tune(&["-n", "2", "--op", "reduceall"]), &["reduceall"]);
    refused(&tune(&["-n", "2", "--sizes", "0"]), &["at least one byte"]);
    refused(&tune(&["-n", "2", "--sizes", "2000GB"]), &["a size of 2000 GB", "smaller sizes"]);
    refused(&tune(&["-n", "2", "--out", "."]), &["it is a folder"]);
    refused(&tune(&["--nccl", "--preset", "dgx"]), &["invalid value 'dgx' for '--preset"]);
    refused(&tune(&["--nccl", "--apply"]), &["cannot be used with"]);
    refused(&tune(&["--nccl", "--preset", "pcie-only", "--bytes", "0"]), &["--bytes 0", "above 0"]);
    refused(&tune(&["--nccl", "--preset", "pcie-only", "--model", ".", "--batch", "0"]), &["--batch"]);
}

#[test]
fn a_table_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "no folder").expect("written");
    let below = file.join("below");
    let out = below.join("paths.json");
    for (state, flags) in [(&below, &["--apply"][..]), (&file, &["--out", out.to_str().expect("a path")][..])]
    {
        let output = ryz(state, &[&TUNE[..], flags].concat(), &[]);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.starts_with("error: cannot write ") && stderr.contains("Not a directory"), "{stderr}");
    }
}

#[test]
fn proposals_for_nccl_show_the_variables_that_they_change() {
    let state = tempfile::tempdir().expect("a folder");
    let asked = ["tune", "--nccl", "--preset", "dgx-h100", "--nnodes", "2", "--bytes", "16KiB"];
    let (stdout, _) = well(&ryz(state.path(), &asked, &[("NCCL_CROSS_NIC", "1")]));
    for wanted in [
        "nccl.profile = \"inference\"\n  messages of ",
        "  + NCCL_MAX_CTAS=16",
        "  + NCCL_ALGO=Ring;allreduce:Tree",
        "write it into the configuration file",
    ] {
        assert!(stdout.contains(wanted), "{stdout}");
    }
    assert!(stdout.contains("nccl.env.NCCL_CROSS_NIC = 0 has no effect"), "{stdout}");
    // The configuration file takes the lines.
    let lines: Vec<&str> =
        stdout.lines().filter(|line| line.starts_with("nccl.") && line.ends_with('"')).collect();
    let file = state.path().join("proposed.toml");
    std::fs::write(&file, lines.join("\n")).expect("written");
    let shown =
        well(&ryz(state.path(), &["config", "show", "--config", file.to_str().expect("a path")], &[])).0;
    assert!(
        lines.len() == 2 && shown.contains("inference") && shown.contains("Ring;allreduce:Tree"),
        "{shown}"
    );
    let (stdout, _) = well(&ryz(state.path(), &[&asked[..], &["--format", "json"]].concat(), &[]));
    let report: Value = serde_json::from_str(&stdout).expect("one object");
    let keys: Vec<&str> = report["proposals"]
        .as_array()
        .expect("an array")
        .iter()
        .filter_map(|one| one["key"].as_str())
        .collect();
    assert_eq!(keys, ["nccl.profile", "nccl.env.NCCL_ALGO", "nccl.env.NCCL_CROSS_NIC"]);
    // On one node with NVLink, NCCL does not carry it.
    let (stdout, _) =
        well(&ryz(state.path(), &["tune", "--nccl", "--preset", "dgx-h100", "--bytes", "16KiB"], &[]));
    assert!(
        stdout.contains("process_group.peer_memory = false") && stdout.contains("nothing to propose"),
        "{stdout}"
    );
    // The size comes from a model, too.
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/llama-mha");
    let model = model.to_str().expect("a path");
    let (stdout, _) =
        well(&ryz(state.path(), &["tune", "--nccl", "--preset", "hybrid", "--model", model], &[]));
    assert!(
        stdout.starts_with("For all-reduces of ") && stdout.contains("nccl.profile = \"inference\""),
        "{stdout}"
    );
}
