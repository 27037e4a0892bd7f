//! NCCL's variables on their way to the ranks.

use crate::support::{Run, eventually, text};

const SHOW: &str = "echo debug=$NCCL_DEBUG ctas=$NCCL_MAX_CTAS nvls=$NCCL_NVLS_ENABLE";
/// So that no file in the user's home has a say.
const NO_FILE: (&str, &str) = ("NCCL_CONF_FILE", "/nowhere");

fn launched(environment: &[(&str, &str)]) -> String {
    let arguments = ["launch", "-n", "1", "--", "sh", "-c", SHOW];
    let environment: Vec<_> = environment.iter().copied().chain([NO_FILE]).collect();
    let output = Run::new(&arguments, &environment).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_launcher_hands_the_settings_of_nccl_to_its_ranks() {
    let stdout = launched(&[("RYZ_NCCL__PROFILE", "inference")]);
    assert!(stdout.contains("debug=WARN ctas=16 nvls="), "{stdout}");
}

#[test]
fn the_users_own_variables_reach_the_ranks_as_they_are() {
    let own = [
        ("RYZ_NCCL__PROFILE", "inference"),
        ("RYZ_NCCL__ENV", "NCCL_MAX_CTAS=4"),
        ("NCCL_DEBUG", "TRACE"),
        ("NCCL_MAX_CTAS", "32"),
        ("NCCL_NVLS_ENABLE", "0"),
    ];
    let stdout = launched(&own);
    assert!(stdout.contains("debug=TRACE ctas=32 nvls=0"), "{stdout}");
}

#[test]
fn settings_show_every_variable_of_nccl_with_who_set_it() {
    let environment =
        [("RYZ_NCCL__PROFILE", "inference"), ("NCCL_DEBUG", "INFO"), ("NCCL_TIMEOUT", "600"), NO_FILE];
    let stdout = text(&Run::new(&["config", "show"], &environment).finish().stdout);
    let line = |name: &str| {
        let line = stdout.lines().find(|line| line.starts_with(name));
        line.unwrap_or_else(|| panic!("{name} is not in\n{stdout}"))
    };
    assert!(
        line("NCCL_DEBUG ").contains("the user's environment; overrides WARN of nccl.profile = inference")
    );
    assert!(line("NCCL_MAX_CTAS ").contains("16"));
    assert!(line("NCCL_TIMEOUT ").contains("process_group.timeout"));
}

/// A rank of another launcher lacks the variables, and starts itself anew with them. It waits for a rank 0 that never
/// comes, so that it can be looked at.
#[test]
fn a_rank_of_another_launcher_gets_the_settings_of_nccl_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = Run::new(
        &["check"],
        &[
            ("RYZ_NCCL__ENV", "NCCL_MAX_CTAS=4"),
            NO_FILE,
            ("TMPDIR", folder.path().to_str().expect("text")),
            ("XDG_RUNTIME_DIR", ""),
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
        ],
    );
    let has_it = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == b"NCCL_MAX_CTAS=4")
    };
    assert!(eventually(|| run.family().iter().any(has_it).then_some(())).is_some());
    assert_eq!(run.family().len(), 1, "the process was replaced, not joined by another");
}

#[test]
fn starting_anew_for_the_settings_of_nccl_happens_once() {
    let environment = [("RYZ_NCCL__ENV", "NCCL_MAX_CTAS=4"), NO_FILE];
    let output = Run::new(&["check"], &environment).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("all values are right"));
}
