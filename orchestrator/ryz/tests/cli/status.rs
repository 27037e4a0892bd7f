//! Reports of `ryz status` and the launcher on ranks that run: stuck, stopped, without heartbeats.

use std::io::{Read as _, Write as _};
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use ryzanstein_config::Config;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::process_group::DType;
use ryzanstein_orchestrator::process_group::ReduceOp;
use ryzanstein_orchestrator::process_group::device::DeviceBuffer;
use ryzanstein_orchestrator::rendezvous::Environment;
use ryzanstein_orchestrator::telemetry::{self, Origin};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Run, eventually, report, text};

/// Set for the ranks that are a test itself in other processes: where they wait for files.
const FOLDER: &str = "RANKS_WAIT_IN";

/// A folder for sockets that no other test uses.
fn private() -> (TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("a path").to_owned();
    (folder, path)
}

fn status(runtime: &str, arguments: &[&str]) -> std::process::Output {
    Run::new(&[&["status"], arguments].concat(), &[("XDG_RUNTIME_DIR", runtime)]).finish()
}

/// The only job; none before it serves its state.
fn job(runtime: &str) -> Option<Value> {
    let output = status(runtime, &["--format", "json"]);
    output.status.success().then(|| report(&output)["jobs"][0].clone())
}

/// Asks until the job is as wanted.
fn job_with(runtime: &str, is_wanted: impl Fn(&Value) -> bool) -> Value {
    let mut last = None;
    let found = eventually(|| {
        last = job(runtime);
        last.clone().filter(|job| is_wanted(job))
    });
    found.unwrap_or_else(|| panic!("the job never got there: {last:?}"))
}

fn pid(rank: &Value) -> Pid {
    Pid::from_raw(rank["pid"].as_u64().expect("a pid") as i32).expect("a pid")
}

/// All ranks meet in a barrier. Then rank 1 does something else until `go` is there, while the others wait for it.
fn rank_that_is_late(environment: &Environment, folder: &Path) {
    let sources = ryzanstein_config::Sources {
        environment: environment.clone().into_iter().collect(),
        ..ryzanstein_config::Sources::default()
    };
    let config = Config::load(&sources).expect("settings");
    let wait_for =
        |file: &str| eventually(|| folder.join(file).exists().then_some(())).expect("told to go on");
    let mut orchestrator = Orchestrator::initialize(&config, environment).expect("joined");
    let manager = orchestrator.manager();
    manager.world().barrier().expect("all are here");
    if manager.rank().0 == 1 {
        wait_for("go");
    }
    manager.world().all_reduce(&mut [1.0f32; 4], ReduceOp::Sum).expect("rank 1 comes");
    wait_for("end");
    orchestrator.finalize().expect("left");
}

#[test]
fn a_rank_stuck_outside_collectives_makes_no_progress_until_it_continues() {
    let environment: Environment = std::env::vars().collect();
    if let Some(folder) = environment.get(FOLDER) {
        return rank_that_is_late(&environment, folder.as_ref());
    }
    let (folder, runtime) = private();
    let program = std::env::current_exe().expect("this program");
    let name = "status::a_rank_stuck_outside_collectives_makes_no_progress_until_it_continues";
    let rank = [program.to_str().expect("a path"), "--exact", name, "--nocapture"];
    let variables = [(FOLDER, &*runtime), ("XDG_RUNTIME_DIR", &*runtime)];
    let run = Run::new(&[&["launch", "-n", "3", "--backend", "tcp", "--"][..], &rank].concat(), &variables);

    let stuck = job_with(&runtime, |job| job["ranks"][1]["state"] == "no_progress");
    let missed = &stuck["ranks"][1]["no_progress"];
    assert_eq!(
        (&missed["group"], &missed["operation"], &missed["waiting"]),
        (&"world".into(), &"all_reduce".into(), &2.into())
    );
    let call = missed["call"].as_u64().expect("a number");
    for rank in [0, 2] {
        let rank = &stuck["ranks"][rank];
        assert_eq!(rank["state"], "running", "{rank}");
        assert_eq!(rank["groups"][0]["current"]["number"], call, "{rank}");
        assert!(rank["resident_bytes"].as_u64() > Some(0) && rank["gpu"].is_null(), "{rank}");
    }
    assert_eq!(stuck["ranks"][1]["groups"][0]["begun"], call - 1);

    std::fs::write(folder.path().join("go"), "").expect("written");
    let going_on =
        |job: &Value| job["ranks"][1]["state"] == "running" && job["ranks"][1]["groups"][0]["ended"] == call;
    job_with(&runtime, going_on);
    std::fs::write(folder.path().join("end"), "").expect("written");
    let output = run.finish();
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let told = format!(
        "\nryz: rank 1 makes no progress: it has not begun call {call} (all_reduce) of group 'world', in which 2 ranks have \
         waited for "
    );
    let stderr = format!("\n{stderr}");
    assert_eq!(stderr.matches(&told).count(), 1, "{stderr}");
    let continues =
        format!("\nryz: rank 1 continues: it has begun call {call} (all_reduce) of group 'world'\n");
    assert!(stderr.contains(&continues), "{stderr}");
    assert!(!stderr.contains("silent") && stderr.matches("makes no progress").count() == 1, "{stderr}");
}

#[test]
fn programs_without_heartbeats_are_shown_and_never_silent_and_a_stopped_one_is_stopped() {
    let (_folder, runtime) = private();
    let launch = ["launch", "-n", "2", "--", "sh", "-c", "exec sleep 600"];
    let run = Run::new(&launch, &[("XDG_RUNTIME_DIR", &runtime), ("RYZ_LAUNCH__GRACE", "300ms")]);
    let first = job_with(&runtime, |job| job["ranks"][1]["state"] == "running");
    assert_eq!(
        (&first["world_size"], &first["epoch"], &first["name"]),
        (&2.into(), &1.into(), &"ryzanstein".into())
    );
    let rank = &first["ranks"][1];
    assert!(["heartbeat_age_s", "groups", "gpu"].iter().all(|key| rank[key].is_null()), "{rank}");

    kill_process(pid(rank), Signal::STOP).expect("stopped");
    let stopped = job_with(&runtime, |job| job["ranks"][1]["state"] == "stopped");
    assert_eq!(
        (&stopped["ranks"][1]["process_state"], &stopped["ranks"][0]["state"]),
        (&"T".into(), &"running".into())
    );
    let table = text(&status(&runtime, &[]).stdout);
    assert!(table.contains("rank 1 is stopped by a signal; kill -CONT "), "{table}");
    kill_process(pid(rank), Signal::CONT).expect("continued");
    // Longer than it takes to call a rank that has sent heartbeats silent.
    let later = job_with(&runtime, |job| job["uptime_s"].as_f64() > Some(4.5));
    assert_eq!(
        (&later["ranks"][0]["state"], &later["ranks"][1]["state"]),
        (&"running".into(), &"running".into())
    );

    run.signal(Signal::TERM);
    let output = run.finish();
    assert_eq!(output.status.code(), Some(143));
    assert!(!text(&output.stderr).contains("silent"), "{}", text(&output.stderr));
    let left = std::fs::read_dir(&runtime).expect("the folder").count();
    assert_eq!(left, 0, "the socket is removed");
}

#[test]
fn without_a_job_the_error_says_where_it_looked_and_what_to_do() {
    let (_folder, runtime) = private();
    let output = status(&runtime, &[]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("no job of user ") && stderr.contains(&runtime), "{stderr}");
    assert!(stderr.contains("`ryz launch`"), "{stderr}");
    assert_eq!(status(&runtime, &["no-such-job"]).status.code(), Some(1));
}

#[test]
fn what_a_killed_launcher_left_is_removed_and_no_job() {
    let (_folder, runtime) = private();
    let launch = ["launch", "-n", "1", "--", "sleep", "600"];
    let run = Run::new(&launch, &[("XDG_RUNTIME_DIR", &runtime)]);
    job_with(&runtime, |job| job["ranks"][0]["state"] == "running");
    let supervisor = Pid::from_raw(run.supervisor() as i32).expect("a pid");
    kill_process(supervisor, Signal::KILL).expect("killed");
    run.finish();
    let sockets = || std::fs::read_dir(&runtime).expect("the folder").count();
    assert_eq!(sockets(), 1, "nobody could remove it");
    assert_eq!(status(&runtime, &[]).status.code(), Some(1));
    assert_eq!(sockets(), 0);
}

#[test]
fn several_jobs_are_listed_and_each_is_shown_by_its_name() {
    let (_folder, runtime) = private();
    let start = |name: &str, ranks: &str| {
        let variables =
            [("XDG_RUNTIME_DIR", &*runtime), ("RYZ_JOB__NAME", name), ("RYZ_LAUNCH__GRACE", "300ms")];
        Run::new(&["launch", "-n", ranks, "--", "sleep", "600"], &variables)
    };
    let _runs = [start("left", "1"), start("right", "2")];
    let listed = eventually(|| {
        let list = text(&status(&runtime, &[]).stdout);
        (list.contains("left") && list.contains("right")).then_some(list)
    });
    let list = listed.expect("both are listed");
    assert!(list.starts_with("job ") && list.lines().count() == 4, "{list}");
    let right = text(&status(&runtime, &["right"]).stdout);
    assert!(right.starts_with("job right (") && right.contains("2 ranks"), "{right}");
}

/// Bytes that each rank on a GPU holds.
const HELD: u64 = 256 << 20;

/// Each rank holds memory of its GPU and waits for `end`.
fn rank_with_a_gpu(environment: &Environment, folder: &Path) {
    let sources = ryzanstein_config::Sources {
        environment: environment.clone().into_iter().collect(),
        ..ryzanstein_config::Sources::default()
    };
    let config = Config::load(&sources).expect("settings");
    let local_rank = environment["LOCAL_RANK"].parse().expect("a number");
    telemetry::serve_metrics(&config.metrics, &Origin::of_rank(&config, environment), local_rank)
        .expect("a server of metrics");
    let mut orchestrator = Orchestrator::initialize(&config, environment).expect("joined");
    let device = orchestrator.manager().world().device().expect("a GPU").clone();
    let _held = DeviceBuffer::new(&device, DType::U8, HELD as usize).expect("memory");
    eventually(|| folder.join("end").exists().then_some(())).expect("told to end");
    orchestrator.finalize().expect("left");
}

/// Returns the answer of a server of metrics.
fn metrics(port: u16) -> Option<String> {
    let mut connection = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    connection.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut text = String::new();
    connection.read_to_string(&mut text).ok()?;
    Some(text)
}

#[test]
#[ignore = "needs 2 GPUs"]
fn status_and_metrics_tell_the_memory_and_the_health_of_each_gpu() {
    let environment: Environment = std::env::vars().collect();
    if let Some(folder) = environment.get(FOLDER) {
        return rank_with_a_gpu(&environment, folder.as_ref());
    }
    let (folder, runtime) = private();
    let program = std::env::current_exe().expect("this program");
    let name = "status::status_and_metrics_tell_the_memory_and_the_health_of_each_gpu";
    let rank = [program.to_str().expect("a path"), "--exact", name, "--ignored", "--nocapture"];
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.expect("a free port").port();
    let address = format!("127.0.0.1:{port}");
    let variables = [(FOLDER, &*runtime), ("XDG_RUNTIME_DIR", &*runtime)];
    let launch = ["launch", "-n", "2", "--backend", "nccl", "--metrics-addr", &address, "--"];
    let run = Run::new(&[&launch[..], &rank].concat(), &variables);
    let has_memory = |rank: &Value| {
        rank["gpu_memory"]["used_bytes"].as_u64() >= Some(HELD)
            && rank["gpu"]["memory_used_bytes"].as_u64() >= Some(HELD)
    };
    let job = job_with(&runtime, |job| (0..2).all(|rank| has_memory(&job["ranks"][rank])));
    let ranks = [&job["ranks"][0], &job["ranks"][1]];
    assert_ne!(ranks[0]["gpu"]["uuid"], ranks[1]["gpu"]["uuid"], "{job}");
    for rank in ranks {
        let (gpu, memory) = (&rank["gpu"], &rank["gpu_memory"]);
        assert_eq!(gpu["lost"], false, "{rank}");
        assert!(
            gpu["temperature"].as_u64() > Some(0) && gpu["memory_total_bytes"].as_u64() > Some(1 << 30),
            "{rank}"
        );
        assert!(memory["limit_bytes"].as_u64() > memory["used_bytes"].as_u64(), "{rank}");
    }
    let table = text(&status(&runtime, &[]).stdout);
    assert!(table.contains(" of ") && !table.contains("lost"), "{table}");
    for rank in 0..2 {
        let scraped = metrics(port + rank).expect("a server of metrics");
        let value = |name: &str| {
            let line = scraped.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        };
        assert!(value("ryz_gpu_used_bytes") >= Some(HELD as f64), "{scraped}");
        assert_eq!(value("ryz_gpu_lost"), Some(0.0), "{scraped}");
        assert!(value("ryz_gpu_temperature_celsius") > Some(0.0), "{scraped}");
    }
    std::fs::write(folder.path().join("end"), "").expect("written");
    let output = run.finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn each_rank_gets_processors_of_its_own_and_status_shows_them() {
    let cpus = |bind: &str| {
        let (_folder, runtime) = private();
        let launch = ["launch", "-n", "2", "--backend", "tcp", "--bind", bind, "--", "sleep", "600"];
        let _run = Run::new(&launch, &[("XDG_RUNTIME_DIR", &runtime)]);
        let job = job_with(&runtime, |job| job["ranks"][1]["cpus"].is_string());
        [0, 1].map(|rank| job["ranks"][rank]["cpus"].as_str().expect("a list").to_owned())
    };
    let [first, second] = cpus("none");
    assert_eq!(first, second);
    let [first, second] = cpus("auto");
    let allowed = rustix::thread::sched_getaffinity(None).expect("this thread's processors").count() as usize;
    let usable = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // On one processor, or if a cgroup limits their time, they share all.
    assert_eq!(first != second, allowed > 1 && usable == allowed, "{first} and {second} of {allowed}");
}
