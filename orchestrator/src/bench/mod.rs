//! `ryz bench`: measures collectives at many sizes, checks every value, and compares with the documented targets.

mod calibration;
mod compare;
mod format;
mod html;
pub(crate) mod limits;
mod plot;
mod report;
mod rows;
mod sizes;
mod verdict;
mod why;

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{Device, DeviceError, peer_copy_gbs};
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::targets::target;
use ryzanstein_process_group::{BackendKind, DType, Error, LocalRank, Memory, ProcessGroup, ReduceOp};
use serde::Serialize;

use crate::Orchestrator;
use crate::measure::{Case, Collective, Figures, Summary, measure_group};

pub use calibration::{Calibration, Shape};
pub use compare::{Change, Comparison, Earlier};
pub use format::Format;
pub use limits::{MOST_BYTES, MOST_CALLS};
pub use report::Report;
pub use rows::{Columns, RowWriter, csv_head, csv_row, json, table};
pub use sizes::Sweep;
pub use verdict::{Verdict, saturation, verdicts};
pub use why::{Rejected, Why};

/// What to measure.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Request {
    /// The operations.
    pub ops: Vec<Collective>,
    /// Sizes of the whole array, in bytes.
    pub sizes: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// The reduction, for operations that reduce.
    pub reduction: ReduceOp,
    /// Untimed calls; `None` takes a tenth of the timed ones.
    pub warmup: Option<usize>,
    /// Timed calls; `None` chooses by size.
    pub iterations: Option<usize>,
    /// Whether calls are captured in a CUDA graph, and the graph is timed.
    pub graph: bool,
    /// Measure operations that have both forms out of place too.
    pub out_of_place: bool,
    /// Names of paths; `auto` is the backend's own choice, `all` every path.
    pub paths: Vec<String>,
    /// Say of each row why its calls went that way and no other.
    pub why: bool,
    /// Compare with the documented targets, which are for GPUs.
    pub judged: bool,
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
    /// Ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: BackendKind,
    /// The path of the calls.
    pub path: String,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
    /// 99th percentile of the same.
    pub p99_us: f64,
    /// Bytes divided by median latency, in 10⁹ bytes per second.
    pub algbw_gbs: f64,
    /// The same × the operation's traffic factor.
    pub busbw_gbs: f64,
    /// Wrong elements, over all ranks and calls.
    pub errors: u64,
    /// The documented target in microseconds, if there is one.
    pub target_us: Option<f64>,
    /// Whether the median is below it and every value was right.
    pub meets_target: Option<bool>,
    /// The share of what one link carries that the bus bandwidth is, where that is known; above 1 where payloads do not go over
    /// links.
    pub link_share: Option<f64>,
    /// How long the call should take by the cost model of its path, in microseconds; `None` where no model applies.
    pub expected_us: Option<f64>,
    /// How much longer the median is than that, in percent of it.
    pub expected_error_percent: Option<f64>,
    /// 25th percentile of the latency.
    pub p25_us: f64,
    /// 75th percentile of the latency.
    pub p75_us: f64,
    /// Timed calls.
    pub calls: usize,
    /// Why the calls went that way, where that was asked for: the keys `reason` and `rejected`.
    #[serde(flatten)]
    pub why: Option<Why>,
    /// The operation.
    #[serde(skip)]
    pub what: Collective,
    /// All percentiles.
    #[serde(skip)]
    pub latency: Summary,
    /// Median time until the call returned to the host, in microseconds.
    #[serde(skip)]
    pub host_us: f64,
    /// Whether the path was forced, not the backend's own choice.
    #[serde(skip)]
    pub is_forced: bool,
}

impl Row {
    /// From the figures of one case, `judged` by the documented targets or not. There are none for a single rank, which sends
    /// nothing.
    pub fn new(
        case: &Case,
        figures: &Figures,
        group: &ProcessGroup,
        calibration: &Calibration,
        judged: bool,
        is_forced: bool,
    ) -> Self {
        let Figures { bytes, latency, host_us, path, errors } = *figures;
        let world_size = group.world_size();
        let (algbw_gbs, busbw_gbs) = case.what.bandwidths(bytes, latency.median_us, world_size);
        let goal = target(case.what.name(), bytes as u64).filter(|_| judged && world_size > 1);
        let shape = Shape { ranks: world_size, count: case.count(world_size) };
        let operation = case.what.operation(case.reduction);
        let expected_us = path.and_then(|path| calibration.expected_us(path, operation, case.dtype, shape));
        Self {
            op: label(case.what, case.reduction, case.out_of_place),
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
            link_share: calibration.link_gbs.filter(|_| busbw_gbs > 0.0).map(|link| busbw_gbs / link),
            expected_us,
            expected_error_percent: expected_us.map(|expected| (latency.median_us / expected - 1.0) * 100.0),
            p25_us: latency.p25_us,
            p75_us: latency.p75_us,
            calls: latency.calls,
            why: None,
            what: case.what,
            latency,
            host_us,
            is_forced,
        }
    }

    /// The label of the curve to which this row belongs.
    pub fn label(&self) -> String {
        if self.is_forced { format!("{} {}", self.op, self.path) } else { self.op.clone() }
    }
}

/// The name of an operation, with `_into` if it is called out of place (where it has both forms), and with its reduction if
/// that is not a sum.
pub fn label(what: Collective, reduction: ReduceOp, out_of_place: bool) -> String {
    let form = if out_of_place && what.has_both_places() { "_into" } else { "" };
    if what.reduces() && reduction != ReduceOp::Sum {
        format!("{what}{form}({reduction})")
    } else {
        format!("{what}{form}")
    }
}

/// Refuses what cannot be measured here, then probes the group. Every rank calls this with the same request, before [`run`].
///
/// # Errors
/// [`Error::Configuration`] for a path that the backend does not have, a graph on a backend without graphs, or arrays that do not
/// fit the memory; and those of the collectives.
pub fn calibrate(
    orchestrator: &mut Orchestrator,
    request: &Request,
    link_gbs: Option<f64>,
) -> Result<Calibration, Error> {
    request.check()?;
    let manager = orchestrator.manager();
    let ranks_here = manager.roster().local_world_size(manager.rank());
    let group = manager.world();
    check_graph_support(request.graph, group.backend())?;
    if group.memory() == Memory::Host {
        request.check_memory(ranks_here, limits::host_memory())?;
    }
    choose_paths(&request.paths, &group.paths())?;
    Calibration::probe(group, request.graph, link_gbs)
}

/// Measures everything in the request, and tells what it expects by the calibration; calls `on_row` for each row as soon as it is measured. Every rank calls this with the
/// same request.
///
/// # Errors
/// [`Error::Configuration`] for a path that the backend does not have, or values that cannot be checked exactly; and those of the
/// collectives.
pub fn run(
    orchestrator: &mut Orchestrator,
    request: &Request,
    calibration: &Calibration,
    mut on_row: impl FnMut(&Row) -> Result<(), Error>,
) -> Result<Vec<Row>, Error> {
    let group = orchestrator.manager().world();
    let paths = choose_paths(&request.paths, &group.paths())?;
    let mut rows = Vec::new();
    for &what in &request.ops {
        // A barrier has no data, so it has one size.
        let sizes = if what == Collective::Barrier { &[0][..] } else { &request.sizes };
        let places: &[bool] = match what.is_out_of_place() {
            usual if request.out_of_place && what.has_both_places() => &[usual, !usual],
            true => &[true],
            false => &[false],
        };
        let variants = paths.iter().flat_map(|path| places.iter().map(|place| (*path, *place)));
        for &bytes in sizes {
            for (path, out_of_place) in variants.clone() {
                let usual = case(request, what, bytes, group.memory() == Memory::Host);
                let case = Case { out_of_place, ..usual };
                if group.world_size() > 1 {
                    group.force_path(path)?;
                }
                let figures = measure_group(group, request.graph, &case)?;
                // An operation that does not have the forced path takes another, whose figures do not belong here; but wrong
                // values are always reported.
                if path.is_some() && figures.path != path && group.world_size() > 1 && figures.errors == 0 {
                    continue;
                }
                let mut row = Row::new(&case, &figures, group, calibration, request.judged, path.is_some());
                if request.why {
                    let operation = what.operation(case.reduction);
                    let choice = group.explain(operation, case.dtype, case.count(group.world_size()))?;
                    row.why = Some(choice.into());
                }
                on_row(&row)?;
                rows.push(row);
            }
        }
    }
    if group.world_size() > 1 {
        group.force_path(None)?;
    }
    if rows.is_empty() {
        return Err(Error::Configuration(format!(
            "nothing was measured: none of the operations has --path {}; `--path all` shows the paths of each",
            request.paths.join(",")
        )));
    }
    Ok(rows)
}

/// The bandwidth of a copy between the first two GPUs of a group, in 10⁹ bytes per second: the reference for the bus bandwidth of
/// a ring. The same on all ranks; `None` without two GPUs on one host with peer access.
fn copy_gbs(group: &mut ProcessGroup) -> Result<Option<f64>, Error> {
    let mut gbs: Option<f64> = None;
    if group.rank().0 == 0 && group.world_size() > 1 {
        gbs = group.device().and_then(|device| {
            copy_to_next(device).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot measure the bandwidth of the links");
                None
            })
        });
    }
    let all = group.all_gather_object(&gbs)?;
    Ok(all.into_iter().next().flatten())
}

fn copy_to_next(device: &Device) -> Result<Option<f64>, DeviceError> {
    // Only GPUs visible to this process can be copied to; a rank that sees only its own GPU has no other.
    let next = LocalRank(device.ordinal() + 1);
    if device.libraries().device_count()? <= next.0 {
        return Ok(None);
    }
    let next = Device::open(device.libraries(), next, &DeviceConfig::default())?;
    peer_copy_gbs(device, &next)
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

fn case(request: &Request, what: Collective, bytes: u64, is_host: bool) -> Case {
    let iterations = request.iterations.unwrap_or_else(|| sizes::iterations(bytes, is_host));
    let usual = Case::new(what, usize::try_from(bytes).unwrap_or(usize::MAX), iterations);
    Case {
        reduction: request.reduction,
        dtype: request.dtype,
        warmup: request.warmup.unwrap_or(usual.warmup),
        ..usual
    }
}

/// The paths that `--path` selects on a group with these paths. `None` is the backend's own choice.
fn choose_paths(names: &[String], there: &[Path]) -> Result<Vec<Option<Path>>, Error> {
    let mut chosen: Vec<Option<Path>> = Vec::new();
    for name in names {
        match name.as_str() {
            "auto" => chosen.push(None),
            "all" => {
                chosen.push(None);
                chosen.extend(there.iter().copied().map(Some));
            }
            name => {
                // `ring` is short for `tcp/ring`.
                let is_it = |full: &str| full == name || full.rsplit('/').next() == Some(name);
                let path = there.iter().find(|path| is_it(&path.to_string()));
                chosen.push(Some(*path.ok_or_else(|| {
                    let names: Vec<String> = there.iter().map(ToString::to_string).collect();
                    Error::Configuration(format!(
                        "--path {name}: there is no such path here; expected auto, all, or some of {}, separated by commas",
                        names.join(", ")
                    ))
                })?));
            }
        }
    }
    let mut kept = Vec::new();
    chosen.retain(|path| {
        !kept.contains(path) && {
            kept.push(*path);
            true
        }
    });
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ryzanstein_process_group::schedule::Algorithm;

    /// A row of four ranks.
    pub(super) fn row(what: Collective, bytes: usize, median_us: f64) -> Row {
        wrong_row(what, bytes, median_us, 0)
    }

    /// The same with so many wrong elements.
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
        Row::new(&Case::new(what, bytes, 10), &figures, &group, &Calibration::default(), true, false)
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
    fn paths_are_named_in_full_or_by_their_last_word() {
        let there: Vec<Path> = Algorithm::ALL.into_iter().map(Path::Tcp).collect();
        let choose =
            |names: &[&str]| choose_paths(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), &there);
        let ring = Some(Path::Tcp(Algorithm::Ring));
        assert_eq!(choose(&["auto"]).unwrap(), [None]);
        assert_eq!(choose(&["ring", "tcp/ring", "auto"]).unwrap(), [ring, None]);
        assert_eq!(choose(&["all"]).unwrap().len(), 5);
        let error = choose(&["rign"]).unwrap_err().to_string();
        assert!(error.contains("--path rign") && error.contains("tcp/ring"), "{error}");
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
