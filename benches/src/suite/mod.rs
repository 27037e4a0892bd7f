//! `ryz bench`: measures collectives at many sizes, checks every value, and compares with the documented targets.

mod format;
mod html;
pub mod limits;
pub mod link;
pub mod overlap;
mod paths;
mod plot;
mod recorded;
mod report;
mod rows;
mod run;
mod side_by_side;
mod sizes;
mod start;
pub mod steps;
mod vary;
mod verdict;

use std::time::{Duration, Instant};

use ryzanstein_process_group::paths::PathChoice;
use ryzanstein_process_group::targets::target;
use ryzanstein_process_group::{BackendKind, DType, Error, Memory, ProcessGroup, Rank, ReduceOp};
use serde::Serialize;

use crate::measure::{Case, Collective, CollectiveForm, Figures, Summary};
use paths::paths_of;
use ryzanstein_orchestrator::Orchestrator;

pub use format::Format;
pub use limits::{MOST_BYTES, MOST_CALLS};
pub use recorded::{RecordedRow, parse_rows};
pub use report::Report;
pub use rows::{Columns, RowWriter, csv_head, csv_row, json, table};
pub use run::{Event, run};
pub use side_by_side::side_by_side;
pub use sizes::Sweep;
pub use vary::{ROUNDS, Start, Variant, Vary};
pub use verdict::{Verdict, saturation, verdicts};

/// Time for which ranks on CPUs make calls before the first row: the system starts several on one processor, and spreads them only
/// while they are busy.
const SPREAD: Duration = Duration::from_millis(300);

/// A request for measurements.
#[derive(Clone, Debug)]
pub struct Request {
    /// The operations.
    pub ops: Vec<CollectiveForm>,
    /// Sizes of the whole array, in bytes.
    pub sizes: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// The reduction, for operations that reduce.
    pub reduction: ReduceOp,
    /// Number of untimed calls; `None` takes a tenth of the timed ones.
    pub warmup: Option<usize>,
    /// Number of timed calls; `None` chooses by size.
    pub iterations: Option<usize>,
    /// True if calls are captured in a CUDA graph, and the graph is timed.
    pub graph: bool,
    /// Names of paths; `auto` is the backend's own choice, `all` every path.
    pub paths: Vec<String>,
    /// True to compare with the documented targets, which are for GPUs.
    pub judged: bool,
    /// The variant and round of these ranks, if several are compared.
    pub part: Option<Part>,
}

/// One variant in one round.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The name of the variant.
    pub variant: String,
    /// The round, from 1.
    pub round: usize,
    /// The state that the calls start from, if that is varied.
    pub start: Option<Start>,
}

/// One row of the result. It serialises to the documented line of JSON.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// The name of the operation, with its reduction if that is not a sum. It ends with `_into` for calls out of place.
    pub op: String,
    /// Element type.
    pub dtype: DType,
    /// Bytes of the whole array.
    pub bytes: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: BackendKind,
    /// The path of the calls.
    pub path: String,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
    /// 99th percentile of the same latency.
    pub p99_us: f64,
    /// Bytes divided by median latency, in 10⁹ bytes per second.
    pub algbw_gbs: f64,
    /// `algbw_gbs` × the operation's traffic factor.
    pub busbw_gbs: f64,
    /// Wrong elements, over all ranks and calls.
    pub errors: u64,
    /// The documented target in microseconds, if there is one.
    pub target_us: Option<f64>,
    /// True if the median is below the target and every value was right.
    pub meets_target: Option<bool>,
    /// The bus bandwidth as a share of the bandwidth of one link, where that is known; above 1 where payloads do not go over
    /// links.
    pub link_share: Option<f64>,
    /// Expected time of the call by the cost model, in microseconds; `None` where no model applies.
    pub expected_us: Option<f64>,
    /// Difference of the median from the expected time, in percent of the latter.
    pub expected_error_percent: Option<f64>,
    /// 25th percentile of the latency.
    pub p25_us: f64,
    /// 75th percentile of the latency.
    pub p75_us: f64,
    /// Number of timed calls.
    pub calls: usize,
    /// True if a CUDA graph replayed the calls.
    pub graph: bool,
    /// The variant, where several are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// The round of the variants, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub round: Option<usize>,
    /// The reason for the path of the calls. `None` for a single rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The operation.
    #[serde(skip)]
    pub what: Collective,
    /// All percentiles.
    #[serde(skip)]
    pub latency: Summary,
    /// Median time until the call returned to the host, in microseconds.
    #[serde(skip)]
    pub host_us: f64,
    /// True if the path was forced, and is not the backend's own choice.
    #[serde(skip)]
    pub is_forced: bool,
}

impl Row {
    /// Creates a row from the figures of one case, `judged` by the documented targets or not. A single rank, which sends
    /// nothing, has no targets.
    pub fn new(
        case: &Case,
        figures: &Figures,
        group: &ProcessGroup,
        link_gbs: Option<f64>,
        judged: bool,
        is_forced: bool,
    ) -> Self {
        let Figures { bytes, latency, host_us, path, errors, .. } = *figures;
        let world_size = group.world_size();
        let (algbw_gbs, busbw_gbs) = case.what.bandwidths(bytes, latency.median_us, world_size);
        let goal = target(case.what.name(), bytes as u64).filter(|_| judged && world_size > 1);
        Self {
            op: label(case.form(), case.reduction),
            dtype: case.dtype,
            bytes,
            world_size,
            backend: group.backend(),
            path: path.map_or_else(|| "-".into(), |path| path.to_string()),
            median_us: latency.median_us,
            p99_us: latency.p99_us,
            algbw_gbs,
            busbw_gbs,
            errors,
            target_us: goal.map(|goal| goal.below_us),
            meets_target: goal.map(|goal| errors == 0 && latency.median_us < goal.below_us),
            link_share: link_gbs.filter(|_| busbw_gbs > 0.0).map(|link| busbw_gbs / link),
            expected_us: None,
            expected_error_percent: None,
            p25_us: latency.p25_us,
            p75_us: latency.p75_us,
            calls: latency.calls,
            graph: false,
            variant: None,
            round: None,
            reason: None,
            what: case.what,
            latency,
            host_us,
            is_forced,
        }
    }

    /// Adds the reason for the path of the calls, and their expected time: on GPUs by the bandwidth of a link.
    fn explain(&mut self, case: &Case, choice: &PathChoice, link_gbs: Option<f64>) {
        self.reason = Some(choice.reason.clone());
        let (operation, count) = (case.what.operation(case.reduction), case.count(self.world_size));
        let on_gpus =
            |gbs| link::gpu_seconds(choice.path, operation, case.dtype, self.world_size, count, gbs);
        let expected = choice.expected.map(|time| time.as_secs_f64()).or_else(|| on_gpus(link_gbs?));
        self.expected_us = expected.map(|seconds| seconds * 1e6);
        self.expected_error_percent = self.expected_us.map(|us| (self.median_us / us - 1.0) * 100.0);
    }

    /// Returns the label of the curve to which this row belongs.
    pub fn label(&self) -> String {
        if self.is_forced { format!("{} {}", self.op, self.path) } else { self.op.clone() }
    }
}

/// Returns the name of an operation, with its reduction if that is not a sum.
pub fn label(form: CollectiveForm, reduction: ReduceOp) -> String {
    if form.what.reduces() && reduction != ReduceOp::Sum {
        format!("{form}({reduction})")
    } else {
        form.to_string()
    }
}

/// Refuses requests that cannot be measured here, spreads ranks on CPUs over the processors, then measures the bandwidth of a link in
/// 10⁹ bytes per second, unless variants are compared. Every rank calls this with the same request, before [`run()`].
///
/// # Errors
/// Returns [`Error::Configuration`] for a path that the backend does not have, a graph on a backend without graphs, or arrays
/// that do not fit the memory; and the errors of the collectives.
pub fn prepare(orchestrator: &mut Orchestrator, request: &Request) -> Result<Option<f64>, Error> {
    request.check()?;
    let manager = orchestrator.manager();
    let ranks_here = manager.roster().local_world_size(manager.rank());
    let group = manager.world();
    check_graph_support(request.graph, group.backend())?;
    if group.memory() == Memory::Host {
        request.check_memory(ranks_here, limits::host_memory())?;
        if group.world_size() > 1 {
            spread(group)?;
        }
    }
    if request.part.is_some() {
        // A variant without its path is left out.
        return Ok(None);
    }
    paths_of(&request.paths, group)?;
    if group.memory() != Memory::Host && ranks_here < group.world_size() {
        // The slowest link is between the hosts, and only one within a host can be measured.
        return Ok(None);
    }
    link::measure_link(group)
}

/// Makes calls for about [`SPREAD`]. Rank 0 decides when to stop, so all ranks make the same number.
fn spread(group: &mut ProcessGroup) -> Result<(), Error> {
    let started = Instant::now();
    let mut is_over = [0u8];
    while is_over == [0] {
        for _ in 0..10 {
            group.barrier()?;
        }
        is_over = [u8::from(started.elapsed() >= SPREAD)];
        group.broadcast(&mut is_over, Rank(0))?;
    }
    Ok(())
}

/// Refuses a graph on a backend without graphs.
///
/// # Errors
/// [`Error::Configuration`] with the reason.
pub fn check_graph_support(wanted: bool, backend: BackendKind) -> Result<(), Error> {
    if wanted && backend != BackendKind::Nccl {
        return Err(Error::Configuration(format!(
            "--graph times collectives that a GPU replays from a CUDA graph, but the {backend} backend works on host memory; \
             use --backend nccl on a machine with GPUs, or omit --graph"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ryzanstein_process_group::paths::Path;
    use ryzanstein_process_group::schedule::Algorithm;

    /// Returns a row of four ranks.
    pub(super) fn row(what: Collective, bytes: usize, median_us: f64) -> Row {
        wrong_row(what, bytes, median_us, 0)
    }

    /// Returns the same row with this number of wrong elements.
    pub(super) fn wrong_row(what: Collective, bytes: usize, median_us: f64, errors: u64) -> Row {
        let latency = Summary {
            calls: 10,
            p25_us: median_us,
            median_us,
            p75_us: median_us,
            p90_us: median_us,
            p99_us: median_us * 2.0,
            max_us: median_us * 2.0,
        };
        let path = Some(Path::Tcp(Algorithm::Ring));
        let figures = Figures { bytes, latency, host_us: median_us, path, errors };
        let group = ProcessGroup::loopback(4).remove(0);
        Row::new(&Case::new(what, bytes, 10), &figures, &group, None, true, false)
    }

    #[test]
    fn a_row_has_the_bandwidths_and_the_target_of_its_operation() {
        let reduced = row(Collective::AllReduce, 100_000_000, 1e5);
        assert_eq!((reduced.algbw_gbs, reduced.busbw_gbs), (1.0, 1.5));
        assert_eq!((reduced.target_us, reduced.meets_target), (Some(10_000.0), Some(false)));
        let gathered = row(Collective::AllGather, 100_000_000, 1e5);
        assert_eq!((gathered.busbw_gbs, gathered.target_us, gathered.meets_target), (0.75, None, None));
        let barrier = row(Collective::Barrier, 0, 5.0);
        assert_eq!((barrier.algbw_gbs, barrier.busbw_gbs), (0.0, 0.0));
    }

    #[test]
    fn a_call_with_wrong_values_meets_no_target_however_quick_it_is() {
        let quick = |errors| wrong_row(Collective::AllReduce, 100_000, 1.0, errors).meets_target;
        assert_eq!((quick(0), quick(1)), (Some(true), Some(false)));
    }

    #[test]
    fn a_graph_on_host_memory_is_refused_with_the_reason() {
        assert!(
            check_graph_support(false, BackendKind::Tcp).is_ok()
                && check_graph_support(true, BackendKind::Nccl).is_ok()
        );
        let error = check_graph_support(true, BackendKind::Tcp).unwrap_err().to_string();
        assert!(
            error.contains("CUDA graph") && error.contains("tcp") && error.contains("--backend nccl"),
            "{error}"
        );
    }
}
