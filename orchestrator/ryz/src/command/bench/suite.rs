//! `ryz bench --latency-targets` and `ryz bench --vary overlap`.

use anyhow::bail;
use ryzanstein_benches::communication::JobContext;
use ryzanstein_benches::measure::Collective;
use ryzanstein_benches::suite::Format;
use ryzanstein_benches::suite::Request;
use ryzanstein_benches::suite::overlap::{self, OverlapRequest};
use ryzanstein_benches::suite::steps::{self, StepRequest, StepRow};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_process_group::targets::TARGETS;
use ryzanstein_process_group::{Error, Memory, Rank};
use ryzanstein_tensor_parallel::Error as ModelError;

use crate::command::screen;

/// An all-reduce of this size shows the best bandwidth of GPUs.
const LONG: u64 = 1 << 30;

/// The kind of measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Suite {
    /// The collectives that the flags name.
    Collectives,
    /// Every documented target.
    LatencyTargets,
    /// The share of the reduction of gradients that a backward pass hides.
    Overlap,
}

impl Suite {
    /// Completes the request with the measurements of a suite in place of those of the flags.
    pub(super) fn complete(self, request: Request) -> Request {
        if self != Self::LatencyTargets {
            return request;
        }
        let mut sizes: Vec<u64> = TARGETS.iter().map(|target| target.bytes).collect();
        sizes.dedup();
        let ops = [Collective::AllReduce, Collective::Broadcast].map(Into::into).to_vec();
        Request { ops, sizes, judged: true, ..request }
    }

    /// Completes the request once the memory of the collectives is known.
    pub(super) fn place(self, mut request: Request, memory: Memory) -> Request {
        if self == Self::LatencyTargets && memory != Memory::Host {
            request.sizes.push(LONG);
        }
        request
    }

    /// Refuses recognisably wrong requests before anything is started.
    pub(super) fn check(self, iterations: Option<usize>, ranks: Option<u32>) -> Result<(), ModelError> {
        match ranks {
            Some(1) if self == Self::Overlap => Err(Error::Configuration(
                "--vary overlap: one rank alone has nothing to reduce; pass --world-size 2 or more".into(),
            )
            .into()),
            Some(ranks) if self == Self::LatencyTargets => {
                step_request(iterations, Memory::Host).check(ranks as usize)
            }
            _ => Ok(()),
        }
    }

    /// Measures the steps of a model's layers, if they are requested and there are ranks to shard them over.
    pub(super) fn measure_steps(
        self,
        orchestrator: &mut Orchestrator,
        iterations: Option<usize>,
        link_gbs: Option<f64>,
        on_row: impl FnMut(&StepRow),
    ) -> Result<Option<(Vec<StepRow>, JobContext)>, ModelError> {
        let group = orchestrator.manager().world();
        if self != Self::LatencyTargets || group.world_size() < 2 {
            return Ok(None);
        }
        let request = step_request(iterations, group.memory());
        let rows = steps::run(orchestrator, &request, on_row)?;
        Ok(Some((rows, steps::job_context(orchestrator, link_gbs))))
    }
}

fn step_request(iterations: Option<usize>, memory: Memory) -> StepRequest {
    let usual = StepRequest::usual(memory);
    StepRequest { steps: iterations.unwrap_or(usual.steps), ..usual }
}

/// Measures and prints the gain of overlapping.
pub(super) fn measure_overlap(
    orchestrator: &mut Orchestrator,
    iterations: Option<usize>,
    format: Format,
    screen: &screen::Args,
) -> anyhow::Result<()> {
    let usual = OverlapRequest::usual(orchestrator.manager().world().memory());
    let request = OverlapRequest { steps: iterations.unwrap_or(usual.steps), ..usual };
    let report = overlap::run(orchestrator, &request)?;
    if orchestrator.manager().rank() == Rank(0) {
        let text = match format {
            Format::Json => report.json(),
            _ => report.text(screen.stdout()),
        };
        screen::print(&text);
    }
    if report.is_correct() { Ok(()) } else { bail!("the benchmark found wrong values") }
}
