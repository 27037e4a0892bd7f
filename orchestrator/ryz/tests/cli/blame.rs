//! Who is named as the first failure of programs that do not use the library.

use crate::support::{Run, eventually, report, text};
use rustix::process::Signal;
use serde_json::Value;

/// Output of ranks of other libraries when another rank does not do its part.
const LOST: &str = "echo 'RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:28048' >&2";
const WAITED: &str = "echo 'RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete' >&2";

/// Returns the first failure of three ranks, of which rank 2 runs `odd` and the others run `others`. The process id of rank 2 is in the
/// file `$ODD`.
fn first_failure(odd: &str, others: &str) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("odd");
    let script =
        format!("if [ $RANK = 2 ]; then echo $$ > $ODD.new; mv $ODD.new $ODD; {odd}; else {others}; fi");
    let arguments = ["launch", "-n", "3", "--format", "json", "--", "sh", "-c", &script];
    let output = Run::new(&arguments, &[("ODD", file.to_str().expect("a path"))]).finish();
    report(&output)["first_failure"].clone()
}

/// Waits until rank 2 has ended and the launcher knows.
const ODD_HAS_LEFT: &str = "until [ -e $ODD ] && ! [ -e /proc/$(cat $ODD) ]; do sleep 0.05; done";
/// Waits until rank 2 sleeps.
const ODD_SLEEPS: &str = "until [ -e $ODD ] && grep -q sleep /proc/$(cat $ODD)/comm; do sleep 0.05; done";

#[test]
fn a_rank_that_leaves_early_with_success_is_named_when_the_others_fail_because_of_it() {
    let first = first_failure("exit 0", &format!("{ODD_HAS_LEFT}; {LOST}; exit 1"));
    assert_eq!((&first["rank"], &first["exit_code"]), (&2.into(), &0.into()), "{first}");
    assert!(first["cause"].as_str().is_some_and(|cause| cause.contains("wrote: RuntimeError")), "{first}");
}

#[test]
fn a_rank_that_is_stuck_is_named_with_what_its_process_waits_for() {
    let first = first_failure("exec sleep 609", &format!("{ODD_SLEEPS}; {WAITED}; exit 1"));
    assert_eq!(first["rank"], 2, "{first}");
    assert!(first["exit_code"].is_null() && first["signal"].is_null(), "{first}");
    assert!(
        first["state"].as_str().is_some_and(|state| state.starts_with("sleep was in state S")),
        "{first}"
    );
}

#[test]
fn a_rank_that_is_stopped_is_named_when_the_others_wait_in_vain() {
    let folder = tempfile::tempdir().expect("a folder");
    let mark = folder.path().join("mark");
    let wait = "until [ -e $MARK ]; do sleep 0.05; done";
    let script = format!("[ $RANK = 2 ] && exec sleep 610; {wait}; {WAITED}; exit 1");
    let arguments = ["launch", "-n", "3", "--format", "json", "--", "sh", "-c", &script];
    let run = Run::new(&arguments, &[("MARK", mark.to_str().expect("a path"))]);
    let pid = rustix::process::Pid::from_raw(run.wait_for(1, "sleep 610")[0] as i32).expect("a pid");
    rustix::process::kill_process(pid, Signal::STOP).expect("stopped");
    assert!(eventually(|| (run.unread()[1] > 0).then_some(())).is_some(), "not told");
    std::fs::write(&mark, "").expect("written");
    let first = report(&run.finish())["first_failure"].clone();
    assert_eq!(first["rank"], 2, "{first}");
    assert_eq!(first["cause"], "its process is stopped (signal 19, SIGSTOP)");
}

#[test]
fn an_error_of_its_own_counts_more_than_what_others_do() {
    let first = first_failure("exit 0", "echo 'ValueError: no such file' >&2; exit 3");
    assert_eq!(first["exit_code"], 3, "{first}");
    assert_ne!(first["rank"], 2, "{first}");
}

#[test]
fn the_last_words_before_a_sigkill_are_not_its_cause() {
    let first = first_failure("echo all is well >&2; kill -KILL $$", "exec sleep 611");
    assert_eq!((&first["rank"], &first["signal"]), (&2.into(), &9.into()), "{first}");
    assert!(!first["cause"].as_str().is_some_and(|cause| cause.contains("all is well")), "{first}");
    assert_eq!(first["last_output"], "all is well");
}

#[test]
fn the_error_is_told_not_the_frames_below_it() {
    let frames = (0..20).map(|i| format!("echo 'frame #{i}: <unknown function> + 0x1' >&2; "));
    let frames = frames.collect::<Vec<_>>().concat();
    let error = "echo 'CUDA error: an illegal memory access was encountered' >&2";
    let first = first_failure(&format!("{error}; {frames} kill -ABRT $$"), "exec sleep 612");
    assert_eq!(first["cause"], "CUDA error: an illegal memory access was encountered", "{first}");
}

#[test]
fn signals_are_named_and_a_restart_tells_its_cause() {
    for name in ["XCPU", "XFSZ", "SYS", "USR2", "ALRM"] {
        let script = format!("kill -{name} $$; sleep 2");
        let stderr = text(&Run::launch(&["-n", "1"], &script).finish().stderr);
        assert!(stderr.contains(&format!("(SIG{name})")), "{stderr}");
    }
    let script = "[ $RYZ_EPOCH = 2 ] && exit 0; [ $RANK = 1 ] || exec sleep 613; echo no room >&2; exit 4";
    let output = Run::launch(&["-n", "3", "--max-restarts", "1"], script).finish();
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("exited with code 4: no room; restart 1 of 1 in 1 s"), "{stderr}");
    assert!(!stderr.contains("SIGTERM"), "{stderr}");
}

#[test]
fn a_signal_for_the_ranks_reaches_those_that_handle_it_and_ends_nobody() {
    let script = "[ $RANK = 0 ] && trap 'echo saved; exit 0' USR1; echo ready; i=0; while [ $i -lt 600 ]; do sleep 0.1; \
                  i=$((i + 1)); [ -e $MARK ] && exit 0; done";
    let folder = tempfile::tempdir().expect("a folder");
    let mark = folder.path().join("mark");
    let mark_text = mark.to_str().expect("a path");
    let run = Run::new(&["launch", "-n", "2", "--", "sh", "-c", script], &[("MARK", mark_text)]);
    let ready = eventually(|| (run.unread()[0] >= 30).then_some(()));
    assert!(ready.is_some(), "not ready");
    run.signal(Signal::USR1);
    let told = eventually(|| (run.unread()[1] > 0).then_some(()));
    assert!(told.is_some(), "not told");
    std::fs::write(&mark, "").expect("written");
    let output = run.finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("[rank 0] saved\n"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("passed SIGUSR1 on to 1 process"), "{}", text(&output.stderr));
}
