//! NCCL's variables on their way to the ranks.

use crate::support::{Run, text};

const SHOW: &str = "echo debug=$NCCL_DEBUG ctas=$NCCL_MAX_CTAS nvls=$NCCL_NVLS_ENABLE";

fn launched(environment: &[(&str, &str)]) -> String {
    let arguments = ["launch", "-n", "1", "--", "sh", "-c", SHOW];
    // A home of its own, so that no file of NCCL's has a say.
    let environment: Vec<_> = environment.iter().copied().chain([("HOME", "/nowhere")]).collect();
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
        ("RYZ_NCCL__MAX_CTAS", "4"),
        ("NCCL_DEBUG", "TRACE"),
        ("NCCL_MAX_CTAS", "32"),
        ("NCCL_NVLS_ENABLE", "0"),
    ];
    let stdout = launched(&own);
    assert!(stdout.contains("debug=TRACE ctas=32 nvls=0"), "{stdout}");
}

#[test]
fn settings_show_every_variable_of_nccl_with_who_set_it() {
    let environment = [
        ("RYZ_NCCL__PROFILE", "inference"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_TIMEOUT", "600"),
        ("HOME", "/nowhere"),
    ];
    let stdout = text(&Run::new(&["config", "show"], &environment).finish().stdout);
    let line = |name: &str| {
        let line = stdout.lines().find(|line| line.starts_with(name));
        line.unwrap_or_else(|| panic!("{name} is not in\n{stdout}"))
    };
    assert!(
        line("NCCL_DEBUG ").contains("the user's environment; set aside: WARN of nccl.profile = inference")
    );
    assert!(line("NCCL_MAX_CTAS ").contains("16"));
    assert!(line("NCCL_TIMEOUT ").contains("process_group.timeout"));
}

/// A rank of another launcher lacks the variables, starts itself anew with them, and does so once.
#[test]
fn a_rank_of_another_launcher_gets_the_settings_of_nccl_too() {
    let environment = [("RYZ_NCCL__MAX_CTAS", "4"), ("HOME", "/nowhere")];
    let output = Run::new(&["check"], &environment).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("all values are right"));
}
