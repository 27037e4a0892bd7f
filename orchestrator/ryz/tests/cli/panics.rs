//! A rank whose program panics or fails by itself: what the launcher and the other ranks say of it.

use ryzanstein_config::Config;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::rendezvous::Environment;

use crate::support::{Run, report, text};

/// Set for the ranks, which are this same test in other processes.
const AS_RANK: &str = "PANICS_AS_RANK";

/// Runs a rank: the first waits for the second, which panics with the job in its hands.
fn rank(environment: &Environment) {
    let config = Config::load(&ryzanstein_config::Sources {
        environment: environment.clone().into_iter().collect(),
        ..ryzanstein_config::Sources::default()
    });
    let mut orchestrator = Orchestrator::initialize(&config.expect("settings"), environment).expect("joined");
    assert_eq!(orchestrator.manager().rank().0, 0, "rank 1 panics on purpose");
    let error = orchestrator.manager().world().barrier().expect_err("rank 1 never comes");
    orchestrator.report(&error);
    eprintln!("rank 0 hears: {error}");
    std::process::exit(3);
}

#[test]
fn a_rank_that_panics_is_the_first_failure_and_is_said_to_have_panicked() {
    let environment: Environment = std::env::vars().collect();
    if environment.contains_key(AS_RANK) {
        return rank(&environment);
    }
    let test = std::env::current_exe().expect("this program");
    let name = "panics::a_rank_that_panics_is_the_first_failure_and_is_said_to_have_panicked";
    let output = Run::new(
        &[
            &["launch", "-n", "2", "--backend", "tcp", "--format", "json", "--"],
            &[test.to_str().expect("a path"), "--exact", name, "--nocapture"][..],
        ]
        .concat(),
        &[(AS_RANK, "1")],
    )
    .finish();
    let said = text(&output.stderr);
    assert!(said.contains("rank 0 hears: rank 1 aborted: the program panicked"), "{said}");
    let report = report(&output);
    let failure = &report["first_failure"];
    assert_eq!((&failure["rank"], &failure["exit_code"]), (&1.into(), &101.into()), "{report}");
    let cause = failure["cause"].as_str().expect("a cause");
    assert!(cause.contains("the program panicked"), "{report}");
}

#[test]
fn a_rank_that_fails_by_itself_keeps_its_last_collective_and_leaves_its_record() {
    let environment: Environment = std::env::vars().collect();
    if environment.contains_key(AS_RANK) {
        let builder = Orchestrator::builder().environment(environment);
        let mut orchestrator = builder.initialize().expect("joined");
        orchestrator.manager().world().barrier().expect("both are there");
        if orchestrator.manager().rank().0 == 1 {
            let error = anyhow::Error::new(std::io::Error::other("the disk is full"));
            orchestrator.report(error.context("cannot write the batch").as_ref());
            std::process::exit(3);
        }
        // Rank 1 may be gone.
        let _ = orchestrator.finalize();
        return;
    }
    let records = tempfile::tempdir().expect("a folder");
    let test = std::env::current_exe().expect("this program");
    let name = "panics::a_rank_that_fails_by_itself_keeps_its_last_collective_and_leaves_its_record";
    let folder = records.path().to_str().expect("a path");
    let output = Run::new(
        &[
            &["launch", "-n", "2", "--backend", "tcp", "--format", "json", "--trace-dir", folder, "--"],
            &[test.to_str().expect("a path"), "--exact", name, "--nocapture"][..],
        ]
        .concat(),
        &[(AS_RANK, "1")],
    )
    .finish();
    let report = report(&output);
    let failure = &report["first_failure"];
    let cause = "cannot write the batch: the disk is full";
    assert_eq!((&failure["rank"], &failure["cause"]), (&1.into(), &cause.into()), "{report}");
    let last_call = failure["last_call"].as_str().expect("a call");
    assert!(last_call.ends_with("barrier"), "{report}");
    assert!(records.path().join("rank-1.json").exists(), "the rank leaves its record");
}
