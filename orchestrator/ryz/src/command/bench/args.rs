//! The flags of `ryz bench`, and the requests that they make.

use std::path::PathBuf;

use anyhow::{anyhow, bail};
use ryzanstein_benches::measure::{Collective, CollectiveForm, UnknownCollective};
use ryzanstein_benches::suite::{Format, Part, Request, Start, Sweep, Vary};
use ryzanstein_config::{ByteSize, Config};
use ryzanstein_process_group::{DType, Error, ReduceOp};

use super::suite::Suite;
use crate::command::settings;

const EXAMPLES: &str = "Examples:
  ryz bench -n 4 --op all_reduce,all_reduce_into -b 8 -e 128MiB -f 2
  ryz bench -n 4 --vary algorithm
  ryz bench -n 4 --latency-targets";

/// Headings of the help.
const SIZES: &str = "Sizes";
const CALLS: &str = "Calls";
const RESULT: &str = "Result";

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Number of ranks to start, when no launcher started this process
    #[arg(long, short = 'n', value_name = "N")]
    pub(super) world_size: Option<String>,
    /// Backend of the collectives: auto, nccl (on GPUs) or tcp (on CPUs) [default: auto]
    #[arg(long, value_name = "BACKEND")]
    pub(super) backend: Option<String>,
    /// Operations separated by commas, or all; all_reduce_into and so on have separate input and output
    #[arg(long, value_name = "OP,…", default_value = "all_reduce")]
    pub(super) op: String,
    /// Smallest size [default: 1KB]
    #[arg(long, short = 'b', value_name = "SIZE", help_heading = SIZES)]
    pub(super) min_bytes: Option<ByteSize>,
    /// Largest size [default: 100MB]
    #[arg(long, short = 'e', value_name = "SIZE", help_heading = SIZES)]
    pub(super) max_bytes: Option<ByteSize>,
    /// Ratio between two sizes [default: 4]
    #[arg(long, short = 'f', value_name = "F", help_heading = SIZES)]
    pub(super) factor: Option<u64>,
    /// Sizes separated by commas, instead of a sweep
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with_all = ["min_bytes", "max_bytes", "factor"], help_heading = SIZES)]
    pub(super) sizes: Option<Vec<ByteSize>>,
    /// Element type: f32, f64, f16, bf16, i8, u8, i32, u32, i64 or u64
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub(super) dtype: DType,
    /// Reduction: sum, product, min, max or avg
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = reduction)]
    pub(super) reduction: ReduceOp,
    /// Untimed calls before the timed ones; their values are checked [default: a tenth of the timed ones]
    #[arg(long, short = 'w', value_name = "W", help_heading = CALLS)]
    pub(super) warmup: Option<usize>,
    /// Timed calls [default: fewer for larger sizes]
    #[arg(long, value_name = "I", value_parser = clap::value_parser!(u32).range(1..), help_heading = CALLS)]
    pub(super) iters: Option<u32>,
    /// nccl-tests' flag. Every value of every call is always checked, outside the timed part
    #[arg(long, short = 'c', value_name = "1", value_parser = always_checked, hide = true)]
    pub(super) check: Option<()>,
    /// Time calls replayed from a CUDA graph
    #[arg(long, help_heading = CALLS)]
    pub(super) graph: bool,
    /// Paths to measure, separated by commas: auto, all, or names as the table shows them
    #[arg(long, value_name = "PATH,…", value_delimiter = ',', default_value = "auto", help_heading = CALLS)]
    pub(super) path: Vec<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Table, help_heading = RESULT)]
    pub(super) format: Format,
    /// Write the result to this file, and a table to standard output
    #[arg(long, value_name = "FILE", help_heading = RESULT)]
    pub(super) out: Option<PathBuf>,
    /// Judge latencies and bandwidths on CPUs too (the targets are for GPUs); exit with code 1 unless every documented target was
    /// measured and met
    #[arg(long, help_heading = RESULT)]
    pub(super) strict: bool,
    /// Compare variants side by side, in turns, each in ranks of its own; overlap compares sizes of gradient buckets behind a backward
    /// pass
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "strict")]
    pub(super) vary: Option<VaryChoice>,
    /// The variant that these ranks are
    #[arg(long, hide = true, requires = "rows")]
    pub(super) variant: Option<String>,
    /// The round of the variants
    #[arg(long, hide = true, default_value_t = 1)]
    pub(super) round: usize,
    /// The file to which a variant adds its rows
    #[arg(long, hide = true)]
    pub(super) rows: Option<PathBuf>,
    /// Measure every documented target: latencies, bandwidth, and the scaling efficiency and communication of a model's steps
    #[arg(long, conflicts_with_all = [
        "op", "min_bytes", "max_bytes", "factor", "sizes", "dtype", "reduction", "vary",
    ])]
    pub(super) latency_targets: bool,
    #[command(flatten)]
    pub(super) file: settings::ConfigFile,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VaryChoice {
    Algorithm,
    Protocol,
    Backend,
    Copies,
    Start,
    Overlap,
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

impl Args {
    pub(super) fn config(&self) -> anyhow::Result<Config> {
        let mut flags = settings::Flags::new();
        settings::set_flag(&mut flags, "job.world_size", "--world-size", self.world_size.as_ref());
        settings::set_flag(&mut flags, "process_group.backend", "--backend", self.backend.as_ref());
        let mut config = self.file.load(flags)?;
        settings::silence_slow_call_warnings(&mut config);
        Ok(config)
    }

    pub(super) fn request(&self) -> Result<Request, Error> {
        Ok(self.suite().complete(Request {
            ops: operations(&self.op)?,
            sizes: self.sizes()?,
            dtype: self.dtype,
            reduction: self.reduction,
            warmup: self.warmup,
            iterations: self.iters.map(|n| n as usize),
            graph: self.graph,
            paths: self.path.clone(),
            judged: self.strict,
            part: self.part(),
        }))
    }

    /// Returns the measurement: the collectives that the flags name, or a suite.
    pub(super) fn suite(&self) -> Suite {
        match self.vary {
            Some(VaryChoice::Overlap) => Suite::Overlap,
            _ if self.latency_targets => Suite::LatencyTargets,
            _ => Suite::Collectives,
        }
    }

    /// Returns the variants to compare, each in separate ranks.
    pub(super) fn variants(&self) -> Option<Vary> {
        match self.vary? {
            VaryChoice::Algorithm => Some(Vary::Algorithm),
            VaryChoice::Protocol => Some(Vary::Protocol),
            VaryChoice::Backend => Some(Vary::Backend),
            VaryChoice::Copies => Some(Vary::Copies),
            VaryChoice::Start => Some(Vary::Start),
            VaryChoice::Overlap => None,
        }
    }

    fn part(&self) -> Option<Part> {
        let variant = self.variant.clone()?;
        let is_start = self.vary == Some(VaryChoice::Start);
        let start = Start::ALL.into_iter().find(|start| is_start && start.name() == variant);
        Some(Part { variant, round: self.round, start })
    }

    /// Refuses formats and flags that do not apply to the requested measurement.
    pub(super) fn check_flags(&self) -> Result<(), Error> {
        let given = [
            ("--op", self.op != "all_reduce"),
            ("--min-bytes", self.min_bytes.is_some()),
            ("--max-bytes", self.max_bytes.is_some()),
            ("--factor", self.factor.is_some()),
            ("--sizes", self.sizes.is_some()),
            ("--dtype", self.dtype != DType::F32),
            ("--reduction", self.reduction != ReduceOp::Sum),
            ("--warmup", self.warmup.is_some()),
            ("--graph", self.graph),
            ("--path", self.path != ["auto"]),
            ("--out", self.out.is_some()),
        ];
        if let Some((flag, _)) = given.iter().find(|(_, given)| *given && self.suite() == Suite::Overlap) {
            return Err(Error::Configuration(format!(
                "--vary overlap does not take {flag}: it always reduces the same f32 gradients; omit it"
            )));
        }
        let flag = match self.suite() {
            Suite::LatencyTargets => "--latency-targets",
            Suite::Overlap => "--vary overlap",
            Suite::Collectives if self.variants().is_some() => "--vary",
            Suite::Collectives => return Ok(()),
        };
        if matches!(self.format, Format::Json | Format::Table) {
            return Ok(());
        }
        Err(Error::Configuration(format!("{flag} prints a table or JSON: pass --format table or json")))
    }

    fn sizes(&self) -> Result<Vec<u64>, Error> {
        if let Some(sizes) = &self.sizes {
            if sizes.iter().any(|size| size.get() == 0) {
                return Err(Error::Configuration("--sizes: a size must be at least one byte".into()));
            }
            return Ok(sizes.iter().map(|size| size.get()).collect());
        }
        // The size of the call hardly counts compared with its start.
        let is_named = self.min_bytes.is_some() || self.max_bytes.is_some() || self.factor.is_some();
        if !is_named && self.vary == Some(VaryChoice::Start) {
            return Ok(vec![1_000, 1_000_000]);
        }
        let usual = Sweep::default();
        let sweep = Sweep {
            min: self.min_bytes.map_or(usual.min, ByteSize::get),
            max: self.max_bytes.map_or(usual.max, ByteSize::get),
            factor: self.factor.unwrap_or(usual.factor),
        };
        // Sizes that the user names are measured exactly, without the documented ones.
        if is_named { sweep.sizes() } else { sweep.with_documented() }
    }
}

fn operations(text: &str) -> Result<Vec<CollectiveForm>, Error> {
    if text == "all" {
        return Ok(Collective::ALL.map(CollectiveForm::from).to_vec());
    }
    let parse = |name: &str| {
        name.trim().parse().map_err(|error: UnknownCollective| {
            Error::Configuration(format!(
                "--op {text}: {error}; the first seven also with _into, out of place"
            ))
        })
    };
    text.split(',').map(parse).collect()
}
