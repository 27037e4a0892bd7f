//! `ryz bench --latency-targets` and `ryz bench --overlap`.

use std::io::Write as _;

use anyhow::bail;
use ryzanstein_config::ByteSize;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::bench::Request;
use ryzanstein_orchestrator::bench::overlap::{self, Kind, OverlapRequest};
use ryzanstein_orchestrator::bench::steps::{self, ModelShape, StepRequest, StepRow};
use ryzanstein_orchestrator::communication::Surroundings;
use ryzanstein_orchestrator::measure::Collective;
use ryzanstein_process_group::targets::TARGETS;
use ryzanstein_process_group::{Error, Memory, Rank};
use ryzanstein_tensor_parallel::Error as ModelError;

use super::OutputFormat;
use crate::screen;

/// An all-reduce of this size shows the best bandwidth of GPUs.
const LONG: u64 = 1 << 30;

#[derive(clap::Args, Clone, Debug)]
pub(super) struct SuiteArgs {
    /// Measure every documented target: latencies, bandwidth, and the scaling efficiency and communication of a model's steps
    #[arg(long, conflicts_with_all = [
        "op", "min_bytes", "max_bytes", "factor", "sizes", "dtype", "reduction", "out_of_place", "compare", "vary",
    ])]
    latency_targets: bool,
    /// Shapes of the steps' layers, separated by commas: llama-8b, llama-70b or HIDDEN/INTERMEDIATE/HEADS/KV_HEADS [default:
    /// llama-8b; on GPUs llama-70b too]
    #[arg(long = "shape", value_name = "SHAPE,…", value_delimiter = ',', requires = "latency_targets")]
    shapes: Option<Vec<ModelShape>>,
    /// Layers of each shape [default: 1; on GPUs 4]
    #[arg(long, value_name = "L", requires = "latency_targets", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,
    /// Sequences of decode steps, separated by commas [default: 1,8,64]
    #[arg(long = "batch", value_name = "B,…", value_delimiter = ',', requires = "latency_targets", value_parser = clap::value_parser!(u16).range(1..))]
    batches: Option<Vec<u16>>,
    /// Measure how much of the reduction of gradients a backward pass hides, by size of the buckets
    #[arg(long, conflicts_with_all = [
        "latency_targets", "op", "min_bytes", "max_bytes", "factor", "sizes", "dtype", "reduction", "out_of_place", "compare", "vary",
        "warmup", "graph", "path", "why", "out", "link_gbs", "targets", "strict",
    ])]
    pub(super) overlap: bool,
    /// Bytes of all gradients [default: 64MB; on GPUs 1GB]
    #[arg(long, value_name = "SIZE", requires = "overlap")]
    gradients: Option<ByteSize>,
    /// Number of parameters [default: 64]
    #[arg(long, value_name = "N", requires = "overlap", value_parser = clap::value_parser!(u16).range(1..))]
    parameters: Option<u16>,
    /// Compute of the backward pass: busy computes; idle only waits, like a host whose accelerator computes [default: busy]
    #[arg(long, value_enum, value_name = "KIND", requires = "overlap")]
    compute: Option<Compute>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum Compute {
    Busy,
    Idle,
}

impl From<Compute> for Kind {
    fn from(compute: Compute) -> Self {
        match compute {
            Compute::Busy => Self::Busy,
            Compute::Idle => Self::Idle,
        }
    }
}

impl SuiteArgs {
    /// The request with what a suite measures in place of what flags say.
    pub(super) fn complete(&self, request: Request) -> Request {
        if !self.latency_targets {
            return request;
        }
        let mut sizes: Vec<u64> = TARGETS.iter().map(|target| target.bytes).collect();
        sizes.dedup();
        Request { ops: vec![Collective::AllReduce, Collective::Broadcast], sizes, judged: true, ..request }
    }

    /// The same where it is known in which memory the collectives work.
    pub(super) fn place(&self, mut request: Request, memory: Memory) -> Request {
        if self.latency_targets && memory != Memory::Host {
            request.sizes.push(LONG);
        }
        request
    }

    /// Refuses what can be seen to be wrong before anything is started.
    pub(super) fn check(
        &self,
        format: OutputFormat,
        iterations: Option<usize>,
        ranks: Option<u32>,
    ) -> Result<(), ModelError> {
        let is_plain = matches!(format, OutputFormat::Table | OutputFormat::Json);
        if (self.latency_targets || self.overlap) && !is_plain {
            let flag = if self.overlap { "--overlap" } else { "--latency-targets" };
            return Err(Error::Configuration(format!(
                "{flag} prints a table or JSON: pass --format table or json"
            ))
            .into());
        }
        if self.overlap {
            self.overlap_request(iterations, Memory::Host).check()?;
        }
        match ranks {
            Some(1) if self.overlap => Err(Error::Configuration(
                "--overlap: one rank alone has nothing to reduce; pass --world-size 2 or more".into(),
            )
            .into()),
            Some(ranks) if self.latency_targets => self.steps(iterations, Memory::Host).check(ranks as usize),
            _ => Ok(()),
        }
    }

    fn steps(&self, iterations: Option<usize>, memory: Memory) -> StepRequest {
        let usual = StepRequest::usual(memory);
        let batches = self.batches.as_ref().map(|all| all.iter().copied().map(usize::from).collect());
        StepRequest {
            shapes: self.shapes.clone().unwrap_or(usual.shapes),
            layers: self.layers.map_or(usual.layers, usize::from),
            batches: batches.unwrap_or(usual.batches),
            steps: iterations.unwrap_or(usual.steps),
            ..usual
        }
    }

    fn overlap_request(&self, iterations: Option<usize>, memory: Memory) -> OverlapRequest {
        let usual = OverlapRequest::usual(memory);
        OverlapRequest {
            bytes: self.gradients.map_or(usual.bytes, ByteSize::get),
            parameters: self.parameters.map_or(usual.parameters, usize::from),
            kind: self.compute.map_or(usual.kind, Kind::from),
            steps: iterations.unwrap_or(usual.steps),
        }
    }

    /// The steps of a model's layers, if they are wanted and there are ranks to shard them over.
    pub(super) fn measure_steps(
        &self,
        orchestrator: &mut Orchestrator,
        iterations: Option<usize>,
        link_gbs: Option<f64>,
        on_row: impl FnMut(&StepRow),
    ) -> Result<Option<(Vec<StepRow>, Surroundings)>, ModelError> {
        let group = orchestrator.manager().world();
        if !self.latency_targets || group.world_size() < 2 {
            return Ok(None);
        }
        let request = self.steps(iterations, group.memory());
        let rows = steps::run(orchestrator, &request, on_row)?;
        Ok(Some((rows, steps::surroundings(orchestrator, link_gbs))))
    }

    /// Measures and prints what overlapping saves.
    pub(super) fn measure_overlap(
        &self,
        orchestrator: &mut Orchestrator,
        iterations: Option<usize>,
        format: OutputFormat,
        screen: &screen::Args,
    ) -> anyhow::Result<()> {
        let memory = orchestrator.manager().world().memory();
        let request = self.overlap_request(iterations, memory);
        let report = overlap::run(orchestrator, &request)?;
        if orchestrator.manager().rank() == Rank(0) {
            let text = match format {
                OutputFormat::Json => report.json(),
                _ => report.text(screen.stdout()),
            };
            // A reader that has closed the pipe does not fail the measurement.
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
        }
        if report.is_correct() { Ok(()) } else { bail!("the benchmark found wrong values") }
    }
}
