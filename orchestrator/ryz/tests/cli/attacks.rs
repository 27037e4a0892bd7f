//! Harm to a job from another user, the program that starts the launcher, its files and its ranks' children.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{LONG, Run, command_line, eventually, ryz, text};

const RYZ: &str = env!("CARGO_BIN_EXE_ryz");

/// A user who owns nothing and runs nothing.
const STRANGER: &str = "64321";

/// `ryz` with these arguments, started by `env` with these flags.
fn from_env(flags: &[&str], arguments: &[&str]) -> Run {
    let mut command = Command::new("env");
    command.args(flags).arg(ryz()).args(arguments);
    Run::of(command)
}

/// The letter of a process's state.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).expect("a pid"), signal).expect("signalled");
}

/// Makes a pipe with a name.
fn make_pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
}

#[test]
fn signals_that_were_blocked_or_ignored_before_do_not_keep_the_launcher() {
    let flags = ["--block-signal=INT,TERM,CHLD", "--ignore-signal=CHLD,TERM"];
    // It hears of the end of its ranks, and ranks are not born with the mask.
    let run = from_env(&flags, &["launch", "-n", "1", "--", "grep", "SigBlk", "/proc/self/status"]);
    let output = run.finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("SigBlk:\t0000000000000000"), "{}", text(&output.stdout));
    let run = from_env(&flags, &["launch", "-n", "1", "--", "sleep", "621"]);
    run.wait_for(1, "sleep 621");
    run.signal(Signal::TERM);
    assert_eq!(run.finish().status.code(), Some(143));
}

#[test]
fn a_job_that_nohup_has_started_survives_its_terminal() {
    let run = from_env(&["--ignore-signal=HUP"], &["launch", "-n", "1", "--", "sleep", "624"]);
    let ranks = run.wait_for(1, "sleep 624");
    run.signal(Signal::HUP);
    signal(run.supervisor(), Signal::HUP);
    signal(ranks[0], Signal::HUP);
    run.signal(Signal::TERM);
    let output = run.finish();
    assert_eq!(output.status.code(), Some(143), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("killed by signal 15"), "{}", text(&output.stderr));
}

#[test]
fn two_requests_to_end_at_once_leave_the_ranks_their_grace() {
    let script = "trap 'sleep 0.5; echo ended well; exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    let run = Run::new(&["launch", "-n", "1", "--", "sh", "-c", script], &[("RYZ_LAUNCH__GRACE", "1h")]);
    assert!(eventually(|| (run.unread()[0] > 0).then_some(())).is_some(), "not ready");
    let supervisor = run.supervisor();
    // As `timeout` does, whether or not the launcher sees both.
    for _ in 0..3 {
        run.signal(Signal::TERM);
        signal(supervisor, Signal::TERM);
    }
    let output = run.finish();
    assert_eq!(output.status.code(), Some(143));
    assert!(text(&output.stdout).contains("ended well"), "{}", text(&output.stdout));
}

#[test]
fn a_later_request_to_end_is_told_that_it_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let end = folder.path().join("end");
    let script = format!("trap '' TERM; echo ready; until [ -e {} ]; do sleep 0.1; done", end.display());
    let run = Run::new(&["launch", "-n", "1", "--", "sh", "-c", &script], &[("RYZ_LAUNCH__GRACE", "1h")]);
    assert!(eventually(|| (run.unread()[0] > 0).then_some(())).is_some(), "not ready");
    let is_told = || {
        run.signal(Signal::TERM);
        (run.unread()[1] > 0).then_some(())
    };
    assert!(eventually(is_told).is_some(), "it is silent");
    std::fs::write(&end, "").expect("written");
    let output = run.finish();
    assert_eq!(output.status.code(), Some(143));
    let stderr = text(&output.stderr);
    let told = "ryz: received SIGTERM; the ranks have been asked to end already, and are killed in ";
    assert!(stderr.starts_with(told) && stderr.contains(" s, or at once by SIGINT (Ctrl-C)"), "{stderr}");
}

#[test]
fn ranks_stop_and_continue_with_the_launcher() {
    let run = Run::launch(&["-n", "2"], "exec sleep 622");
    let ranks = run.wait_for(2, "sleep 622");
    let all = |wanted: fn(char) -> bool| {
        eventually(|| ranks.iter().all(|pid| state(*pid).is_some_and(wanted)).then_some(())).is_some()
    };
    run.signal(Signal::STOP);
    assert!(all(|state| state == 'T'), "they run on");
    run.signal(Signal::CONT);
    assert!(all(|state| state != 'T'), "they stay stopped");
    run.signal(Signal::TERM);
    let output = run.finish();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{stderr}");
    assert!(stderr.contains("the ranks are stopped with it (fg or bg continues them)"), "{stderr}");
    assert!(!stderr.contains("is unresponsive"), "{stderr}");
}

#[test]
fn a_terminal_that_stops_what_writes_in_the_background_stops_no_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let bench = format!("stty tostop; {RYZ} bench -n 2 --backend tcp --sizes 1KB --iters 5 --op all_reduce");
    let mut command = Command::new("script");
    command.args(["-qec", &bench]).arg(folder.path().join("screen"));
    let output = Run::of(command).finish();
    let screen = text(&output.stdout);
    assert!(output.status.success() && screen.contains("all values are right"), "{screen}");
}

#[test]
fn process_1_of_a_container_reaps_the_orphans_of_others() {
    let namespace = ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];
    if !Command::new("unshare").args(namespace).arg("true").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: user namespaces are not permitted here");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(namespace).arg(ryz()).args(["launch", "-n", "1", "--", "sleep", "623"]);
    let run = Run::of(command);
    run.wait_for(1, "sleep 623");
    let is_launcher = |pid: &u32| {
        let line = command_line(*pid);
        line.contains(" launch ") && !line.starts_with("unshare")
    };
    let launcher = run.family().into_iter().find(is_launcher).expect("a launcher").to_string();
    // A shell of somebody who enters the container; its child is an orphan when it ends.
    let entered = Command::new("nsenter")
        .args(["--target", &launcher, "--user", "--pid", "--preserve-credentials"])
        .args(["sh", "-c", "sleep 0.2 & exit 0"])
        .status();
    assert!(entered.is_ok_and(|status| status.success()), "nobody can enter the namespace");
    let children = || std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let count = || children().map_or(0, |list| list.split_ascii_whitespace().count());
    assert!(eventually(|| (count() == 2).then_some(())).is_some(), "the orphan did not come");
    assert!(eventually(|| (count() == 1).then_some(())).is_some(), "a zombie stays");
    run.signal(Signal::KILL);
}

#[test]
fn programs_are_not_killed_for_their_numbers_in_the_proc_of_another_pid_namespace() {
    let namespace = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];
    if !Command::new("unshare").args(namespace).arg("true").status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: user namespaces are not permitted here");
        return;
    }
    let script =
        "sleep 626 & \"$0\" launch -n 2 -- sh -c 'sleep 627 &' && kill $! && { wait $!; [ $? = 143 ]; }";
    let mut command = Command::new("unshare");
    command.args(namespace).args(["sh", "-c", script]).arg(ryz());
    let output = Run::of(command).finish();
    let stderr = text(&output.stderr);
    assert!(
        output.status.success() && stderr.contains("/proc is not mounted, or is that of another"),
        "{stderr}"
    );
    assert!(!stderr.contains("could not be killed"), "{stderr}");
}

#[test]
fn a_log_that_cannot_be_opened_is_the_launchers_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path");
    let log = folder.path().join("rank-0/stdout.log");
    std::fs::create_dir_all(&log).expect("a folder");
    let launch = || Run::new(&["launch", "-n", "1", "--log-dir", logs, "--", "true"], &[]).finish();
    let refused = |why: &str| {
        let output = launch();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let wanted = format!("error: --log-dir: cannot open {}: {why}", log.display());
        assert!(stderr.starts_with(&wanted) && !stderr.contains("`true`"), "{stderr}");
    };
    refused("Is a directory");
    std::fs::remove_dir(&log).expect("removed");
    make_pipe(&log);
    refused("it is a pipe without a reader, or a socket; start the reader first");
}

#[test]
fn a_log_that_is_a_pipe_holds_up_its_rank_and_not_the_launcher() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().to_str().expect("a path");
    let log = folder.path().join("rank-0/stdout.log");
    std::fs::create_dir(folder.path().join("rank-0")).expect("a folder");
    make_pipe(&log);
    // It reads only later, or never.
    let mut reader = std::fs::File::options().read(true).write(true).open(&log).expect("a reader");
    let flags = ["--world-size", "1", "--show-ranks", "none", "--log-dir", logs];
    let mut run = Run::launch(&flags, "exec yes");
    let is_full = || rustix::io::ioctl_fionread(&reader).is_ok_and(|bytes| bytes > 32 << 10);
    assert!(eventually(|| is_full().then_some(())).is_some(), "nothing is logged");
    run.signal(Signal::TERM);
    run.wait();
    assert!(eventually(|| run.family().is_empty().then_some(())).is_some(), "left: {:?}", run.family());

    let mut some = vec![0; 1 << 16];
    while rustix::io::ioctl_fionread(&reader).is_ok_and(|bytes| bytes > 0) {
        std::io::Read::read(&mut reader, &mut some).expect("read");
    }
    let run = Run::launch(&flags, "seq 100000");
    let read = std::thread::spawn(move || {
        let mut all = Vec::new();
        while !all.ends_with(b"\n99999\n100000\n") {
            let count = std::io::Read::read(&mut reader, &mut some).expect("read");
            all.extend_from_slice(&some[..count]);
        }
        all
    });
    assert!(run.finish().status.success());
    assert!(eventually(|| read.is_finished().then_some(())).is_some(), "the end was never logged");
    let logged = text(&read.join().expect("read"));
    assert_eq!((logged.lines().count(), logged.lines().next()), (100_000, Some("1")), "nothing is left out");
}

#[test]
fn orphans_that_start_others_and_end_at_once_do_not_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let (alive, stop) = (folder.path().join("alive"), folder.path().join("stop"));
    let chain = folder.path().join("chain");
    let link = format!("[ -e {} ] || {{ echo . >> {}; chain & }}", stop.display(), alive.display());
    std::fs::write(&chain, format!("chain() {{ {link}; }}; chain")).expect("written");
    let script = format!("(setsid sh {} </dev/null >/dev/null 2>&1 &); sleep 0.3", chain.display());
    let output = Run::launch(&["-n", "2"], &script).finish();
    let length = || std::fs::metadata(&alive).map_or(0, |metadata| metadata.len());
    let at_end = length();
    std::thread::sleep(Duration::from_millis(300));
    let later = length();
    std::fs::write(&stop, "").expect("written");
    assert!(output.status.success() && at_end > 0, "{}", text(&output.stderr));
    assert_eq!(at_end, later, "some live on");
}

#[test]
fn a_limit_on_the_size_of_files_leaves_sockets_and_is_told_of_a_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = folder.path().join("logs");
    let bench = "bench --op all_reduce --sizes 1KB --iters 5";
    let script = format!(
        "ulimit -f 8; exec {RYZ} launch -n 2 --backend tcp --log-dir {} -- sh -c '{RYZ} {bench} && seq 9999'",
        logs.display()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]);
    let output = Run::of(command).finish();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    assert!(stdout.contains(" tcp/") && stdout.contains("all values are right"), "{stdout}");
    assert!(stderr.contains("stdout.log: File too large (os error 27)"), "{stderr}");
}

#[test]
fn strangers_who_connect_all_the_time_keep_no_rank_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let [full, again] = ["full", "again"].map(|name| folder.path().join(name));
    let address = free_address();
    // So few descriptors that those of strangers and of ranks compete, also when the ranks are started a second time.
    let script = format!(
        "ulimit -n 64; exec {RYZ} launch -n 4 --max-restarts 1 --backend tcp --rendezvous {address} -- sh -c '\
         if [ -e {again} ]; then exec {RYZ} bench --op all_reduce --sizes 1KB --iters 5; fi; \
         until [ -e {full} ]; do sleep 0.1; done; touch {again}; exit 1'",
        full = full.display(),
        again = again.display(),
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", &script])
        .env("RYZ_RENDEZVOUS__HANDSHAKE_TIMEOUT", "1h")
        .env("RYZ_RENDEZVOUS__TIMEOUT", "5m");
    let run = Run::of(command);
    let connect = || TcpStream::connect(address).ok();
    let mut first = eventually(connect).expect("the job listens");
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    let flood = || {
        let mut idle = VecDeque::new();
        // A test that fails does not tell.
        while !is_over.load(Ordering::Relaxed) && began.elapsed() < LONG {
            idle.extend(connect());
            if idle.len() > 200 {
                idle.pop_front();
            }
        }
    };
    let output = std::thread::scope(|scope| {
        let _strangers = [scope.spawn(flood), scope.spawn(flood)];
        hung_up_on(&mut first);
        std::fs::write(&full, "").expect("written");
        let output = run.finish();
        is_over.store(true, Ordering::Relaxed);
        output
    });
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("all values are right"), "{stderr}");
}

#[test]
fn strangers_who_say_nothing_are_hung_up_on() {
    let address = free_address();
    let run = Run::new(
        &["launch", "-n", "1", "--rendezvous", &address.to_string(), "--", "sleep", "625"],
        &[("RYZ_RENDEZVOUS__HANDSHAKE_TIMEOUT", "500ms")],
    );
    run.wait_for(1, "sleep 625");
    hung_up_on(&mut TcpStream::connect(address).expect("connected"));
}

/// An address for a rendezvous.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port")
}

/// Waits until the other end closes the connection.
fn hung_up_on(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(LONG)).expect("set");
    match stream.read(&mut [0]) {
        Ok(read) => assert_eq!(read, 0, "it was answered"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "still open"),
    }
}

#[test]
fn a_job_is_found_in_a_folder_where_others_may_take_any_name() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o1777)).expect("opened");
    let runtime = [("XDG_RUNTIME_DIR", folder.path().to_str().expect("a path"))];
    let run = Run::new(&["launch", "-n", "1", "--", "sleep", "626"], &runtime);
    run.wait_for(1, "sleep 626");
    std::fs::create_dir(folder.path().join("ryz")).expect("a folder");
    let mut others = Vec::new();
    if rustix::process::geteuid().is_root() {
        let stranger = STRANGER.parse().ok();
        for name in ["ryz-1-x.sock", "ryz-9999999-x.sock"] {
            let path = folder.path().join(name);
            others.push(UnixListener::bind(&path).expect("a socket"));
            std::os::unix::fs::chown(&path, stranger, stranger).expect("given away by root");
        }
    } else {
        eprintln!("not tried: only root can make a socket of another user");
    }
    let status = || Run::new(&["status", "--format", "json"], &runtime).finish();
    let output = eventually(|| Some(status()).filter(|output| output.status.success())).expect("found");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((stdout.matches("\"job\":").count(), &*stderr), (1, ""), "{stdout}");
    for other in others {
        other.set_nonblocking(true).expect("set");
        assert!(other.accept().is_err(), "others were asked");
    }
}

#[test]
fn a_user_who_may_start_nothing_more_is_told_so() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become a user without processes");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("opened");
    let program = folder.path().join("ryz");
    std::fs::copy(ryz(), &program).expect("copied");
    let program = program.to_str().expect("a path");
    for processes in 2..14 {
        for arguments in [&["launch", "-n", "2", "--backend", "tcp"][..], &["doctor"]] {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"]);
            command.args(["prlimit", &format!("--nproc={processes}"), program]).args(arguments);
            command.env("HOME", "/nowhere").env("XDG_RUNTIME_DIR", "").current_dir(folder.path());
            let output = Run::of(command).finish();
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(!said.contains("panicked"), "{processes} processes, {arguments:?}: {said}");
        }
    }
}

#[test]
fn variables_that_are_not_text_are_refused_by_name() {
    for (name, command) in [("RYZ_JOB__NAME", "config show"), ("RYZ_SECRET_FILE", "check")] {
        let others = "RYZ_RENDEZVOUS=127.0.0.1:1 WORLD_SIZE=1";
        let script = format!("{others} {name}=$(printf '\\377') exec {RYZ} {command}");
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        let output = Run::of(command).finish();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(&format!("the environment variable {name} is not UTF-8 text")), "{stderr}");
    }
}
