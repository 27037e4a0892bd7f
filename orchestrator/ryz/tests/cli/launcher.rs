//! `ryz launch` as a user meets it: real processes, real signals.

use std::net::TcpListener;

use crate::support::{Run, command_line, eventually, report, ryz, text};
use rustix::process::Signal;

#[test]
fn a_job_without_a_program_checks_that_its_ranks_find_each_other() {
    let output = Run::new(&["launch", "--world-size", "3", "--format", "json"], &[]).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["status"], "ok");
    assert_eq!(report["epoch"], 1);
    assert!(report["first_failure"].is_null());
    let ranks = report["ranks"].as_array().expect("a list");
    assert_eq!(ranks.iter().map(|r| r["rank"].as_u64()).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    assert!(ranks.iter().all(|r| r["exit_code"] == 0 && r["signal"].is_null() && r["pid"].is_u64()));
}

#[test]
fn settings_in_a_folder_whose_name_is_not_text_reach_the_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = format!(
        "umask 077; cd '{}' && d=$(printf 'm\\377') && mkdir \"$d\" && cd \"$d\" && echo 'job.name = \"z\"' > ryzanstein.toml && \
         exec {} launch -n 2 -- {1} config show",
        folder.path().display(),
        env!("CARGO_BIN_EXE_ryz")
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]);
    let output = Run::of(command).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed_and_the_report_names_it() {
    let script = "[ $RANK != 1 ] && exec sleep 600; echo the disk is full >&2; exit 7";
    let output = Run::launch(&["--world-size", "3"], script).finish();
    assert_eq!(output.status.code(), Some(7));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("first failure: rank 1 (host "), "{stderr}");
    assert!(stderr.contains("exited with code 7"), "{stderr}");
    assert!(stderr.contains("cause: the disk is full"), "{stderr}");
    assert!(!stderr.contains("last collective"), "a program that never joined has none: {stderr}");
}

#[test]
fn the_cause_does_not_say_twice_that_it_is_an_error() {
    let output = Run::launch(&["--world-size", "1"], "echo error: the disk is full >&2; exit 7").finish();
    let stderr = text(&output.stderr);
    assert!(stderr.contains("cause: the disk is full"), "{stderr}");
}

#[test]
fn a_rank_that_joined_and_reported_no_collective_is_said_to_have_reported_none() {
    let script = format!("{} check; exit 7", env!("CARGO_BIN_EXE_ryz"));
    let output = Run::launch(&["--world-size", "1"], &script).finish();
    assert_eq!(output.status.code(), Some(7));
    assert!(text(&output.stderr).contains("last collective: none reported"), "{}", text(&output.stderr));
}

#[test]
fn the_report_as_json_is_the_last_line_of_standard_output() {
    let script = "echo out; [ $RANK != 0 ] && exec sleep 600; echo no memory >&2; exit 3";
    let output = Run::launch(&["--world-size", "2", "--format", "json"], script).finish();
    assert_eq!(output.status.code(), Some(3));
    let report = report(&output);
    assert_eq!(report["status"], "failed");
    let first = &report["first_failure"];
    assert_eq!(
        (&first["rank"], &first["exit_code"], &first["cause"]),
        (&0.into(), &3.into(), &"no memory".into())
    );
    assert!(first["signal"].is_null() && first["last_call"].is_null());
    assert!(first["pid"].is_u64() && first["host"].is_string());
    assert_eq!(report["ranks"][1]["signal"], 15);
}

#[test]
fn a_killed_rank_gives_128_and_its_signal_and_ends_the_others() {
    let run = Run::launch(&["--world-size", "3", "--format", "json"], "exec sleep 600");
    let ranks = run.wait_for(3, "sleep 600");
    let victim = ranks[1];
    let pid = rustix::process::Pid::from_raw(victim as i32).expect("a pid");
    rustix::process::kill_process(pid, Signal::KILL).expect("killed");
    let output = run.finish();
    assert_eq!(output.status.code(), Some(137));
    let report = report(&output);
    assert_eq!(report["first_failure"]["pid"], victim);
    assert_eq!(report["first_failure"]["signal"], 9);
}

/// Sleeps, with a child, an orphan, and an orphan that left its session.
const FAMILY: &str = "sleep 601 & (sleep 602 &); (setsid sleep 603 &); sleep 604";

fn whole_family(run: &Run) {
    for n in 601..=604 {
        run.wait_for(2, &format!("sleep {n}"));
    }
}

#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    let mut run = Run::launch(&["--world-size", "2"], FAMILY);
    whole_family(&run);
    run.signal(Signal::KILL);
    run.wait();
    let gone = eventually(|| run.family().is_empty().then_some(()));
    assert!(gone.is_some(), "left: {:?}", run.family());
}

#[test]
fn nothing_is_left_when_the_supervisor_behind_it_is_killed() {
    let run = Run::launch(&["--world-size", "2"], FAMILY);
    whole_family(&run);
    let supervisor = run.supervisor();
    let pid = rustix::process::Pid::from_raw(supervisor as i32).expect("a pid");
    rustix::process::kill_process(pid, Signal::KILL).expect("killed");
    let output = run.finish();
    assert_eq!(output.status.code(), Some(137));
    assert!(text(&output.stderr).contains("supervisor was killed by signal 9"));
}

#[test]
fn in_a_pid_namespace_nothing_is_left_when_launcher_and_supervisor_are_killed_at_once() {
    let namespace = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let unshare = || {
        let mut command = std::process::Command::new("unshare");
        command.args(namespace);
        command
    };
    if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: user namespaces are not permitted here");
        return;
    }
    let mut command = unshare();
    command.arg(ryz()).args(["launch", "-n", "2", "--", "sh", "-c", FAMILY]);
    let mut run = Run::of(command);
    whole_family(&run);
    let is_half = |pid: &u32| {
        let line = command_line(*pid);
        line.contains(" __supervise ") || (line.contains(" launch ") && !line.starts_with("unshare"))
    };
    let halves: Vec<u32> = run.family().into_iter().filter(is_half).collect();
    assert_eq!(halves.len(), 2);
    // Neither sees the other die.
    for signal in [Signal::STOP, Signal::KILL] {
        for half in &halves {
            let pid = rustix::process::Pid::from_raw(*half as i32).expect("a pid");
            // The supervisor goes with the launcher, which is process 1 of the namespace.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }
    run.wait();
    let gone = eventually(|| run.family().is_empty().then_some(()));
    assert!(gone.is_some(), "left: {:?}", run.family());
}

#[test]
fn nothing_is_left_when_a_job_ends_well() {
    let mut run = Run::launch(&["--world-size", "2"], "(setsid sleep 605 >/dev/null 2>&1 &); sleep 0.2");
    assert!(run.wait().success());
    assert!(run.family().is_empty(), "left: {:?}", run.family());
}

#[test]
fn an_interrupt_ends_ranks_that_listen() {
    let run = Run::launch(&["--world-size", "2"], "exec sleep 606");
    run.wait_for(2, "sleep 606");
    run.signal(Signal::INT);
    let output = run.finish();
    assert_eq!(output.status.code(), Some(130));
    assert!(text(&output.stderr).contains("the job was ended by signal 2"));
}

#[test]
fn an_interrupt_ends_ranks_that_do_not_listen_after_the_grace() {
    let script = "trap '' INT TERM; while :; do sleep 0.07; done";
    let run = Run::new(&["launch", "-n", "2", "--", "sh", "-c", script], &[("RYZ_LAUNCH__GRACE", "300ms")]);
    run.wait_for(2, "sleep 0.07");
    run.signal(Signal::INT);
    assert_eq!(run.finish().status.code(), Some(130));
}

#[test]
fn a_second_interrupt_does_not_wait_for_the_grace() {
    let script = "trap '' INT TERM; while :; do sleep 0.05; done";
    let run = Run::new(&["launch", "-n", "1", "--", "sh", "-c", script], &[("RYZ_LAUNCH__GRACE", "1h")]);
    run.wait_for(1, "sleep 0.05");
    run.signal(Signal::INT);
    // A busy machine may take two signals for one.
    let ended = eventually(|| {
        std::thread::sleep(std::time::Duration::from_millis(200));
        run.signal(Signal::INT);
        run.family().is_empty().then_some(())
    });
    assert!(ended.is_some(), "it waits for the grace");
    assert_eq!(run.finish().status.code(), Some(130));
}

/// Starts ranks that write until nothing more fits, as [`Run`] does not read, and gives the launcher a signal.
fn with_a_stuck_reader(flags: &[&str], script: &str, signal: Signal) {
    let script = format!("{script}; yes & yes >&2");
    let mut run = Run::launch(&[&["--world-size", "2"], flags].concat(), &script);
    // Pages of a pipe may be partly filled, so it can be full below its size.
    let full = eventually(|| {
        let before = run.unread();
        std::thread::sleep(std::time::Duration::from_millis(100));
        (before == run.unread() && before.iter().all(|bytes| *bytes > 32 << 10)).then_some(())
    });
    assert!(full.is_some(), "not full: {:?}", run.unread());
    if script.contains("exit 3") {
        // The rank fails only now, and the launcher has something to say.
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    run.signal(signal);
    run.wait();
    let gone = eventually(|| run.family().is_empty().then_some(()));
    assert!(gone.is_some(), "{flags:?} {signal:?} left: {:?}", run.family());
}

#[test]
fn a_reader_that_has_stopped_reading_does_not_keep_the_launcher() {
    let fails = "[ $RANK = 0 ] && sleep 0.5 && exit 3";
    let cases: [(&[&str], &str); 5] = [
        (&[], fails),
        (&["--format", "json"], fails),
        (&[], "true"),
        (&["--format", "json"], "true"),
        (&["--max-restarts", "100"], fails),
    ];
    std::thread::scope(|scope| {
        for (flags, script) in cases {
            for signal in [Signal::TERM, Signal::KILL] {
                scope.spawn(move || with_a_stuck_reader(flags, script, signal));
            }
        }
    });
}

/// Calls that last until they are ended.
pub(crate) const ENDLESS: [&str; 2] = ["1KB", "1000000"];
/// Calls that last some seconds, more on a slow machine: the bytes take the time, not the turns of the ranks.
pub(crate) const SECONDS: [&str; 2] = ["20MB", "100"];

/// Starts four ranks, each of which calls collectives of this size `iters` times. Waits until they call. Returns the run and the
/// process of one rank.
pub(crate) fn at_work(flags: &[&str], [size, iters]: [&str; 2]) -> (Run, rustix::process::Pid) {
    let ryz = env!("CARGO_BIN_EXE_ryz");
    let job = ["launch", "-n", "4", "--backend", "tcp"];
    let bench = ["--", ryz, "bench", "--sizes", size, "--iters", iters];
    let run = Run::new(
        &[&job, flags, &bench].concat(),
        &[("RYZ_LAUNCH__GRACE", "300ms"), ("RYZ_LOG__LEVEL", "error")],
    );
    let ranks = run.wait_for(4, &[ryz, &bench[2..].join(" ")].join(" "));
    // The head of the table comes after joining.
    assert!(eventually(|| (run.unread()[0] > 0).then_some(())).is_some(), "no table");
    let rank = |pid: &u32| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        text(&environ).split('\0').any(|entry| entry == "RANK=2")
    };
    let second = *ranks.iter().find(|pid| rank(pid)).expect("rank 2");
    (run, rustix::process::Pid::from_raw(second as i32).expect("a pid"))
}

#[test]
fn a_stopped_rank_is_told_at_once_and_is_the_first_failure_when_the_others_give_up() {
    let (run, stopped) = at_work(&["--timeout", "6", "--format", "json"], ENDLESS);
    rustix::process::kill_process(stopped, Signal::STOP).expect("stopped");
    assert!(eventually(|| (run.unread()[1] > 0).then_some(())).is_some(), "not told");
    assert!(run.family().len() >= 6, "nothing is killed");
    let output = run.finish();
    let (report, stderr) = (report(&output), text(&output.stderr));
    let first = &report["first_failure"];
    assert_eq!(
        (&first["rank"], &first["pid"]),
        (&2.into(), &stopped.as_raw_nonzero().get().into()),
        "{report}"
    );
    assert!(first["exit_code"].is_null() && first["signal"].is_null(), "{report}");
    assert_eq!(first["cause"], "its process is stopped (signal 19, SIGSTOP)");
    assert!(first["last_call"].is_string(), "the others tell it: {report}");
    assert_eq!(output.status.code(), Some(1), "the code of a rank that gave up");
    assert!(stderr.starts_with("ryz: rank 2 (host "), "{stderr}");
    assert!(stderr.contains("is unresponsive: stopped by signal 19 (SIGSTOP)"), "{stderr}");
}

#[test]
fn a_stopped_rank_that_continues_does_no_harm() {
    let (run, stopped) = at_work(&[], SECONDS);
    rustix::process::kill_process(stopped, Signal::STOP).expect("stopped");
    assert!(eventually(|| (run.unread()[1] > 0).then_some(())).is_some(), "not told");
    rustix::process::kill_process(stopped, Signal::CONT).expect("continued");
    let output = run.finish();
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(
        stderr.contains("stopped by signal 19") && stderr.contains("\nryz: rank 2 continues\n"),
        "{stderr}"
    );
}

#[test]
fn the_last_collective_of_a_killed_rank_is_what_the_others_reported() {
    let (run, killed) = at_work(&["--format", "json"], ENDLESS);
    rustix::process::kill_process(killed, Signal::KILL).expect("killed");
    let output = run.finish();
    assert_eq!(output.status.code(), Some(137));
    let first = report(&output)["first_failure"].clone();
    assert_eq!((&first["rank"], &first["signal"]), (&2.into(), &9.into()));
    assert!(first["last_call"].as_str().is_some_and(|call| call.contains("group `")), "{first}");
}

#[test]
fn a_log_that_cannot_be_written_is_told_at_once_and_in_the_report() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path");
    std::fs::create_dir(folder.path().join("rank-1")).expect("a folder");
    let full = folder.path().join("rank-1/stdout.log");
    std::os::unix::fs::symlink("/dev/full", &full).expect("a link");
    let script = "echo one; echo two; echo three >&2";
    let output = Run::launch(&["--world-size", "2", "--log-dir", logs], script).finish();
    assert!(output.status.success());
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(stdout.contains("[rank 1] two\n"), "it is still forwarded: {stdout}");
    let told = format!("cannot write {}: No space left on device", full.display());
    assert_eq!(stderr.matches(&told).count(), 2, "{stderr}");
    assert!(stderr.contains("; the output of rank 1 is not logged any more\n"), "{stderr}");
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a log");
    assert_eq!(
        (read("rank-0/stdout.log").as_str(), read("rank-1/stderr.log").as_str()),
        ("one\ntwo\n", "three\n")
    );
}

#[test]
fn a_restart_is_told_with_its_wait_and_can_be_interrupted() {
    let run = Run::launch(&["--world-size", "1", "--max-restarts", "9", "--format", "json"], "exit 4");
    // The third comes four seconds later: there is time for a signal.
    assert!(eventually(|| (run.unread()[1] > 250).then_some(())).is_some(), "no restarts");
    run.signal(Signal::TERM);
    let output = run.finish();
    assert_eq!(output.status.code(), Some(143), "{}", text(&output.stderr));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("exited with code 4; restart 1 of 9 in 1 s, as epoch 2\n"), "{stderr}");
    assert!(stderr.contains("; restart 2 of 9 in 2 s, as epoch 3\n"), "{stderr}");
}

#[test]
fn lines_carry_their_rank_and_streams_stay_apart() {
    let script = "echo out $RANK; echo err $RANK >&2; printf partial";
    let output = Run::launch(&["--world-size", "2"], script).finish();
    let mut lines: Vec<_> = text(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] out 0", "[rank 0] partial", "[rank 1] out 1", "[rank 1] partial"]);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("[rank 1] err 1\n") && !stderr.contains("out"), "{stderr}");
}

#[test]
fn a_command_that_launches_itself_writes_to_standard_output_directly() {
    let script = "head -c 200000 /dev/zero | tr '\\0' x; echo; printf partial";
    let output = Run::launch(&["--world-size", "1", "--direct"], script).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let wanted = "x".repeat(200_000) + "\npartial";
    assert!(text(&output.stdout) == wanted, "{} bytes, wanted {}", output.stdout.len(), wanted.len());
}

#[test]
fn the_log_folder_of_a_command_that_launches_itself_holds_what_it_wrote() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path");
    let script = "head -c 200000 /dev/zero | tr '\\0' x; echo; printf partial";
    let flags = ["--world-size", "1", "--direct", "--log-dir", logs];
    let output = Run::launch(&flags, script).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let log = std::fs::read(folder.path().join("rank-0/stdout.log")).expect("a log");
    let wanted = "x".repeat(200_000) + "\npartial";
    assert!(text(&log) == wanted && output.stdout == log, "{} and {} bytes", log.len(), output.stdout.len());
}

#[test]
fn the_log_folder_holds_what_each_rank_wrote() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().join("new/logs");
    let script = "echo out $RANK; echo err $RANK >&2";
    let output =
        Run::launch(&["--world-size", "2", "--log-dir", logs.to_str().expect("a path")], script).finish();
    assert!(output.status.success());
    for rank in 0..2 {
        let read = |name| std::fs::read_to_string(logs.join(format!("rank-{rank}/{name}"))).expect("a log");
        assert_eq!(
            (read("stdout.log"), read("stderr.log")),
            (format!("out {rank}\n"), format!("err {rank}\n"))
        );
    }
}

#[test]
fn ranks_get_the_variables_that_launchers_give() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR ${MASTER_PORT:?} \
                  ${RYZ_RENDEZVOUS:?} $RYZ_EPOCH ${RYZ_SECRET_FD:?} $RYZ_PROCESS_GROUP__BACKEND";
    let output = Run::launch(&["--world-size", "2", "--backend", "gloo"], script).finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    let line = stdout.lines().find(|line| line.starts_with("[rank 1] ")).expect("rank 1 wrote");
    let words: Vec<_> = line.split_whitespace().skip(2).collect();
    assert_eq!(words[..6], ["1", "2", "1", "2", "0", "127.0.0.1"]);
    assert_eq!((words[8], words[10]), ("1", "tcp"));
}

#[test]
fn ranks_get_limits_for_the_allocator_unless_the_user_has_set_one() {
    let script = "echo limits ${MALLOC_TRIM_THRESHOLD_:-none} ${MALLOC_MMAP_THRESHOLD_:-none}";
    let limits = |variables: &[(&str, &str)]| {
        let arguments = ["launch", "-n", "1", "--", "sh", "-c", script];
        let folder = tempfile::tempdir().expect("a folder");
        text(&Run::in_folder(folder.path(), &arguments, variables).finish().stdout)
    };
    let (ours, users) = (limits(&[]), limits(&[("MALLOC_TRIM_THRESHOLD_", "4096")]));
    assert!(ours.contains("limits 268435456 33554432"), "{ours}");
    assert!(users.contains("limits 4096 none"), "{users}");
}

#[test]
fn ranks_get_the_file_that_the_launcher_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ryzanstein.toml");
    std::fs::write(&file, "[launch]\ngrace = \"9s\"").expect("written");
    // The name of the default file is found in this folder only, so ranks need the whole path.
    let script = format!("cd / && exec {} config show", env!("CARGO_BIN_EXE_ryz"));
    let arguments = ["launch", "-n", "1", "--", "sh", "-c", &script];
    let output = Run::in_folder(folder.path(), &arguments, &[]).finish();
    let stdout = text(&output.stdout);
    let line = stdout.lines().find(|line| line.contains("launch.grace ")).expect("the setting");
    assert!(line.contains("9s") && line.ends_with(&format!("file {}", file.display())), "{line}");
}

#[test]
fn standalone_is_one_node_whatever_the_environment_says() {
    let environment = [
        ("RYZ_LAUNCH__NNODES", "2"),
        ("RYZ_LAUNCH__NODE_RANK", "1"),
        ("RYZ_RENDEZVOUS__ADDRESS", "node0.invalid:29500"),
    ];
    let script = "echo $GROUP_RANK $MASTER_ADDR $RYZ_LAUNCH__NNODES";
    let arguments = ["launch", "-n", "1", "--standalone", "--", "sh", "-c", script];
    let output = Run::new(&arguments, &environment).finish();
    assert_eq!(text(&output.stdout), "[rank 0] 0 127.0.0.1 1\n", "{}", text(&output.stderr));
}

#[test]
fn the_secret_is_on_no_command_line_and_in_no_environment() {
    // The descriptor's 32 bytes, in hexadecimal, are told by one rank; they must be nowhere else, in no form.
    let script = "od -An -v -tx1 < /proc/self/fd/$RYZ_SECRET_FD | tr -d ' \\n'; echo; exec sleep 607";
    let run = Run::launch(&["--world-size", "1"], script);
    let rank = run.wait_for(1, "sleep 607")[0];
    let environ = std::fs::read(format!("/proc/{rank}/environ")).expect("its environment");
    let fd: u32 = text(&environ)
        .split('\0')
        .find_map(|entry| entry.strip_prefix("RYZ_SECRET_FD=")?.parse().ok())
        .expect("the descriptor's number");
    let secret = std::fs::read(format!("/proc/{rank}/fd/{fd}")).expect("the secret");
    assert_eq!(secret.len(), 32);
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
    for pid in run.family() {
        for name in ["environ", "cmdline"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            assert!(!bytes.windows(secret.len()).any(|window| window == secret), "{name} of {pid}");
            assert!(!text(&bytes).to_lowercase().contains(&hex), "{name} of {pid}");
        }
    }
    run.signal(Signal::TERM);
    let output = run.finish();
    assert!(text(&output.stdout).contains(&hex), "the shell read the same");
}

#[test]
fn a_taken_port_is_named_with_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let output = Run::launch(&["--world-size", "1", "--rendezvous", &address], "true").finish();
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains(&address) && stderr.contains("ss -ltnp") && stderr.contains("--rendezvous"),
        "{stderr}"
    );
}

#[test]
fn settings_shown_as_a_file_give_the_same_settings_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("again.toml");
    let environment = [
        // Neither is a number of TOML.
        ("RYZ_JOB__NAME", "007"),
        ("RYZ_PROCESS_GROUP__TCP__INTERFACE", "+1 \"\\"),
        ("RYZ_LAUNCH__MAX_RESTARTS", "3"),
        ("RYZ_PROCESS_GROUP__SELF_CHECK", "false"),
        ("RYZ_NCCL__ENV", "NCCL_IB_DISABLE=1 NCCL_DEBUG=INFO"),
    ];
    let shown = Run::new(&["config", "show", "--format", "toml"], &environment).finish();
    std::fs::write(&file, &shown.stdout).expect("written");
    let file = file.to_str().expect("a path");
    let again = Run::new(&["config", "show", "--format", "toml", "--config", file], &[]).finish();
    assert_eq!(text(&again.stdout), text(&shown.stdout), "{}", text(&again.stderr));
    let stdout = text(&shown.stdout);
    for line in
        ["name = \"007\"", "max_restarts = 3", "self_check = false", "[nccl.env]", "NCCL_IB_DISABLE = \"1\""]
    {
        assert!(stdout.contains(line), "{stdout}");
    }
}

#[test]
fn the_settings_are_shown_with_where_they_came_from() {
    let output = Run::new(&["config", "show"], &[("RYZ_LAUNCH__GRACE", "9s")]).finish();
    let stdout = text(&output.stdout);
    let line = stdout.lines().find(|line| line.starts_with("launch.grace ")).expect("the setting");
    assert!(line.contains("9s") && line.ends_with("environment variable RYZ_LAUNCH__GRACE"), "{line}");
}
