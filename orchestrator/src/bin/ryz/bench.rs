//! `ryz bench`

mod suite;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use ryzanstein_config::{BackendChoice, ByteSize, Config, WorldSize};
use ryzanstein_orchestrator::bench::{
    self, Calibration, Change, Columns, Earlier, Format, Report, Request, RowWriter, Sweep,
};
use ryzanstein_orchestrator::measure::{Collective, UnknownCollective};
use ryzanstein_orchestrator::table::wrap;
use ryzanstein_orchestrator::{Orchestrator, VERSION, doctor, plural};
use ryzanstein_process_group::{BackendKind, DType, Error, Memory, ReduceOp, units};
use tempfile::NamedTempFile;

use crate::{launch, rank, screen, settings};

const EXAMPLES: &str = "Examples:
  ryz bench -n 4
  ryz bench -n 4 --op all -b 8 -e 128MiB -f 2 --out-of-place
  ryz bench -n 2 --sizes 1KB,1MB --path all --compare result.jsonl
  ryz bench -n 4 --latency-targets";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag")]
pub(crate) struct Args {
    /// Number of ranks to start, when no launcher started this process
    #[arg(long, short = 'n', value_name = "N")]
    world_size: Option<String>,
    /// Backend of the collectives: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Operations separated by commas, or all
    #[arg(long, value_name = "OP,…", default_value = "all_reduce")]
    op: String,
    /// Smallest size [default: 1KB]
    #[arg(long, short = 'b', value_name = "SIZE")]
    min_bytes: Option<ByteSize>,
    /// Largest size [default: 100MB]
    #[arg(long, short = 'e', value_name = "SIZE")]
    max_bytes: Option<ByteSize>,
    /// Ratio between two sizes [default: 4]
    #[arg(long, short = 'f', value_name = "F")]
    factor: Option<u64>,
    /// Sizes separated by commas, instead of a sweep
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with_all = ["min_bytes", "max_bytes", "factor"])]
    sizes: Option<Vec<ByteSize>>,
    /// Element type: f32, f64, f16, bf16, i8, u8, i32, u32, i64 or u64
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    dtype: DType,
    /// Reduction: sum, product, min, max or avg
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = reduction)]
    reduction: ReduceOp,
    /// Untimed calls before the timed ones; their values are checked [default: a tenth of the timed ones]
    #[arg(long, short = 'w', value_name = "W")]
    warmup: Option<usize>,
    /// Timed calls [default: fewer for larger sizes]
    #[arg(long, value_name = "I", value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Measure out of place too, with separate input and output: rows named all_reduce_into and so on
    #[arg(long)]
    out_of_place: bool,
    /// nccl-tests' flag. Every value of every call is always checked, outside the timed part
    #[arg(long, short = 'c', value_name = "1", value_parser = always_checked, hide = true)]
    check: Option<()>,
    /// Time calls replayed from a CUDA graph
    #[arg(long)]
    graph: bool,
    /// Paths to measure, separated by commas: auto, all, or names as the table shows them
    #[arg(long, value_name = "PATH,…", value_delimiter = ',', default_value = "auto")]
    path: Vec<String>,
    /// Explain why each row's calls took their path, and not another
    #[arg(long)]
    why: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Table)]
    format: OutputFormat,
    /// Write the result to this file, and a table to standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Bandwidth of one link in one direction, in GB/s, of which one target is a share [default: that of a copy between
    /// two GPUs, or of large messages between two ranks on CPUs]
    #[arg(long, value_name = "GBS", value_parser = positive)]
    link_gbs: Option<f64>,
    /// Compare with an earlier result of --format json; exit with code 1 if a row is slower by more than --tolerance and by more
    /// than chance
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// How much slower a row may be, in percent [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = positive, requires = "compare")]
    tolerance: Option<f64>,
    /// Judge latencies and bandwidths on CPUs too (the targets are for GPUs)
    #[arg(long)]
    targets: bool,
    /// Exit with code 1 if a target is missed or none can be judged; implies --targets
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    suite: suite::SuiteArgs,
    #[command(flatten)]
    file: settings::ConfigFile,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum OutputFormat {
    Table,
    Json,
    Csv,
    Html,
    Svg,
}

impl From<OutputFormat> for Format {
    fn from(format: OutputFormat) -> Self {
        match format {
            OutputFormat::Table => Self::Table,
            OutputFormat::Json => Self::Json,
            OutputFormat::Csv => Self::Csv,
            OutputFormat::Html => Self::Html,
            OutputFormat::Svg => Self::Svg,
        }
    }
}

fn reduction(text: &str) -> anyhow::Result<ReduceOp> {
    ReduceOp::ALL.iter().copied().find(|op| op.name() == text).ok_or_else(|| {
        let names: Vec<_> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
        anyhow!("expected one of {}", names.join(", "))
    })
}

fn always_checked(text: &str) -> anyhow::Result<()> {
    match text.parse::<u32>() {
        Ok(0) => bail!(
            "every value is always checked, outside the timed part, so the figures do not change; omit it"
        ),
        Ok(_) => Ok(()),
        Err(_) => bail!("expected 1: every value of every call is checked"),
    }
}

fn positive(text: &str) -> anyhow::Result<f64> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.context("expected a number above zero")
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let mut flags = settings::Flags::new();
        settings::set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        settings::set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        let mut config = self.file.load(flags)?;
        settings::silence_slow_call_warnings(&mut config);
        Ok(config)
    }

    fn request(&self) -> Result<Request, Error> {
        Ok(self.suite.complete(Request {
            ops: operations(&self.op)?,
            sizes: self.sizes()?,
            dtype: self.dtype,
            reduction: self.reduction,
            warmup: self.warmup,
            iterations: self.iters.map(|n| n as usize),
            graph: self.graph,
            out_of_place: self.out_of_place,
            paths: self.path.clone(),
            why: self.why,
            judged: self.targets || self.strict,
        }))
    }

    /// The result to compare with.
    fn earlier(&self) -> anyhow::Result<Option<Earlier>> {
        let Some(file) = &self.compare else { return Ok(None) };
        let shown = file.display().to_string();
        let text = std::fs::read_to_string(file)
            .map_err(|error| Error::Configuration(format!("--compare {shown}: {error}")))?;
        Ok(Some(Earlier::parse(&text, &shown)?))
    }

    fn sizes(&self) -> Result<Vec<u64>, Error> {
        if let Some(sizes) = &self.sizes {
            if sizes.iter().any(|size| size.get() == 0) {
                return Err(Error::Configuration("--sizes: a size must be at least one byte".into()));
            }
            return Ok(sizes.iter().map(|size| size.get()).collect());
        }
        let usual = Sweep::default();
        let sweep = Sweep {
            min: self.min_bytes.map_or(usual.min, ByteSize::get),
            max: self.max_bytes.map_or(usual.max, ByteSize::get),
            factor: self.factor.unwrap_or(usual.factor),
        };
        // Sizes that the user names are measured exactly, without the documented ones.
        let is_named = self.min_bytes.is_some() || self.max_bytes.is_some() || self.factor.is_some();
        if is_named { sweep.sizes() } else { sweep.with_documented() }
    }
}

fn operations(text: &str) -> Result<Vec<Collective>, Error> {
    if text == "all" {
        return Ok(Collective::ALL.to_vec());
    }
    let parse = |name: &str| {
        name.trim()
            .parse()
            .map_err(|error: UnknownCollective| Error::Configuration(format!("--op {text}: {error}")))
    };
    text.split(',').map(parse).collect()
}

pub(crate) fn run(args: &Args, screen: &screen::Args) -> anyhow::Result<i32> {
    let mut config = args.config()?;
    screen.set_log_level(&mut config);
    let request = args.request()?;
    // Refuse what is wrong before anything is started.
    request.check()?;
    args.suite.check(args.format, config.job.world_size.map(WorldSize::get))?;
    if config.process_group.backend == BackendChoice::Tcp {
        bench::check_graph_support(request.graph, BackendKind::Tcp)?;
    }
    if !settings::is_launched(&config)? {
        let ranks = config.job.world_size.map(WorldSize::get).ok_or_else(|| {
            Error::Configuration("world size is not set: pass --world-size N or set job.world_size".into())
        })?;
        if let Some(file) = &args.out {
            // Fails now if the result cannot be written at the end.
            temporary_file_for(file)?;
        }
        args.earlier()?;
        if ranks > 1 {
            return launch::relaunch(ranks, &args.file, &[]);
        }
    }
    rank::run(&config, |orchestrator| measure(orchestrator, args, request, screen))
}

/// A temporary file in the same folder. It replaces `file` at the end, so a run that fails leaves an earlier result as it was.
fn temporary_file_for(file: &Path) -> anyhow::Result<NamedTempFile> {
    let shown = file.display();
    if file.is_dir() {
        bail!("cannot write --out {shown}: it is a folder; name a file in it");
    }
    if file.exists() && !file.is_file() {
        bail!("cannot write --out {shown}: it is not a regular file; name another one");
    }
    let file = target(file);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Those of the file that it replaces, or of a new one; both less the umask.
    let permissions = std::fs::metadata(&file)
        .map_or_else(|_| std::fs::Permissions::from_mode(0o666), |metadata| metadata.permissions());
    tempfile::Builder::new()
        .prefix(".ryz-bench-")
        .permissions(permissions)
        .tempfile_in(folder)
        .with_context(|| format!("cannot write --out {shown}"))
}

/// The file that a link leads to.
fn target(file: &Path) -> PathBuf {
    file.canonicalize().unwrap_or_else(|_| file.to_owned())
}

fn measure(
    orchestrator: &mut Orchestrator,
    args: &Args,
    request: Request,
    screen: &screen::Args,
) -> anyhow::Result<()> {
    if args.suite.overlap {
        return args.suite.measure_overlap(orchestrator, request.iterations, args.format, screen);
    }
    let is_first = orchestrator.manager().rank().0 == 0;
    let out = args.out.as_ref().filter(|_| is_first);
    // Only looks whether it can be made. It is made at the end, so an interrupted run leaves none.
    out.map(|file| temporary_file_for(file)).transpose()?;
    let earlier = if is_first { args.earlier()? } else { None };
    let group = orchestrator.manager().world();
    let request = Request { judged: request.judged || group.memory() != Memory::Host, ..request };
    let request = args.suite.place(request, group.memory());
    let operations: Vec<String> =
        request.ops.iter().map(|what| bench::label(*what, request.reduction, request.out_of_place)).collect();
    // With --out, the file gets the format that was asked for, and standard output the table.
    let shown = if args.out.is_some() { OutputFormat::Table } else { args.format };
    let stdout = screen.stdout();
    let calibration = bench::calibrate(orchestrator, &request, args.link_gbs)?;
    let columns = Columns { judged: request.judged, calibrated: !calibration.is_empty() };
    let paths = orchestrator.manager().world().paths();
    let writer = RowWriter::new(&operations, request.dtype, &paths, columns, stdout);
    let heading = heading(orchestrator, &request, &calibration);
    let head = match shown {
        OutputFormat::Table => {
            let lines: Vec<String> = heading.lines().map(|line| wrap(line, 2, stdout)).collect();
            format!("{}\n\n{}", lines.join("\n"), writer.head())
        }
        OutputFormat::Csv => format!("{}\n", bench::csv_head()),
        OutputFormat::Json | OutputFormat::Html | OutputFormat::Svg => String::new(),
    };
    // Whoever reads the output gets each row as soon as it is measured.
    let tell = |text: &str| {
        if is_first {
            let mut out = std::io::stdout().lock();
            // A reader that has closed the pipe does not fail the measurement.
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    };
    tell(&head);
    let rows = bench::run(orchestrator, &request, &calibration, &mut |row: &bench::Row| {
        tell(&match shown {
            OutputFormat::Table => writer.row(row),
            OutputFormat::Json => bench::json(row) + "\n",
            OutputFormat::Csv => bench::csv_row(row) + "\n",
            // A page or a drawing comes at the end. Meanwhile people see that something happens.
            OutputFormat::Html | OutputFormat::Svg if is_first => {
                let size = units::bytes(row.bytes as f64);
                eprintln!("{} {size} {}: {}", row.op, row.path, units::time(row.median_us));
                String::new()
            }
            OutputFormat::Html | OutputFormat::Svg => String::new(),
        });
        Ok(())
    })?;
    let link_gbs = calibration.link_gbs;
    let steps = args.suite.measure_steps(orchestrator, request.iterations, link_gbs, |row| {
        if shown == OutputFormat::Json {
            tell(&(bench::steps::json(row) + "\n"));
        }
    })?;
    let report = Report { heading, judged: request.judged, rows, link_gbs, steps };
    match shown {
        OutputFormat::Table => tell(&format!("\n{}", report.conclusion(stdout))),
        OutputFormat::Html | OutputFormat::Svg => tell(&report.text(shown.into())),
        // There is no room for the verdicts on standard output.
        OutputFormat::Json | OutputFormat::Csv if is_first => eprint!("{}", report.targets(screen.stderr())),
        OutputFormat::Json | OutputFormat::Csv => {}
    }
    if let Some(file) = out {
        let what = || format!("cannot write --out {}", file.display());
        let mut unfinished = temporary_file_for(file)?;
        unfinished.write_all(report.text(args.format.into()).as_bytes()).with_context(what)?;
        unfinished.persist(target(file)).with_context(what)?;
    }
    // Rank 0 has the earlier result, and all ranks fail alike.
    let comparison =
        earlier.map(|earlier| earlier.compare(&report.rows, args.tolerance.unwrap_or(10.0) / 100.0));
    if let Some(comparison) = &comparison {
        match shown {
            OutputFormat::Table => tell(&format!("\n{}", comparison.table(stdout))),
            _ => eprint!("{}", comparison.table(screen.stderr())),
        }
    }
    let counts = comparison.map(|comparison| (comparison.compared(), comparison.count(Change::Slower)));
    let counts = orchestrator.manager().world().all_gather_object(&counts)?.into_iter().flatten().next();
    if !report.is_correct() {
        bail!("the benchmark found wrong values");
    }
    match (counts, &args.compare) {
        (Some((0, _)), Some(file)) => bail!(
            "--compare {}: nothing that was measured is in it; measure the same operations, types, sizes, ranks and backend",
            file.display()
        ),
        (Some((_, slower @ 1..)), Some(file)) => {
            bail!("--compare {}: {} slower than in the earlier result", file.display(), rows_are(slower))
        }
        _ => {}
    }
    if args.strict {
        match report.meets_targets() {
            Some(true) => {}
            Some(false) => bail!("--strict: some targets were missed"),
            None => bail!("--strict: no target could be judged, as none is documented for what was measured"),
        }
    }
    Ok(())
}

fn rows_are(count: usize) -> String {
    format!("{} {}", plural(count, "row"), if count == 1 { "is" } else { "are" })
}

fn heading(orchestrator: &mut Orchestrator, request: &Request, calibration: &Calibration) -> String {
    let manager = orchestrator.manager();
    let hosts: std::collections::BTreeSet<&str> =
        manager.roster().members.iter().map(|member| member.host.as_str()).collect();
    let found = calibration.summary();
    let probed = if found.is_empty() { String::new() } else { format!("\nprobed: {found}") };
    format!(
        "ryz {VERSION}: {} on {}, ready in {}\n{}\nbackend {}: {}\n{} elements, {}{probed}",
        plural(manager.roster().world_size(), "rank"),
        plural(hosts.len(), "host"),
        units::time(manager.init_time().as_secs_f64() * 1e6),
        doctor::machine(),
        manager.backend(),
        manager.backend_summary(),
        request.dtype,
        if request.graph {
            "replayed from a CUDA graph; results at the end of each replay are checked; latency per call of the slowest rank"
        } else {
            "every value of every call is checked; latency of the slowest rank"
        },
    )
}
