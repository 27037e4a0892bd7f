//! A failure that no restart can mend ends with code 2, without a restart.

use ryzanstein_tests::fixtures::folder;

use crate::support::{Run, report, text};

const RYZ: &str = env!("CARGO_BIN_EXE_ryz");

/// Launches a script on two ranks with restarts to spare, and gives the cause in the closing report, once the exit code
/// is 2 and there was one epoch only.
fn hopeless(flags: &[&str], script: &str, environment: &[(&str, &str)]) -> serde_json::Value {
    let always = ["launch", "-n", "2", "--max-restarts", "3", "--format", "json"];
    let output = Run::new(&[&always, flags, &["--", "sh", "-c", script]].concat(), environment).finish();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["epoch"], 1, "{report}");
    report["first_failure"].clone()
}

fn cause(failure: &serde_json::Value) -> &str {
    failure["cause"].as_str().expect("a cause")
}

#[test]
fn ranks_that_want_different_backends() {
    let script =
        format!("[ $RANK = 0 ] && RYZ_PROCESS_GROUP__BACKEND=tcp exec {RYZ} check; exec {RYZ} check");
    let failure = hopeless(&[], &script, &[]);
    assert!(cause(&failure).contains("rank 0 wants `tcp`, rank 1 wants `auto`"), "{failure}");
}

#[test]
fn nccl_without_a_gpu() {
    let failure =
        hopeless(&["--backend", "nccl"], &format!("exec {RYZ} check"), &[("CUDA_VISIBLE_DEVICES", "")]);
    assert!(cause(&failure).contains("not `nccl`: no rank can use it"), "{failure}");
}

#[test]
fn a_world_size_that_is_not_the_jobs() {
    let script = format!("[ $RANK = 1 ] && WORLD_SIZE=3 exec {RYZ} check; exec {RYZ} check");
    let failure = hopeless(&["--timeout", "20"], &script, &[]);
    assert!(cause(&failure).contains("was told that there are 3 ranks, but this job has 2"), "{failure}");
}

#[test]
fn a_filter_that_is_none() {
    for arguments in [&["launch", "-n", "2", "--max-restarts", "3"][..], &["check"]] {
        let output =
            Run::new(arguments, &[("RYZ_LOG__LEVEL", "info,ryzanstein_process_group=loud")]).finish();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.starts_with("error: log.level: expected a level (off, error, warn"), "{stderr}");
        assert!(stderr.contains("not `info,ryzanstein_process_group=loud`"), "{stderr}");
    }
}

#[test]
fn a_model_that_is_not_there() {
    let script = format!("exec {RYZ} generate --model /no/such/model --token-ids 1");
    let failure = hopeless(&[], &script, &[]);
    assert!(cause(&failure).contains("/no/such/model"), "{failure}");
}

#[test]
fn a_model_that_one_rank_alone_lacks() {
    let model = folder("llama-mha");
    let script = format!(
        "[ $RANK = 1 ] && M=/no/such/model || M={}; exec {RYZ} generate --model $M --token-ids 1",
        model.display()
    );
    let failure = hopeless(&[], &script, &[]);
    assert_eq!(failure["rank"], 1, "the others only echo it: {failure}");
    assert!(cause(&failure).contains("/no/such/model"), "{failure}");
}

#[test]
fn a_model_of_a_kind_that_is_not_supported() {
    let model = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(folder("llama-mha").join("config.json")).expect("settings");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["model_type"] = "bert".into();
    config["architectures"] = serde_json::json!(["BertModel"]);
    std::fs::write(model.path().join("config.json"), config.to_string()).expect("written");
    let script = format!("exec {RYZ} generate --model {} --token-ids 1", model.path().display());
    let failure = hopeless(&[], &script, &[]);
    assert!(cause(&failure).to_lowercase().contains("bert"), "{failure}");
}
