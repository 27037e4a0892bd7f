//! Groups of this machine alone, tried in a process of their own, so that nothing which goes wrong there ends this one.

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::device::Surroundings;
use ryzanstein_process_group::{Memory, MemoryRendezvous, ProcessGroupManager, ReduceOp};
use serde::de::DeserializeOwned;

use crate::doctor::ProbeCommand;
use crate::doctor::facts::{Trial, TrialOutcome};
use crate::nccl_settings;
use crate::rendezvous::Environment;

/// How long ranks wait for each other.
const PATIENCE: Timeout = Timeout::from_secs(45);
/// How long the other process may take, the loading of libraries included.
const DEADLINE: Duration = Duration::from_secs(90);
/// Elements of the all-reduce that is timed: 100 KB of f32.
const ELEMENTS: usize = 25_000;
const CALLS: usize = 50;

/// Two ranks over TCP; and, where there are GPUs, a rank for each on the backend that `auto` takes.
pub(super) fn probe(
    config: &Config,
    environment: &Environment,
    helper: &ProbeCommand,
    gpus: usize,
) -> Vec<Trial> {
    let run = |name, backend: BackendChoice, ranks: usize| {
        let mut command = helper.command(&["all-reduce", backend.name(), &ranks.to_string()]);
        command.envs(nccl_settings::missing(config, environment));
        let outcome = bounded(command, DEADLINE).and_then(|text| answer(&text));
        Trial { name, ranks, outcome }
    };
    let mut trials = vec![run("all_reduce_tcp", BackendChoice::Tcp, 2)];
    if gpus > 0 {
        trials.push(run("all_reduce_gpu", BackendChoice::Auto, gpus));
    }
    trials
}

/// The answer among what NCCL, told to log, writes to the same place.
pub(super) fn answer<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let parsed = text.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    parsed.unwrap_or_else(|| Err(format!("it answered `{}`", text.trim())))
}

/// In the other process: brings a group of `ranks` threads up, which checks itself by value, and times an all-reduce.
///
/// # Errors
/// What the first rank that failed says.
pub fn try_all_reduce(
    config: &Config,
    environment: &Environment,
    backend: BackendChoice,
    ranks: usize,
) -> Result<TrialOutcome, String> {
    // The settings of this machine, without the layout, world size and addresses of a job.
    let mut own = Config { device: config.device.clone(), nccl: config.nccl.clone(), ..Config::default() };
    own.process_group.backend = backend;
    own.process_group.timeout = PATIENCE;
    own.rendezvous.timeout = PATIENCE;
    // As the ranks of a job look for libraries: what pip installed is found by these.
    let surroundings = Surroundings::from_variables(|name| environment.get(name).cloned());
    let threads: Vec<JoinHandle<_>> = MemoryRendezvous::new(ranks)
        .into_iter()
        .map(|rendezvous| {
            let (config, surroundings) = (own.clone(), surroundings.clone());
            std::thread::spawn(move || {
                one_rank(&config, &rendezvous, &surroundings).map_err(|error| error.to_string())
            })
        })
        .collect();
    let outcomes: Vec<Result<TrialOutcome, String>> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap_or_else(|_| Err("a rank panicked".into())))
        .collect();
    outcomes
        .into_iter()
        .reduce(|first, next| first.and_then(|outcome| next.map(|_| outcome)))
        .unwrap_or_else(|| Err("no ranks".into()))
}

fn one_rank(
    config: &Config,
    rendezvous: &MemoryRendezvous,
    surroundings: &Surroundings,
) -> Result<TrialOutcome, ryzanstein_process_group::Error> {
    let mut manager = ProcessGroupManager::initialize_with(config, rendezvous, surroundings)?;
    let ready_ms = manager.init_time().as_secs_f64() * 1e3;
    let (backend, reason) = (manager.backend().to_string(), manager.backend_reason().to_owned());
    let group = manager.world();
    let median_us = if group.memory() == Memory::Host { Some(timed(group)?) } else { None };
    manager.finalize()?;
    Ok(TrialOutcome { backend, reason, ready_ms, median_us })
}

/// The median of some all-reduces, in microseconds. That values are right the group has proved before it was handed over.
fn timed(group: &mut ryzanstein_process_group::ProcessGroup) -> ryzanstein_process_group::Result<f64> {
    let mut buffer = vec![0.0f32; ELEMENTS];
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let started = Instant::now();
        group.all_reduce(&mut buffer, ReduceOp::Sum)?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[CALLS / 2])
}

/// What a process writes to standard output before it ends well, within so long. It is killed when it takes longer.
pub(super) fn bounded(mut command: Command, longest: Duration) -> Result<String, String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| format!("it cannot be started: {error}"))?;
    let (out, err) = (gather(child.stdout.take()), gather(child.stderr.take()));
    let deadline = Instant::now() + longest;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => break Err(format!("nothing came of it within {} s", longest.as_secs())),
            Err(error) => break Err(error.to_string()),
        }
    };
    if status.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    let status = status?;
    if status.success() {
        return Ok(out);
    }
    let last = err.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it wrote nothing");
    Err(format!("it ended with {status}: {last}"))
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    use ryzanstein_config::DeviceConfig;
    use ryzanstein_process_group::device::Libraries;

    use super::*;

    #[test]
    fn two_ranks_over_tcp_come_up_and_are_timed() {
        let outcome = try_all_reduce(&Config::default(), &Environment::new(), BackendChoice::Tcp, 2);
        let outcome = outcome.expect("right values");
        assert_eq!(outcome.backend, "tcp");
        assert!(outcome.median_us.is_some_and(|median| median > 0.0));
    }

    /// A driver that has every function, and in which nothing happens.
    fn driver(folder: &Path) -> PathBuf {
        let names =
            include_str!("../../../../process_group/src/device/driver.rs").lines().filter_map(|line| {
                let (name, _) = line.trim().split_once('(')?;
                (name.starts_with("cu") && line.ends_with("-> i32;")).then_some(name)
            });
        let mut code = String::from("int cuDriverGetVersion(int *version) { *version = 12020; return 0; }\n");
        for name in names.filter(|name| *name != "cuDriverGetVersion") {
            let _ = writeln!(code, "int {name}(void) {{ return 0; }}");
        }
        let (source, library) = (folder.join("driver.c"), folder.join("libcuda.so.1"));
        std::fs::write(&source, code).expect("written");
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(built.is_ok_and(|status| status.success()), "what links this program links a library too");
        library
    }

    #[test]
    fn a_trial_looks_for_nccl_where_ranks_do() {
        let nothing = Libraries::find(&DeviceConfig::default(), &Surroundings::default());
        if nothing.nccl.is_ok() {
            // The loader knows one, and no other place is looked at.
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let packages = folder.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&packages).expect("made");
        let nccl = packages.join("libnccl.so.2");
        std::fs::write(&nccl, "no library").expect("written");
        let mut config = Config::default();
        config.device.cuda = Some(driver(folder.path()));
        if Libraries::find(&config.device, &Surroundings::default()).driver.is_err() {
            // No library can be opened from this folder.
            return;
        }
        let active = folder.path().to_str().expect("text").to_owned();
        let environment = Environment::from([("VIRTUAL_ENV".to_owned(), active)]);
        let outcome = try_all_reduce(&config, &environment, BackendChoice::Auto, 2).expect("over TCP");
        assert!(outcome.reason.contains(nccl.to_str().expect("text")), "{}", outcome.reason);
    }

    #[test]
    fn the_answer_is_found_among_lines_of_a_log() {
        let outcome = TrialOutcome { backend: "nccl".into(), ..TrialOutcome::default() };
        let line = serde_json::to_string(&Ok::<_, String>(outcome.clone())).expect("text");
        assert_eq!(answer(&format!("node0:1 NCCL INFO x\n{line}\nnode0:1 NCCL INFO y\n")), Ok(outcome));
        let failed = serde_json::to_string(&Err::<TrialOutcome, _>("why not")).expect("text");
        assert_eq!(answer::<TrialOutcome>(&failed), Err("why not".into()));
        assert!(answer::<TrialOutcome>("nonsense").is_err_and(|why| why.contains("nonsense")));
    }

    #[test]
    fn a_process_that_does_not_end_is_killed_at_its_deadline() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let error = bounded(command, Duration::from_millis(50)).expect_err("too long");
        assert!(error.contains("within"), "{error}");
    }

    #[test]
    fn a_process_that_fails_is_quoted() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo why not >&2; exit 3"]);
        let error = bounded(command, Duration::from_secs(20)).expect_err("failed");
        assert!(error.contains('3') && error.contains("why not"), "{error}");
    }
}
