//! Ranks that fail leave records, and `ryz trace` names the one whose fault it was.

use std::path::Path;

use rustix::process::Signal;
use ryzanstein_config::Config;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::process_group::ReduceOp;
use ryzanstein_orchestrator::rendezvous::Environment;
use serde_json::Value;

use crate::support::{LONG, Run, command_line, eventually, report, text};

/// Set for the ranks, which are the test itself in other processes, to what rank 1 does.
const RANK_1: &str = "WHAT_RANK_1_DOES";

/// Runs a rank: one barrier with all others; then an all-reduce, but for rank 1. `ranks` leave records.
fn rank(environment: &Environment, ranks: &[u32]) {
    let sources = ryzanstein_config::Sources {
        environment: environment.clone().into_iter().collect(),
        ..ryzanstein_config::Sources::default()
    };
    let config = Config::load(&sources).expect("settings");
    let folder = config.profile.trace_dir.clone().expect("--trace-dir is handed down");
    let wait_for = |ranks: &[u32]| {
        let all = || ranks.iter().all(|rank| folder.join(format!("rank-{rank}.json")).exists()).then_some(());
        eventually(all).expect("the ranks leave records");
    };
    let mut orchestrator = Orchestrator::initialize(&config, environment).expect("joined");
    let manager = orchestrator.manager();
    manager.world().barrier().expect("all are here");
    // Nobody fails while another is still in that.
    manager.store_barrier("before", LONG).expect("all have passed");
    let what = if manager.rank().0 == 1 { environment[RANK_1].as_str() } else { "all_reduce" };
    match what {
        "dies" => rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).expect("killed"),
        "never calls" => {
            wait_for(&[0, 2]);
            manager.flight_recorder().write(&folder).expect("written");
        }
        "calls a barrier" => drop(manager.world().barrier().expect_err("the others call something else")),
        _ => drop(
            manager.world().all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).expect_err("rank 1 is not there"),
        ),
    }
    wait_for(ranks);
    std::process::exit(3);
}

fn trace(folder: &Path, more: &[&str]) -> Value {
    let folder = folder.to_str().expect("a path");
    let output = Run::new(&[&["trace", folder, "--format", "json"], more].concat(), &[]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    report(&output)
}

/// Three ranks, of which `ranks` leave records, as the test of this name; what `ryz trace` says of them. `None` in a rank.
fn traced(test: &str, rank_1: &str, ranks: &[u32]) -> Option<Value> {
    let environment: Environment = std::env::vars().collect();
    if environment.contains_key(RANK_1) {
        rank(&environment, ranks);
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = std::env::current_exe().expect("this program");
    let flags =
        ["launch", "-n", "3", "--backend", "tcp", "--trace-dir", folder.path().to_str().expect("a path")];
    let name = format!("trace::{test}");
    // The launcher asks the others to end when one has failed: they write their records first.
    let patient = ["--", "sh", "-c", "trap '' TERM; exec \"$@\"", "sh"];
    let rank = [program.to_str().expect("a path"), "--exact", &name, "--nocapture"];
    let timeout = if rank_1 == "never calls" { "1s" } else { "1m" };
    let variables = [(RANK_1, rank_1), ("RYZ_PROCESS_GROUP__TIMEOUT", timeout), ("RYZ_LAUNCH__GRACE", "1m")];
    let output = Run::new(&[&flags[..], &patient, &rank].concat(), &variables).finish();
    assert_eq!(
        output.status.code(),
        Some(if rank_1 == "dies" { 137 } else { 3 }),
        "{}",
        text(&output.stderr)
    );
    Some(trace(folder.path(), &[]))
}

/// The first verdict, which must blame rank 1.
fn verdict(report: &Value) -> &str {
    let first = &report["verdicts"][0];
    assert_eq!(first["ranks"], serde_json::json!([1]), "{report}");
    first["text"].as_str().expect("a text")
}

#[test]
fn a_rank_that_never_calls_is_named() {
    let Some(report) = traced("a_rank_that_never_calls_is_named", "never calls", &[0, 1, 2]) else { return };
    let text = verdict(&report);
    assert!(text.starts_with("rank 1 is missing from call "), "{text}");
    assert!(text.contains(" of group `world`, all_reduce(sum) of 4 f32 by ranks 0 and 2, for "), "{text}");
    assert!(text.contains("; its last was ") && text.ends_with(", barrier"), "{text}");
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let Some(report) = traced("a_rank_that_is_killed_is_named", "dies", &[0, 2]) else { return };
    let text = verdict(&report);
    assert!(text.starts_with("rank 1 left no record, and ranks 0 and 2 failed because of it"), "{text}");
    assert!(text.contains("lost rank 1"), "{text}");
    assert_eq!(report["missing"], serde_json::json!([1]));
}

#[test]
fn a_rank_that_calls_something_else_is_named() {
    let test = "a_rank_that_calls_something_else_is_named";
    let Some(report) = traced(test, "calls a barrier", &[0, 1, 2]) else { return };
    let text = verdict(&report);
    assert!(text.starts_with("calls differ in call "), "{text}");
    assert!(text.ends_with("ranks 0 and 2 called all_reduce(sum) of 4 f32, rank 1 called barrier"), "{text}");
}

#[test]
fn ranks_write_their_records_when_they_get_the_signal() {
    let folder = tempfile::tempdir().expect("a folder");
    let records = folder.path().join("records");
    let ryz = env!("CARGO_BIN_EXE_ryz");
    // Ignored until the command listens.
    let script = format!("trap '' USR1; exec {ryz} bench --sizes 1KB --iters 1000000");
    let flags = ["-n", "2", "--backend", "tcp", "--trace-dir", records.to_str().expect("a path")];
    let run = Run::launch(&flags, &script);
    let is_rank = |pid: &u32| command_line(*pid).starts_with(&format!("{ryz} bench "));
    eventually(|| {
        for pid in run.family().into_iter().filter(is_rank) {
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
            let _ = rustix::process::kill_process(pid, Signal::USR1);
        }
        [0, 1].iter().all(|rank| records.join(format!("rank-{rank}.json")).exists()).then_some(())
    })
    .expect("records");
    assert_eq!(run.family().into_iter().filter(is_rank).count(), 2, "the signal ends no rank");
    drop(run);
    let timeline = folder.path().join("timeline.json");
    let report = trace(&records, &["--out", timeline.to_str().expect("a path")]);
    assert_eq!(report["missing"], serde_json::json!([]));
    assert_eq!(report["groups"][0]["name"], "world");
    let timeline: Value = serde_json::from_slice(&std::fs::read(timeline).expect("written")).expect("JSON");
    let events = timeline["traceEvents"].as_array().expect("a list");
    for rank in [0, 1] {
        assert!(events.iter().any(|event| event["ph"] == "X" && event["pid"] == rank), "rank {rank}");
    }
}
