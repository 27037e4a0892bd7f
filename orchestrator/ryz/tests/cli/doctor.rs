//! `ryz doctor` on the machine that runs the tests.

use serde_json::Value;

use crate::support::{Run, report, text};

fn named<'a>(json: &'a Value, name: &str) -> &'a Value {
    let findings = json["findings"].as_array().expect("findings");
    findings.iter().find(|f| f["name"] == name).unwrap_or_else(|| panic!("nothing is said of {name}: {json}"))
}

#[test]
fn the_doctor_examines_this_machine_and_its_exit_code_says_what_came_of_it() {
    let output = Run::new(&["doctor", "--format", "json"], &[]).finish();
    let json = report(&output);
    let exit = match json["status"].as_str() {
        Some("ok") => 0,
        Some("warning") => 1,
        Some("broken") => 2,
        other => panic!("{other:?}"),
    };
    assert_eq!(output.status.code(), Some(exit), "{json}");
    // These findings exist wherever tests can run.
    for name in ["system", "processors", "memory", "shared_memory", "open_files", "loopback", "driver"] {
        assert!(named(&json, name)["seen"].as_str().is_some_and(|seen| !seen.is_empty()), "{name}");
    }
    assert_eq!(named(&json, "loopback")["status"], "ok");
    let tried = named(&json, "all_reduce_tcp");
    assert_eq!(tried["status"], "ok", "{tried}");
    assert!(tried["seen"].as_str().is_some_and(|seen| seen.contains("2 ranks on tcp")), "{tried}");
    if json["gpus"].as_array().is_some_and(Vec::is_empty) {
        assert!(named(&json, "gpus")["remedy"].as_str().is_some_and(|remedy| remedy.contains("--gpus all")));
    }
}

#[test]
fn a_job_on_one_host_is_examined_once_and_has_no_links() {
    let output = Run::new(
        &["launch", "-n", "2", "--direct", "--", env!("CARGO_BIN_EXE_ryz"), "doctor", "--format", "json"],
        &[],
    )
    .finish();
    let json = report(&output);
    assert_eq!(json["hosts"].as_array().map(Vec::len), Some(1), "{json}");
    assert_eq!(named(&json["hosts"][0], "loopback")["status"], "ok");
    assert_eq!(json["links"], Value::Array(Vec::new()));
}

#[test]
fn strange_variables_of_nccl_are_warned_of_in_the_table() {
    let output = Run::new(&["doctor"], &[("NCCL_TIMEOUT", "600"), ("NCCL_NVLINK_DISABLE", "0")]).finish();
    let table = text(&output.stdout);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{table}");
    for wanted in
        ["variable NCCL_TIMEOUT", "remedy: set process_group.timeout", "variable NCCL_NVLINK_DISABLE"]
    {
        assert!(table.contains(wanted), "`{wanted}` is not in\n{table}");
    }
}

#[test]
fn a_demand_for_nccl_without_a_gpu_is_broken() {
    let healthy = report(&Run::new(&["doctor", "--format", "json"], &[]).finish());
    if healthy["gpus"].as_array().is_none_or(|gpus| !gpus.is_empty()) {
        // There are GPUs here, and the demand can be met.
        return;
    }
    let environment = [("RYZ_PROCESS_GROUP__BACKEND", "nccl")];
    let output = Run::new(&["doctor", "--format", "json"], &environment).finish();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(named(&report(&output), "gpus")["status"], "broken");
}
