//! `ryz explain`, what is added to errors, and the book's page of known errors.

mod page;
mod provoked;
mod texts;

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::support::{Run, report, ryz, text};

const LOG: &str = "starting\n\
                   node0:97:176 [0] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes\n\
                   \u{ff}\n\
                   Connection refused (os error 111)\n";

/// Explains `log` as standard input.
fn explain(flags: &[&str], log: &[u8]) -> (Option<i32>, String, String) {
    let mut child = Command::new(ryz())
        .args(["explain", "-"])
        .args(flags)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ryz starts");
    child.stdin.take().expect("piped").write_all(log).expect("written");
    let output = child.wait_with_output().expect("ended");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_log_on_standard_input_is_explained_error_by_error() {
    let log: Vec<u8> = LOG.chars().map(|c| c as u8).collect();
    let (code, stdout, stderr) = explain(&[], &log);
    assert_eq!((code, &*stderr), (Some(0), ""));
    let at = |words: &str| stdout.find(words).unwrap_or_else(|| panic!("`{words}` is not in:\n{stdout}"));
    assert!(at("shared-memory-too-small (line 2)\n") < at("connection-refused (line 4)\n"));
    assert!(at("  cause: /dev/shm is full") < at("  remedy: give the container more"));

    let (code, stdout, _) = explain(&["--format", "json"], &log);
    let json: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!((code, &json["found"][1]["line"]), (Some(0), &4.into()), "{json}");
}

#[test]
fn an_unknown_error_ends_with_code_1_and_what_to_do() {
    let (code, stdout, stderr) = explain(&[], b"all is well\n");
    assert_eq!((code, &*stdout), (Some(1), ""));
    assert!(stderr.contains("no known error") && stderr.contains("--list"), "{stderr}");
    let (code, stdout, _) = explain(&["--format", "json"], b"");
    assert_eq!((code, &*stdout), (Some(1), "{\"found\":[]}\n"));
}

#[test]
fn a_message_may_be_given_in_several_words() {
    let output = Run::new(&["explain", "Call", "to", "ibv_create_qp", "failed"], &[]).finish();
    assert!(text(&output.stdout).starts_with("infiniband-locked-memory (line 1)\n"), "{output:?}");
}

#[test]
fn the_list_has_every_entry() {
    let list = text(&Run::new(&["explain", "--list"], &[]).finish().stdout);
    let json = Run::new(&["explain", "--list", "--format", "json"], &[]).finish();
    let json = report(&json);
    for entry in ryzanstein_orchestrator::catalogue::entries() {
        assert!(list.contains(&entry.id), "{} is not in:\n{list}", entry.id);
        let ids = json["entries"].as_array().expect("a list").iter().map(|listed| &listed["id"]);
        assert_eq!(ids.filter(|id| **id == *entry.id).count(), 1, "{}", entry.id);
    }
}

#[test]
fn an_error_is_followed_by_its_cause_and_remedy() {
    let output = Run::new(&["config", "show", "--config", "/no/such/file"], &[]).finish();
    let stderr = text(&output.stderr);
    let lines: Vec<&str> = stderr.lines().collect();
    assert!(lines[0].starts_with("error: cannot read the configuration file /no/such/file"), "{stderr}");
    assert!(lines[1].starts_with("  cause: ") && lines[2].starts_with("  remedy: "), "{stderr}");
    assert_eq!(lines.len(), 3, "{stderr}");
}

#[test]
fn the_closing_report_explains_the_first_failure_and_ranks_do_not_repeat_it() {
    let script = format!("[ $RANK = 1 ] && exec sleep 608; exec {} check", env!("CARGO_BIN_EXE_ryz"));
    let run = |format| Run::launch(&["-n", "2", "--timeout", "1", "--format", format], &script).finish();
    let stderr = text(&run("table").stderr);
    assert_eq!(stderr.matches("  explanation: that rank never joined").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("  remedy: look at that rank's output").count(), 1, "{stderr}");
    let failure = report(&run("json"))["first_failure"].clone();
    assert_eq!(failure["explanation"]["id"], "join-timed-out", "{failure}");
    assert!(failure["explanation"]["remedy"].is_string(), "{failure}");
}

#[test]
fn a_limit_on_open_files_is_not_taken_for_one_on_processes() {
    for limit in 16..=24 {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {limit}; exec {} launch -n 1 -- true", env!("CARGO_BIN_EXE_ryz"));
        command.args(["-c", &script]);
        let stderr = text(&Run::of(command).finish().stderr);
        assert!(!stderr.contains("ulimit -u"), "{limit}: {stderr}");
    }
}

#[test]
fn a_killed_rank_is_explained_by_its_signal_whatever_it_wrote() {
    let output = Run::launch(&["-n", "1"], "echo loading >&2; kill -KILL $$").finish();
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains(
            "  cause: it was killed by signal 9 (SIGKILL)\n  explanation: something outside the job killed the rank"
        ),
        "{stderr}"
    );
}
