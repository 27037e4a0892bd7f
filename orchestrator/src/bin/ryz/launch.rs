//! `ryz launch`

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use ryzanstein_config::{Config, Source};
use ryzanstein_orchestrator::rendezvous::Environment;
use ryzanstein_orchestrator::supervisor::{self, Job, LaunchError};
use ryzanstein_orchestrator::{nccl_settings, telemetry};

use crate::settings::{self, Flags, set_flag};

/// The hidden command that [`run`] runs this program with.
pub(crate) const SUPERVISE: &str = "__supervise";

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Number of ranks on all nodes together
    #[arg(long, short = 'n', value_name = "N")]
    world_size: Option<String>,
    /// Number of nodes
    #[arg(long, value_name = "M")]
    nnodes: Option<String>,
    /// Rank of this node, from 0
    #[arg(long, value_name = "K")]
    node_rank: Option<String>,
    /// Address of the rendezvous, which the first node serves
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
    /// Backend of the collectives: auto, nccl or tcp
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Maximum number of restarts after a failure, each in a new epoch
    #[arg(long, value_name = "R")]
    max_restarts: Option<String>,
    /// How long ranks wait for each other, when joining and in every collective: seconds, or with a unit (250ms)
    #[arg(long, value_name = "S")]
    timeout: Option<String>,
    /// Write each rank's output to D/rank-R/stdout.log and stderr.log
    #[arg(long, value_name = "D")]
    log_dir: Option<PathBuf>,
    /// Serve Prometheus metrics at this address; the local rank is added to the port
    #[arg(long, value_name = "A")]
    metrics_addr: Option<String>,
    #[command(flatten)]
    file: settings::ConfigFile,
    /// Forward standard output without the rank's prefix
    #[arg(long, hide = true)]
    bare_stdout: bool,
    /// Closing report: text on stderr, or JSON as the last line of stdout
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Program that every rank runs [default: ryz check]
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Table,
    Json,
}

impl Args {
    fn flags(&self) -> Flags {
        let mut flags = Flags::new();
        set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        set_flag(&mut flags, "launch.nnodes", "--nnodes", self.nnodes.as_ref());
        set_flag(&mut flags, "launch.node_rank", "--node-rank", self.node_rank.as_ref());
        set_flag(&mut flags, "rendezvous.address", "--rendezvous", self.rendezvous.as_ref());
        set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        set_flag(&mut flags, "launch.max_restarts", "--max-restarts", self.max_restarts.as_ref());
        let timeout = self.timeout.as_ref().map(|text| {
            let is_seconds = text.parse::<f64>().is_ok();
            if is_seconds { format!("{text}s") } else { text.clone() }
        });
        set_flag(&mut flags, "process_group.timeout", "--timeout", timeout.as_ref());
        set_flag(&mut flags, "rendezvous.timeout", "--timeout", timeout.as_ref());
        set_flag(
            &mut flags,
            "launch.log_dir",
            "--log-dir",
            self.log_dir.as_ref().map(|d| d.display().to_string()),
        );
        set_flag(&mut flags, "metrics.address", "--metrics-addr", self.metrics_addr.as_ref());
        flags
    }

    fn job(&self) -> anyhow::Result<Job> {
        let config = self.file.load(self.flags())?;
        if config.job.world_size.is_none() {
            return Err(LaunchError::no_world_size().into());
        }
        let environment = settings::environment();
        let (program, arguments) = match self.program.split_first() {
            Some((program, arguments)) => {
                let path = environment.get("PATH").map(String::as_str);
                supervisor::check_program(program.as_ref(), path)?;
                (program.into(), arguments.to_vec())
            }
            None => (std::env::current_exe().context("cannot find this program")?, vec!["check".into()]),
        };
        Ok(Job {
            program,
            arguments,
            environment: self.handed_down(&config, &environment)?,
            secret_file: environment.get("RYZ_SECRET_FILE").map(PathBuf::from),
            bare_stdout: self.bare_stdout,
            config,
        })
    }

    /// The environment of the ranks: what flags told the launcher, and the variables for NCCL.
    fn handed_down(
        &self,
        config: &Config,
        environment: &Environment,
    ) -> anyhow::Result<Vec<(String, String)>> {
        let mut variables: Vec<_> = ryzanstein_config::keys()
            .zip(config.entries())
            .filter(|(_, entry)| matches!(entry.source, Source::Flag(_)))
            .map(|(key, entry)| (key.environment_variable(), entry.value))
            .collect();
        if let Some(file) = self.file.named() {
            let file =
                std::path::absolute(&file).with_context(|| format!("cannot find {}", file.display()))?;
            variables.push(("RYZ_CONFIG".into(), file.display().to_string()));
        }
        variables.extend(nccl_settings::missing(config, environment));
        Ok(variables)
    }
}

/// The launcher: checks everything that can be wrong, then starts the supervisor and waits for it.
pub(crate) fn run(args: &Args) -> anyhow::Result<i32> {
    args.job()?;
    let mut supervisor = Command::new(std::env::current_exe().context("cannot find this program")?);
    // The first argument is the name of this command.
    supervisor.arg(SUPERVISE).args(std::env::args_os().skip(2));
    supervisor::run_supervisor(supervisor).context("cannot start the supervisor")
}

/// Runs this same command on several ranks, with the output of rank 0 as its own.
pub(crate) fn relaunch(world_size: u32, file: &settings::ConfigFile) -> anyhow::Result<i32> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut supervisor = Command::new(&program);
    supervisor.arg(SUPERVISE).args(["--world-size", &world_size.to_string(), "--bare-stdout"]);
    if let Some(file) = file.named() {
        supervisor.arg("--config").arg(file);
    }
    supervisor.arg("--");
    supervisor.arg(&program).args(std::env::args_os().skip(1));
    supervisor::run_supervisor(supervisor).context("cannot start the supervisor")
}

/// The supervisor: runs the job. Standard input is the lifeline that the launcher holds.
pub(crate) fn supervise(args: &Args) -> anyhow::Result<i32> {
    let job = args.job()?;
    telemetry::log_to_stderr(&job.config.log, None)?;
    let report = supervisor::run(&job, Some(std::io::stdin()))?;
    match args.format {
        // A command that launched itself does not report success.
        Format::Table if self_launched_well(args, report.exit_code) => {}
        Format::Table => eprint!("{report}"),
        Format::Json => println!("{}", report.json()),
    }
    Ok(report.exit_code)
}

fn self_launched_well(args: &Args, exit_code: i32) -> bool {
    args.bare_stdout && exit_code == 0
}
