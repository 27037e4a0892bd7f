//! The common part of every command that runs as a rank of a job.

use std::os::unix::process::CommandExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use ryzanstein_config::{BackendChoice, Config};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::rendezvous::{Environment, placement};
use ryzanstein_orchestrator::telemetry;
use ryzanstein_orchestrator::telemetry::Origin;
use ryzanstein_process_group::{FlightRecorder, panic_message};
use tokio::signal::unix::{SignalKind, signal};

use crate::command::settings;

/// True once the launcher knows why this rank fails.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Returns true if the launcher tells the user why this rank fails: a command that started its own ranks fails once, not once a rank.
pub(crate) fn is_told_by_the_launcher() -> bool {
    REPORTED.load(Ordering::Relaxed) && std::env::var_os("RYZ_DIRECT").is_some()
}

/// Sets up logging and metrics, joins, runs `job`, and leaves. Reports a failure to the launcher.
pub(crate) fn run(
    config: &Config,
    job: impl FnOnce(&mut Orchestrator) -> anyhow::Result<()>,
) -> anyhow::Result<i32> {
    let environment = settings::environment();
    with_nccl_settings(config, &environment)?;
    let translated = placement::translated(config, &environment)?;
    let number = |name: &str| translated.get(name).and_then(|text| text.parse::<u32>().ok());
    let origin = Origin::of_rank(config, &translated);
    // Ends after all other spans of the job.
    let _spans = telemetry::start(config, &origin, &environment)?;
    let _job = tracing::info_span!("job").entered();
    let local_rank = u16::try_from(number("LOCAL_RANK").unwrap_or(0)).unwrap_or(0);
    telemetry::serve_metrics(&config.metrics, &origin, local_rank)?;
    let recorder = write_record_on_signal().context("cannot wait for SIGUSR1")?;
    let mut orchestrator = Orchestrator::initialize(config, &environment)?;
    let _ = recorder.set(orchestrator.manager().flight_recorder());
    let outcome = catch_unwind(AssertUnwindSafe(|| job(&mut orchestrator))).unwrap_or_else(|panic| {
        orchestrator.report_panic(panic_message(&*panic));
        resume_unwind(panic)
    });
    match outcome {
        Ok(()) => {
            orchestrator.finalize()?;
            Ok(0)
        }
        Err(error) => {
            let is_reported = orchestrator.report(error.as_ref());
            REPORTED.store(is_reported, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// Writes this rank's flight record whenever SIGUSR1 arrives, on a separate thread, because the calls of the rank may be
/// blocked. The recorder is available once the rank has joined.
fn write_record_on_signal() -> std::io::Result<Arc<OnceLock<FlightRecorder>>> {
    let recorder = Arc::new(OnceLock::<FlightRecorder>::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        signal(SignalKind::user_defined1())?
    };
    let joined = Arc::clone(&recorder);
    std::thread::Builder::new().name("ryz-flight-record".into()).spawn(move || {
        runtime.block_on(async {
            while signals.recv().await.is_some() {
                write_record(joined.get());
            }
        });
    })?;
    Ok(recorder)
}

fn write_record(recorder: Option<&FlightRecorder>) {
    let Some(recorder) = recorder else {
        return tracing::warn!("SIGUSR1: no flight record is written, because this rank has not joined yet");
    };
    let Some(folder) = recorder.folder() else {
        return tracing::warn!("SIGUSR1: no flight record is written, because profile.trace_dir is unset");
    };
    match recorder.write(folder) {
        Ok(path) => tracing::info!(path = %path.display(), "wrote the flight record"),
        Err(error) => tracing::warn!(%error, "no flight record"),
    }
}

/// Executes this same command again, in this process, if its environment lacks variables for NCCL: other launchers do not set
/// them. The second time none is missing.
fn with_nccl_settings(config: &Config, environment: &Environment) -> anyhow::Result<()> {
    if !matches!(config.process_group.backend, BackendChoice::Auto | BackendChoice::Nccl) {
        return Ok(());
    }
    let missing = nccl_settings::missing(config, environment);
    if missing.is_empty() {
        return Ok(());
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    let error = Command::new(program).args(std::env::args_os().skip(1)).envs(missing).exec();
    Err(error).context("cannot start again with NCCL's variables")
}
