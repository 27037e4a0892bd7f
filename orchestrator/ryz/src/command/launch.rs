//! `ryz launch`

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use ryzanstein_config::{Config, Source, WorldSize};
use ryzanstein_orchestrator::console;
use ryzanstein_orchestrator::nccl_settings;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::rendezvous::Environment;
use ryzanstein_orchestrator::status;
use ryzanstein_orchestrator::supervisor::{self, Job, LaunchError, RankOutput};
use ryzanstein_orchestrator::table::Tone;
use ryzanstein_orchestrator::telemetry;
use ryzanstein_orchestrator::telemetry::Origin;

use crate::command::screen;
use crate::command::settings::{self, Flags, set_flag};

/// The name of the command.
pub(crate) const NAME: &str = "launch";
/// The hidden command that [`run`] runs this program with.
pub(crate) const SUPERVISE: &str = "__supervise";

/// Timeout for a reader of the output at the end: a reader that has stopped must not keep the process.
pub(crate) const FLUSH: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "Examples:
  ryz launch -n 4
  ryz launch -n 4 --log-dir logs --show-ranks 0 -- python3 train.py --epochs 3
  RYZ_SECRET_FILE=job.secret ryz launch -n 8 --nnodes 2 --node-rank 0 --rendezvous node0:29500 -- PROGRAM";

/// Headings of the help.
const NODES: &str = "Several nodes";
const OUTPUT: &str = "Output and records";

/// The number of ranks on each node.
#[derive(Clone, Copy, Debug)]
enum PerNode {
    Ranks(u32),
    Gpus,
}

impl std::str::FromStr for PerNode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text {
            "gpu" => Ok(Self::Gpus),
            number => number.parse().map(Self::Ranks).context("expected a number of ranks, or gpu"),
        }
    }
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks on all nodes together
    #[arg(long, short = 'n', value_name = "N")]
    world_size: Option<String>,
    /// Number of ranks on each node, instead of the number on all; gpu: as many as CUDA shows GPUs
    #[arg(long, value_name = "N", conflicts_with = "world_size")]
    nproc_per_node: Option<PerNode>,
    /// Number of nodes [default: 1]
    #[arg(long, value_name = "M", help_heading = NODES)]
    nnodes: Option<String>,
    /// Rank of this node, from 0 [default: 0]
    #[arg(long, value_name = "K", help_heading = NODES)]
    node_rank: Option<String>,
    /// One node, whatever the settings say
    #[arg(long, conflicts_with_all = ["nnodes", "node_rank", "rendezvous"], help_heading = NODES)]
    standalone: bool,
    /// Address of the rendezvous, which the first node serves [default: a free port of 127.0.0.1]
    #[arg(long, alias = "rdzv-endpoint", value_name = "HOST:PORT", help_heading = NODES)]
    rendezvous: Option<String>,
    /// The host of the rendezvous, as torchrun takes it
    #[arg(long, value_name = "HOST", requires = "master_port", conflicts_with = "rendezvous", hide = true)]
    master_addr: Option<String>,
    /// The port of the rendezvous, as torchrun takes it
    #[arg(long, value_name = "PORT", conflicts_with = "rendezvous", hide = true)]
    master_port: Option<u16>,
    /// Backend of the collectives: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Encryption of connections: on, off, or auto, which leaves out loopback addresses [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = NODES)]
    encryption: Option<String>,
    /// Binding of ranks to processors of their own: auto (if there are enough) or none [default: auto]
    #[arg(long, value_name = "WHEN")]
    bind: Option<String>,
    /// Maximum number of restarts after a failure, each in a new epoch [default: 0]
    #[arg(long, value_name = "R")]
    max_restarts: Option<String>,
    /// Maximum time to wait for other ranks: seconds, or with a unit (250ms) [default: 1m to join, 5m in a collective]
    #[arg(long, value_name = "S")]
    timeout: Option<String>,
    /// Also write each rank's output to D/rank-R/stdout.log and stderr.log
    #[arg(long, value_name = "D", help_heading = OUTPUT)]
    log_dir: Option<PathBuf>,
    /// Ranks whose output is shown: all, none, or ranks separated by commas [default: all]
    #[arg(long, value_name = "RANKS", help_heading = OUTPUT)]
    show_ranks: Option<String>,
    /// Ranks write their flight records to D/rank-R.json when they fail, for `ryz trace D`
    #[arg(long, value_name = "D", help_heading = OUTPUT)]
    trace_dir: Option<PathBuf>,
    /// Serve Prometheus metrics at this address; the local rank is added to the port
    #[arg(long, value_name = "A", help_heading = OUTPUT)]
    metrics_addr: Option<String>,
    #[command(flatten)]
    file: settings::ConfigFile,
    /// Rank 0 writes to this process's standard output itself
    #[arg(long, hide = true)]
    direct: bool,
    /// Closing report: text on stderr, or JSON as the last line of stdout
    #[arg(long, value_enum, default_value_t = screen::Format::Table, help_heading = OUTPUT)]
    format: screen::Format,
    /// Program that every rank runs, and its arguments; `--` before it is optional [default: ryz check]
    #[arg(trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl Args {
    fn flags(&self) -> Flags {
        let mut flags = Flags::new();
        set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        set_flag(&mut flags, "launch.nnodes", "--nnodes", self.nnodes.as_ref());
        set_flag(&mut flags, "launch.node_rank", "--node-rank", self.node_rank.as_ref());
        set_flag(&mut flags, "rendezvous.address", "--rendezvous", self.rendezvous.as_ref());
        if let Some(port) = self.master_port {
            let host = self.master_addr.as_deref().unwrap_or("127.0.0.1");
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            let address = Some(format!("{host}:{port}"));
            set_flag(&mut flags, "rendezvous.address", "--master-addr", address);
        }
        if self.standalone {
            // An empty value unsets a setting.
            for (key, value) in
                [("launch.nnodes", "1"), ("launch.node_rank", "0"), ("rendezvous.address", "")]
            {
                set_flag(&mut flags, key, "--standalone", Some(value));
            }
        }
        set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        set_flag(&mut flags, "security.encryption", "--encryption", self.encryption.as_ref());
        set_flag(&mut flags, "launch.bind", "--bind", self.bind.as_ref());
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
        set_flag(&mut flags, "launch.show_ranks", "--show-ranks", self.show_ranks.as_ref());
        // Absolute, because the program may change its folder.
        let trace_dir = self.trace_dir.as_ref().map(|d| std::path::absolute(d).unwrap_or_else(|_| d.clone()));
        set_flag(&mut flags, "profile.trace_dir", "--trace-dir", trace_dir.map(|d| d.display().to_string()));
        set_flag(&mut flags, "metrics.address", "--metrics-addr", self.metrics_addr.as_ref());
        flags
    }

    fn config(&self) -> anyhow::Result<Config> {
        let mut flags = self.flags();
        let config = self.file.load(flags.clone())?;
        let Some(on_each) = self.nproc_per_node else { return Ok(config) };
        // The number of nodes may come from any layer.
        let on_each = match on_each {
            PerNode::Ranks(ranks) => ranks,
            PerNode::Gpus => match settings::visible_gpus(&config) {
                0 => {
                    let why =
                        "--nproc-per-node gpu: CUDA shows no GPU here; give a number, or see `ryz doctor`";
                    return Err(LaunchError::Configuration(why.into()).into());
                }
                gpus => gpus,
            },
        };
        let on_all = u64::from(on_each) * u64::from(config.launch.nnodes.get());
        set_flag(&mut flags, "job.world_size", "--nproc-per-node", Some(on_all));
        Ok(self.file.load(flags)?)
    }

    fn job(&self, screen: &screen::Args) -> anyhow::Result<Job> {
        let mut config = self.config()?;
        screen.set_log_level(&mut config);
        if config.job.world_size.is_none() {
            return Err(LaunchError::no_world_size().into());
        }
        let ranks = config.job.world_size.map_or(0, WorldSize::get);
        if let Some(rank) = config.launch.show_ranks.beyond(ranks) {
            let why = format!(
                "launch.show_ranks (flag --show-ranks): there is no rank {rank}; ranks count from 0 to {}",
                ranks - 1
            );
            return Err(LaunchError::Configuration(why).into());
        }
        let environment = settings::environment();
        let (program, arguments) = if let Some((program, arguments)) = self.program.split_first() {
            supervisor::check_program(program.as_ref(), std::env::var_os("PATH").as_deref())?;
            (program.into(), arguments.to_vec())
        } else {
            let prefix = "[rank 0] ".len();
            let flags = screen.handed_down(prefix).into_iter().map(OsString::from);
            let arguments = std::iter::once("check".into()).chain(flags).collect();
            (std::env::current_exe().context("cannot find this program")?, arguments)
        };
        Ok(Job {
            program,
            arguments,
            environment: self.handed_down(&config, &environment)?,
            secret_file: std::env::var_os("RYZ_SECRET_FILE").map(PathBuf::from),
            status_folder: Some(status::folder(&environment)),
            output: self.output(screen),
            config,
        })
    }

    fn output(&self, screen: &screen::Args) -> RankOutput {
        if self.direct {
            return RankOutput::Direct;
        }
        RankOutput::Prefixed { stdout: screen.stdout().color, stderr: screen.stderr().color }
    }

    /// Returns the environment of the ranks: the settings from flags and the file, and the variables for NCCL.
    fn handed_down(
        &self,
        config: &Config,
        environment: &Environment,
    ) -> anyhow::Result<Vec<(String, OsString)>> {
        let mut variables: Vec<(String, OsString)> = ryzanstein_config::keys()
            .zip(config.entries())
            .filter(|(_, entry)| matches!(entry.source, Source::Flag(_)))
            .map(|(key, entry)| (key.environment_variable(), entry.value.into()))
            .collect();
        if let Some(file) = self.file.used() {
            // Absolute, because the program may change its folder.
            let file =
                std::path::absolute(&file).with_context(|| format!("cannot find {}", file.display()))?;
            variables.push(("RYZ_CONFIG".into(), file.into()));
        }
        // The ranks cannot see the effect of this process's terminal on the logs.
        variables.push(("RYZ_LOG__LEVEL".into(), config.log.level.clone().into()));
        let missing = nccl_settings::missing(config, environment);
        variables.extend(missing.into_iter().map(|(name, value)| (name, value.into())));
        Ok(variables)
    }
}

/// Runs the launcher: checks everything that can be wrong, then starts the supervisor and waits for it.
pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    args.job(screen)?;
    let mut supervisor = Command::new(std::env::current_exe().context("cannot find this program")?);
    // The flags that every command has may precede the name of this one.
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some(name) = arguments.iter_mut().find(|argument| *argument == NAME) {
        *name = SUPERVISE.into();
    }
    supervisor.args(arguments);
    run_supervisor(supervisor)
}

fn run_supervisor(supervisor: Command) -> anyhow::Result<i32> {
    let code = supervisor::run_supervisor(supervisor).context("cannot start the supervisor")?;
    Ok(flush(code, false))
}

/// Waits for the readers of the output. Returns the exit code: not 0 if output is lost, which the other stream tells; standard output
/// only if it may, because it may have to end with JSON.
fn flush(code: i32, stdout_may_tell: bool) -> i32 {
    let Some(lost) = console::flush(FLUSH) else { return code };
    let other = if lost.is_stdout { console::stderr() } else { console::stdout() };
    // Its reader may have paused as well.
    if other.is_flushed() && (lost.is_stdout || stdout_may_tell) {
        other.say(&format!("ryz: {}; output of the job is lost\n", lost.why));
        other.drain(FLUSH);
    }
    code.max(1)
}

/// Runs this same command on several ranks, with `more` arguments and `variables`, and the output of rank 0 as its own.
pub(crate) fn relaunch(
    world_size: u32,
    file: &settings::ConfigFile,
    more: &[OsString],
    variables: &[(&str, &str)],
) -> anyhow::Result<i32> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut supervisor = Command::new(&program);
    supervisor.envs(variables.iter().copied());
    supervisor.arg(SUPERVISE).args(["--world-size", &world_size.to_string(), "--direct"]);
    if let Some(file) = file.named() {
        supervisor.arg("--config").arg(file);
    }
    supervisor.arg("--");
    supervisor.arg(&program).args(std::env::args_os().skip(1)).args(more);
    run_supervisor(supervisor)
}

/// Runs the supervisor of the job. Standard input is the lifeline that the launcher holds.
pub(crate) fn supervise(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let job = args.job(screen)?;
    telemetry::log_to(&job.config.log, &Origin::of_launcher(&job.config), console::stderr)?;
    telemetry::serve_launcher_metrics(&job.config.metrics)?;
    let report = supervisor::run(&job, Some(std::io::stdin()))?;
    match args.format {
        // A command that launched itself does not report success.
        screen::Format::Table if args.direct && report.exit_code == 0 => {}
        screen::Format::Table
            if args.direct && report.first_failure.as_ref().is_some_and(|first| first.is_reported) =>
        {
            let error = report.first_failure.as_ref().map(|first| first.error(screen.stderr()));
            console::stderr().say(&error.unwrap_or_default());
        }
        screen::Format::Table if args.program.is_empty() && report.exit_code == 0 => {
            let ranks = plural(report.world_size as usize, "rank");
            let worked = if report.world_size == 1 { "worked" } else { "worked together" };
            let told = format!("ryz: {ranks} {worked}: collectives and sharded layers are right");
            console::stderr().say(&format!("{}\n", screen.stderr().paint(Tone::Good, &told)));
        }
        screen::Format::Table => console::stderr().say(&report.text(screen.stderr())),
        screen::Format::Json => console::stdout().say(&format!("{}\n", report.json())),
    }
    let code = report.exit_code.max(i32::from(report.output_lost));
    Ok(flush(code, args.format == screen::Format::Table && !args.direct))
}
