//! The output of ranks, as `ryz launch` passes it on: a stream of bytes, with a prefix on each line.

use std::process::{Command, Stdio};

use crate::support::{Run, eventually, ryz, text};
use rustix::process::Signal;

#[test]
fn a_prompt_without_a_line_end_and_a_progress_bar_are_shown_while_the_rank_runs() {
    let cases = [("printf 'Password: '", "[rank 0] Password: "), ("printf '\\rstep 1'", "\r[rank 0] step 1")];
    for (script, shown) in cases {
        let run = Run::launch(&["-n", "1"], &format!("{script}; exec sleep 608"));
        let seen = eventually(|| (run.unread()[0] >= shown.len() as u64).then_some(()));
        assert!(seen.is_some(), "{script}: {:?}", run.unread());
        run.signal(Signal::TERM);
        assert_eq!(text(&run.finish().stdout), format!("{shown}\n"));
    }
}

#[test]
fn python_prints_at_once_unless_the_user_wants_it_otherwise() {
    let script = "echo ${PYTHONUNBUFFERED-unset}";
    let shown = |variables: &[(&str, &str)]| {
        text(&Run::new(&["launch", "-n", "1", "--", "sh", "-c", script], variables).finish().stdout)
    };
    assert_eq!(shown(&[]), "[rank 0] 1\n");
    assert_eq!(shown(&[("PYTHONUNBUFFERED", "")]), "[rank 0] \n");
}

#[test]
fn the_output_of_chosen_ranks_is_shown_and_that_of_all_is_logged() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path");
    for (ranks, shown) in [("1", "[rank 1] out 1\n"), ("none", "")] {
        let flags = ["--world-size", "2", "--log-dir", logs, "--show-ranks", ranks];
        let output = Run::launch(&flags, "echo out $RANK").finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), shown);
        for rank in 0..2 {
            let log = std::fs::read_to_string(folder.path().join(format!("rank-{rank}/stdout.log")));
            assert_eq!(log.expect("a log"), format!("out {rank}\n"));
        }
    }
    let wrong = Run::launch(&["-n", "2", "--show-ranks", "first"], "true").finish();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("--show-ranks"), "{}", text(&wrong.stderr));
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("opened");
    let commands: [&[&str]; 3] =
        [&["launch", "-n", "1", "--", "echo", "x"], &["config", "show"], &["topo", "--preset", "dgx-h100"]];
    for arguments in commands {
        let mut command = Command::new(ryz());
        command.args(arguments).stdin(Stdio::null()).stdout(full()).stderr(Stdio::piped());
        let output = command.output().expect("ryz runs");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains("cannot write to standard output: No space left on device"), "{stderr}");
    }
}

#[test]
fn an_error_that_cannot_be_written_keeps_its_exit_code() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("opened");
    let mut command = Command::new(ryz());
    command.args(["plan", "--model", "/no/such/model"]).stdin(Stdio::null()).stdout(Stdio::null());
    assert_eq!(command.stderr(full).status().expect("ryz runs").code(), Some(2));
}

#[test]
fn output_that_nobody_has_read_at_the_end_is_an_error() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(ryz());
    command.args(["launch", "-n", "1", "--", "seq", "1", "20000"]);
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
    let output = command.output().expect("ryz runs");
    drop(reader);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("cannot write to standard output: its reader has read nothing for 2s"),
        "{stderr}"
    );
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    for arguments in [&["config", "show"][..], &["launch", "-n", "1", "--", "echo", "x"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(ryz());
        command.args(arguments).stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
        let output = command.output().expect("ryz runs");
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn standard_output_in_non_blocking_mode_gets_everything() {
    let arguments = ["completions", "bash"];
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    rustix::pipe::fcntl_setpipe_size(&writer, 4096).expect("a small pipe");
    rustix::io::ioctl_fionbio(&writer, true).expect("non-blocking");
    let mut child = Command::new(ryz()).args(arguments).stdout(writer).spawn().expect("ryz runs");
    let is_full = || rustix::io::ioctl_fionread(&reader).is_ok_and(|count| count >= 4096);
    assert!(eventually(|| is_full().then_some(())).is_some(), "it did not write");
    let mut shown = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut shown).expect("read");
    assert!(child.wait().expect("waited").success());
    assert_eq!(text(&shown), text(&Run::new(&arguments, &[]).finish().stdout));
}

#[test]
fn the_arguments_of_a_program_are_its_own() {
    let program = ["sh", "-c", "echo $0 $1 $2", "--batch_size", "-np", "--no-such-flag"];
    for before in [&["--max_restarts", "0"][..], &["--max_restarts", "0", "--"]] {
        let output = Run::new(&[&["launch", "-np", "1"], before, &program].concat(), &[]).finish();
        assert_eq!(
            text(&output.stdout),
            "[rank 0] --batch_size -np --no-such-flag\n",
            "{}",
            text(&output.stderr)
        );
    }
}
