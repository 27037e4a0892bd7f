//! Provokes each error that is not documented elsewhere, and has its real text explained. Errors that take a defect of hardware
//! or of the kernel are built from their types.

use std::fmt::Display;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use ryzanstein_config::BackendChoice;
use ryzanstein_orchestrator::catalogue::{entries, scan};
use ryzanstein_orchestrator::prelude::*;
use ryzanstein_orchestrator::process_group::{
    BackendKind, Candidate, Capability, Cpus, Error, MemoryRendezvous, ProcessGroup, ReduceOp,
    Rendezvous as _,
};
use ryzanstein_orchestrator::supervisor::ClosingReport;
use ryzanstein_tests::fixtures;
use tempfile::TempDir;

use crate::launcher::{ENDLESS, SECONDS, at_work};
use crate::support::{Run, eventually, text};

const RYZ: &str = env!("CARGO_BIN_EXE_ryz");

/// An error by its id, with what provokes it and returns all that was said.
type Provocation = (&'static str, fn() -> String);

const PROVOKED: &[Provocation] = &[
    ("unknown-setting", || ryz("config show", &[("RYZ_PROCESS_GROUP__TIMEUOT", "1s")])),
    ("bad-value", || ryz("config show", &[("RYZ_PROCESS_GROUP__TIMEOUT", "30")])),
    ("untrusted-file", || {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("ryzanstein.toml");
        std::fs::write(&file, "").expect("written");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).expect("chmod");
        ryz(&format!("config show --config {}", file.display()), &[])
    }),
    ("no-settings-file", || ryz("config show --config none.toml", &[])),
    ("secret-not-handed-down", || {
        ryz("check", &[("RYZ_RENDEZVOUS", "127.0.0.1:1"), ("RYZ_SECRET_FD", "999"), ("WORLD_SIZE", "1")])
    }),
    ("killed", || launched("kill -KILL $$")),
    ("bus-error", || launched("kill -BUS $$")),
    ("crashed", || launched("kill -SEGV $$")),
    ("not-killed", not_killed),
    ("log-incomplete", log_incomplete),
    ("model-does-not-fit-settings", || generate("", |folder| change(folder, "vocab_size", 104.into()))),
    ("model-has-more", || generate("-v", |folder| change(folder, "num_hidden_layers", 1.into()))),
    ("rendezvous-port-taken", || {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("an address");
        ryz(&format!("launch -n 1 --rendezvous {address} -- true"), &[])
    }),
    ("wrong-secret", || {
        let (_folder, path) = secret();
        launched(&format!("unset RYZ_SECRET_FD; RYZ_SECRET_FILE={path} exec {RYZ} check"))
    }),
    ("wrong-version", || {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = server.local_addr().expect("an address").to_string();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                server.set_nonblocking(true).expect("set");
                let (mut stream, _) = eventually(|| server.accept().ok()).expect("a client");
                let _ = stream.read(&mut [0; 40]);
                let _ = stream.write_all(&[b'x'; 100]);
            });
            joining(&address, "20s")
        })
    }),
    ("rendezvous-silent", || {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        joining(&server.local_addr().expect("an address").to_string(), "1s")
    }),
    ("rendezvous-unreachable", || joining(&closed(), "300ms")),
    ("secret-needed", || master("192.0.2.1", &[])),
    ("secret-not-left", || {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path().to_str().expect("a path");
        master("127.0.0.1", &[("XDG_RUNTIME_DIR", here), ("RYZ_RENDEZVOUS__TIMEOUT", "300ms")])
    }),
    ("join-timed-out", || rank_1("exec sleep 609")),
    ("ended-without-joining", || rank_1("exit 0")),
    ("ranks-unreachable", ranks_unreachable),
    ("backend-not-usable", || {
        ryz("check", &[("RYZ_PROCESS_GROUP__BACKEND", "nccl"), ("CUDA_VISIBLE_DEVICES", "")])
    }),
    ("calls-differ", calls_differ),
    ("call-timed-out", call_timed_out),
    ("call-too-slow", || {
        let (what, waited) = ("all_reduce(sum) of 4 f32".into(), Duration::from_secs(300));
        Error::Timeout { what, waited, missing: Vec::new() }.to_string()
    }),
    ("lost-rank", || {
        let (run, rank) = at_work(&[], ENDLESS);
        rustix::process::kill_process(rank, Signal::KILL).expect("killed");
        text(&run.finish().stderr)
    }),
    ("rank-stopped", || {
        let (run, rank) = at_work(&[], SECONDS);
        rustix::process::kill_process(rank, Signal::STOP).expect("stopped");
        assert!(eventually(|| (run.unread()[1] > 0).then_some(())).is_some(), "not told");
        rustix::process::kill_process(rank, Signal::CONT).expect("continued");
        text(&run.finish().stderr)
    }),
    ("self-check-failed", || {
        let (path, reason) = ("nccl".into(), "element 3 is 5, expected 6".into());
        Error::SelfCheck { path, reason }.to_string()
    }),
    ("slow-call", || {
        ryz(
            "launch -n 2 --backend tcp -- ryz bench --sizes 1KB --iters 50",
            &[("RYZ_PROFILE__SLOW_CALL", "1us")],
        )
    }),
    ("address-in-use", || {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        said(TcpListener::bind(taken.local_addr().expect("an address")))
    }),
    ("address-not-here", || said(TcpListener::bind("192.0.2.1:0"))),
    ("connection-refused", || said(TcpStream::connect(closed()))),
    ("name-not-known", || said(("no-such-host.invalid", 1).to_socket_addrs())),
    ("too-many-open-files", || shell(&format!("ulimit -n 10; {RYZ} launch -n 2 -- true"))),
    ("too-many-threads", || {
        // More than there are addresses.
        format!(
            "failed to spawn thread: {}",
            said(std::thread::Builder::new().stack_size(1 << 47).spawn(|| ()))
        )
    }),
    ("no-memory", || said(Vec::<u8>::new().try_reserve(1 << 46))),
    ("disk-full", || said(std::fs::write("/dev/full", "text"))),
    ("library-not-found", || shell("LD_PRELOAD=libnothing.so.1 cat /dev/null")),
];

#[test]
fn errors_that_are_not_documented_are_provoked_and_explained_by_their_entries() {
    let expected: Vec<&str> =
        entries().filter(|entry| entry.source.is_none()).map(|entry| &*entry.id).collect();
    for id in &expected {
        assert!(PROVOKED.iter().any(|(provoked, _)| provoked == id), "nothing provokes {id}");
    }
    assert_eq!(PROVOKED.len(), expected.len(), "something else is provoked");
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((id, provoke)) = PROVOKED.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let said = provoke();
                    let found = scan(said.as_bytes()).expect("memory");
                    if !found.iter().any(|found| found.entry.id == *id) {
                        let found: Vec<_> = found.iter().map(|found| &found.entry.id).collect();
                        failures.lock().expect("kept").push(format!("{id} is not in {found:?} of:\n{said}"));
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("kept");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// All that a command says, whose program may be `ryz` too.
fn ryz(arguments: &str, environment: &[(&str, &str)]) -> String {
    let arguments: Vec<&str> =
        arguments.split_whitespace().map(|word| if word == "ryz" { RYZ } else { word }).collect();
    let output = Run::new(&arguments, environment).finish();
    text(&output.stdout) + &text(&output.stderr)
}

fn shell(script: &str) -> String {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    text(&Run::of(command).finish().stderr)
}

/// One rank runs this script.
fn launched(script: &str) -> String {
    text(&Run::launch(&["-n", "1", "--backend", "tcp"], script).finish().stderr)
}

/// Two ranks check each other, of which rank 1 runs this script first.
fn rank_1(script: &str) -> String {
    let script = format!("[ $RANK = 1 ] && {script}; exec {RYZ} check");
    text(&Run::launch(&["-n", "2", "--backend", "tcp", "--timeout", "3"], &script).finish().stderr)
}

/// The error's text.
fn said<T>(outcome: Result<T, impl Display>) -> String {
    outcome.map(|_| ()).expect_err("refused").to_string()
}

/// An address where nothing listens.
fn closed() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

/// A job's secret, in a folder that lives as long as this value.
fn secret() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    std::fs::write(&path, [7; 32]).expect("written");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).expect("chmod");
    let name = path.to_str().expect("a path").to_owned();
    (folder, name)
}

/// A rank that joins at this address.
fn joining(address: &str, timeout: &str) -> String {
    let (_folder, path) = secret();
    let environment = [
        ("RYZ_RENDEZVOUS", address),
        ("RYZ_SECRET_FILE", &path),
        ("WORLD_SIZE", "1"),
        ("RYZ_RENDEZVOUS__TIMEOUT", timeout),
        ("RYZ_PROCESS_GROUP__BACKEND", "tcp"),
    ];
    ryz("check", &environment)
}

/// Rank 1 of another launcher.
fn master(address: &str, more: &[(&str, &str)]) -> String {
    let environment = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", address),
        ("MASTER_PORT", "1"),
        ("RYZ_PROCESS_GROUP__BACKEND", "tcp"),
    ];
    ryz("check", &[&environment, more].concat())
}

/// One token of a small model, whose folder is changed before.
fn generate(flags: &str, change: fn(&Path)) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(fixtures::folder("llama-mha")).expect("a model") {
        let entry = entry.expect("an entry");
        let source = entry.path().canonicalize().expect("a path");
        symlink(source, folder.path().join(entry.file_name())).expect("a link");
    }
    change(folder.path());
    let model = folder.path().display();
    let input = if flags.contains("--prompt") { "" } else { "--token-ids 1" };
    ryz(&format!("generate --backend tcp --max-new-tokens 1 --model {model} {input} {flags}"), &[])
}

fn remove(folder: &Path, file: &str) {
    std::fs::remove_file(folder.join(file)).expect("removed");
}

fn replace(folder: &Path, file: &str, content: &str) {
    remove(folder, file);
    std::fs::write(folder.join(file), content).expect("written");
}

/// Gives a key of `config.json` another value.
fn change(folder: &Path, key: &str, value: serde_json::Value) {
    let config = std::fs::read(folder.join("config.json")).expect("settings");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    config[key] = value;
    replace(folder, "config.json", &config.to_string());
}

fn not_killed() -> String {
    let report = ClosingReport {
        status: "failed",
        epoch: 1,
        first_failure: None,
        cut_off: None,
        ranks: Vec::new(),
        world_size: 1,
        exit_code: 1,
        interrupted: None,
        unwritten: Vec::new(),
        left_over: vec!["pid 4711 (python3, state D)".into()],
        output_lost: false,
    };
    report.to_string()
}

fn log_incomplete() -> String {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("rank-0")).expect("a folder");
    symlink("/dev/full", folder.path().join("rank-0/stdout.log")).expect("a link");
    let logs = folder.path().to_str().expect("a path");
    text(&Run::launch(&["-n", "1", "--log-dir", logs], "echo one; echo two").finish().stderr)
}

fn calls_differ() -> String {
    let call = |mut group: ProcessGroup, length| {
        let mut data = vec![1.0f32; length];
        said(group.all_reduce(&mut data, ReduceOp::Sum))
    };
    let [zero, one] = <[ProcessGroup; 2]>::try_from(ProcessGroup::loopback(2)).expect("two ranks");
    std::thread::scope(|scope| {
        scope.spawn(|| call(one, 5));
        call(zero, 4)
    })
}

fn call_timed_out() -> String {
    let mut ranks = ProcessGroup::loopback(2);
    let _absent = ranks.pop();
    ranks[0].set_timeout(Duration::from_millis(100));
    said(ranks[0].barrier())
}

/// Rank 1 announces an address at which nobody answers, and connects to nobody itself.
fn ranks_unreachable() -> String {
    let [zero, one] = <[MemoryRendezvous; 2]>::try_from(MemoryRendezvous::new(2)).expect("two ranks");
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let candidate = Candidate {
                host: "node1".into(),
                pid: 1,
                cpus: Cpus::default(),
                data_address: Some(address),
                wanted: BackendChoice::Tcp,
                capabilities: vec![Capability::usable(BackendKind::Tcp)],
            };
            one.join(candidate, Instant::now() + Duration::from_secs(120)).map(|_| ()).expect("joined");
        });
        let builder = Orchestrator::builder()
            .set("process_group.backend", "tcp")
            .set("rendezvous.timeout", "1s")
            .set("process_group.timeout", "1s");
        said(builder.rendezvous(zero).initialize())
    })
}
