//! Trial groups on this machine.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use ryzanstein_benches::measure::median;
use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::device::LibrarySearch;
use ryzanstein_process_group::{Memory, MemoryRendezvous, ProcessGroupManager, ReduceOp};

use super::process;
use crate::doctor::ProbeCommand;
use crate::doctor::facts::{Trial, TrialOutcome};
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::rendezvous::Environment;

/// Timeout of the ranks for each other.
const PATIENCE: Timeout = Timeout::from_secs(45);
/// Timeout of the probe's process, loading libraries included.
const DEADLINE: Duration = Duration::from_secs(90);
/// Number of elements of the timed all-reduce: 100 KB of f32.
const ELEMENTS: usize = 25_000;
const CALLS: usize = 50;

/// Tries two ranks on CPUs and, if there are GPUs, one rank per GPU on the backend that `auto` selects.
pub(super) fn probe(
    config: &Config,
    environment: &Environment,
    probe: &ProbeCommand,
    gpus: usize,
) -> Vec<Trial> {
    let run = |name, backend: BackendChoice, ranks: usize| {
        let mut command = probe.command(&["all-reduce", backend.name(), &ranks.to_string()]);
        command.envs(nccl_settings::missing(config, environment));
        let outcome = process::output(command, DEADLINE).and_then(|text| process::answer(&text));
        Trial { name, ranks, outcome }
    };
    let mut trials = vec![run("all_reduce_tcp", BackendChoice::Tcp, 2)];
    if gpus > 0 {
        trials.push(run("all_reduce_gpu", BackendChoice::Auto, gpus));
    }
    trials
}

/// Starts a group of `ranks` threads, which checks itself by value, and times an all-reduce. Runs in the probe's process.
///
/// # Errors
/// Returns the error of the first rank that failed.
pub fn try_all_reduce(
    config: &Config,
    environment: &Environment,
    backend: BackendChoice,
    ranks: usize,
) -> anyhow::Result<TrialOutcome> {
    // The job's settings, without its layout, world size and rendezvous.
    let mut own = Config {
        device: config.device.clone(),
        nccl: config.nccl.clone(),
        process_group: config.process_group.clone(),
        provenance: config.provenance.clone(),
        ..Config::default()
    };
    own.process_group.backend = backend;
    own.process_group.timeout = PATIENCE;
    own.process_group.self_check = true;
    own.rendezvous.timeout = PATIENCE;
    // Ranks of a job find libraries installed by pip through these variables.
    let search = LibrarySearch::from_variables(|name| environment.get(name).cloned());
    let start = |rendezvous| {
        let (config, search) = (own.clone(), search.clone());
        std::thread::Builder::new().spawn(move || one_rank(&config, &rendezvous, &search))
    };
    let threads: Vec<JoinHandle<_>> =
        MemoryRendezvous::new(ranks).into_iter().map(start).collect::<Result<_, _>>().map_err(|error| {
            anyhow!("no thread for a rank: {error}; raise `ulimit -u`, or the container's limit on processes")
        })?;
    let outcomes: Vec<anyhow::Result<TrialOutcome>> = threads
        .into_iter()
        .map(|thread| Ok(thread.join().map_err(|_| anyhow!("a rank panicked"))??))
        .collect();
    let all = outcomes.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    all.into_iter().next().context("a trial needs at least one rank")
}

fn one_rank(
    config: &Config,
    rendezvous: &MemoryRendezvous,
    search: &LibrarySearch,
) -> Result<TrialOutcome, ryzanstein_process_group::Error> {
    let mut manager = ProcessGroupManager::initialize_with(config, rendezvous, search)?;
    let ready_ms = manager.init_time().as_secs_f64() * 1e3;
    let (backend, reason) = (manager.backend().to_string(), manager.backend_reason().to_owned());
    let group = manager.world();
    let paths = group.describe_paths().into_iter().map(|(path, taken)| (path.to_string(), taken)).collect();
    let median_us = if group.memory() == Memory::Host { Some(timed(group)?) } else { None };
    manager.finalize()?;
    Ok(TrialOutcome { backend, reason, ready_ms, paths, median_us })
}

/// Returns the median of [`CALLS`] all-reduces, in microseconds. The group's self-check has compared values already.
fn timed(group: &mut ryzanstein_process_group::ProcessGroup) -> ryzanstein_process_group::Result<f64> {
    let mut buffer = vec![0.0f32; ELEMENTS];
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let started = Instant::now();
        group.all_reduce(&mut buffer, ReduceOp::Sum)?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(times))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use ryzanstein_config::{DeviceConfig, ProcessGroupConfig, TuningChoice};
    use ryzanstein_process_group::device::Libraries;

    use super::*;

    #[test]
    fn two_ranks_over_tcp_come_up_and_are_timed() {
        let outcome = try_all_reduce(&Config::default(), &Environment::new(), BackendChoice::Tcp, 2);
        let outcome = outcome.expect("right values");
        assert_eq!(outcome.backend, "tcp");
        assert!(outcome.median_us.is_some_and(|median| median > 0.0));
    }

    #[test]
    fn settings_of_the_job_that_end_its_ranks_end_those_of_the_trial() {
        type Change = fn(&mut ProcessGroupConfig);
        let cases: [(Change, &str); 4] = [
            (|group| group.tcp.interface = Some("nosuch0".into()), "nosuch0"),
            (|group| group.tcp.bind = Some([192, 0, 2, 1].into()), "192.0.2.1"),
            (|group| group.tcp.algorithm = "nope".into(), "nope"),
            (|group| group.tuning = TuningChoice::File("/nonexistent.json".into()), "/nonexistent.json"),
        ];
        for (change, named) in cases {
            let mut config = Config::default();
            change(&mut config.process_group);
            let outcome = try_all_reduce(&config, &Environment::new(), BackendChoice::Tcp, 2);
            let error = outcome.expect_err("no group comes up").to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    /// Builds a driver library whose functions do nothing and succeed.
    fn driver(folder: &Path) -> PathBuf {
        let functions = concat!(env!("CARGO_MANIFEST_DIR"), "/../../process_group/src/device/driver.rs");
        let functions = std::fs::read_to_string(functions).expect("the list of the driver's functions");
        let names = functions.lines().filter_map(|line| {
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
        let nothing = Libraries::find(&DeviceConfig::default(), &LibrarySearch::default());
        if nothing.nccl.is_ok() {
            // The loader finds NCCL, and no other place is searched.
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let packages = folder.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&packages).expect("made");
        let nccl = packages.join("libnccl.so.2");
        std::fs::write(&nccl, "no library").expect("written");
        let mut config = Config::default();
        config.device.cuda = Some(driver(folder.path()));
        if Libraries::find(&config.device, &LibrarySearch::default()).driver.is_err() {
            // No library can be opened from this folder.
            return;
        }
        let active = folder.path().to_str().expect("text").to_owned();
        let environment = Environment::from([("VIRTUAL_ENV".to_owned(), active)]);
        let outcome = try_all_reduce(&config, &environment, BackendChoice::Auto, 2).expect("over TCP");
        assert!(outcome.reason.contains(nccl.to_str().expect("text")), "{}", outcome.reason);
    }
}
