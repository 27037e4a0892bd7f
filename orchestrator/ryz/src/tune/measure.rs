//! Measures every path of every operation, and then the untuned and the tuned choice in turn.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::paths::tuned::{TunedRange, has_operation};
use ryzanstein_process_group::{DType, Error, Memory, ProcessGroup, ReduceOp, units};

use super::crossover::{Timed, Turn, choose, ranges};
use ryzanstein_benches::measure::{Case, Collective, measure_group, summary};
use ryzanstein_benches::suite::limits;
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::plural;

/// Number of measurements of each path. The medians of the rounds are compared, not those of calls: other activity of the
/// machine slows consecutive calls together.
const ROUNDS: usize = 9;

/// A request for measurements.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// The operations.
    pub ops: Vec<Collective>,
    /// Sizes of the whole array in bytes.
    pub sizes: Vec<u64>,
    /// The day, as `2026-11-22`.
    pub date: String,
}

impl Request {
    /// Returns the operations that may have several paths.
    pub fn operations() -> Vec<Collective> {
        Collective::ALL.into_iter().filter(|what| has_operation(what.name())).collect()
    }

    /// Refuses sizes that cannot be measured.
    ///
    /// # Errors
    /// [`Error::Configuration`] names the size and the reason.
    pub fn check(&self) -> Result<(), Error> {
        if self.sizes.contains(&0) {
            return Err(Error::Configuration("--sizes: a size must be at least one byte".into()));
        }
        limits::check_sizes(&self.sizes)
    }
}

/// The measurements of an operation.
#[derive(Clone, PartialEq, Debug)]
pub struct Sizes {
    /// The operation.
    pub what: Collective,
    /// Its sizes, smallest first.
    pub sizes: Vec<Timed>,
    /// The sizes for which a path was chosen, measured again.
    pub turns: Vec<Turn>,
}

/// The measurements, the same on all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct Tuned {
    /// Number of ranks.
    pub world_size: usize,
    /// True if the ranks use GPUs.
    pub on_gpus: bool,
    /// The measurements of each operation.
    pub operations: Vec<Sizes>,
    /// The lines for the table.
    pub ranges: Vec<TunedRange>,
}

/// Measures everything in the request; `on_step` receives the progress. Every rank calls this with the same request.
///
/// # Errors
/// Returns [`Error::Configuration`] if there is no path to choose, for arrays that do not fit the memory, and for wrong values;
/// and the errors of the collectives.
pub fn run(
    orchestrator: &mut Orchestrator,
    request: &Request,
    on_step: &mut dyn FnMut(&str),
) -> Result<Tuned, Error> {
    let manager = orchestrator.manager();
    let (ranks, here) = (manager.roster().world_size(), manager.roster().local_world_size(manager.rank()));
    if here < ranks {
        return Err(Error::Configuration(
            "a table of paths is for the ranks of one host, and these are on several; start all on one"
                .into(),
        ));
    }
    let group = manager.world();
    let on_gpus = group.memory() != Memory::Host;
    if !on_gpus {
        // All-to-all has two arrays.
        limits::check_fit(&request.sizes, 2, ranks, limits::host_memory())?;
    }
    if group.world_size() < 2 || group.paths().len() < 2 {
        let paths: Vec<String> = group.paths().iter().map(ToString::to_string).collect();
        return Err(Error::Configuration(format!(
            "there is no path to choose: {} with the backend {} have {} alone; use two ranks or more{}",
            plural(ranks, "rank"),
            group.backend(),
            paths.join(", "),
            if on_gpus { ", on GPUs that share memory (`ryz check` says why they do not)" } else { "" }
        )));
    }
    let world_size = group.world_size();
    let mut tuned = Tuned { world_size, on_gpus, operations: Vec::new(), ranges: Vec::new() };
    for &what in &request.ops {
        let operation = what.operation(ReduceOp::Sum);
        if group.paths().iter().filter(|path| path.suits(operation)).count() < 2 {
            on_step(&format!("{what}: it has one path here"));
            continue;
        }
        let measured = measure(group, what, &request.sizes)?;
        let bytes: Vec<u64> = measured.sizes.iter().map(|timed| timed.bytes).collect();
        let lines = ranges(what.name(), tuned.world_size, &request.date, &bytes, &measured.turns);
        on_step(&format!(
            "{what}: {} sizes measured, of which {} on another path are quicker",
            measured.sizes.len(),
            measured.turns.iter().filter(|turn| turn.is_confirmed()).count()
        ));
        tuned.ranges.extend(lines);
        tuned.operations.push(measured);
    }
    group.force_path(None)?;
    Ok(tuned)
}

fn measure(group: &mut ProcessGroup, what: Collective, sizes: &[u64]) -> Result<Sizes, Error> {
    let on_gpus = group.memory() != Memory::Host;
    let mut cases: Vec<Compared> = Vec::new();
    group.force_path(None)?;
    for &bytes in sizes {
        let case = case(what, bytes, on_gpus);
        let operation = what.operation(case.reduction);
        let built_in = group.explain(operation, case.dtype, case.count(group.world_size()))?.path;
        // The built-in path first.
        let others = group.paths().into_iter().filter(|path| path.suits(operation) && *path != built_in);
        cases.push(Compared::new(case, [built_in].into_iter().chain(others).collect()));
    }
    in_turn(group, &mut cases)?;
    // Sizes that are rounded to the same number of elements are one.
    cases.sort_by_key(|compared| compared.bytes);
    cases.dedup_by_key(|compared| compared.bytes);
    let sizes: Vec<Timed> = cases.into_iter().map(Compared::timed).collect();

    let chosen = sizes.iter().zip(choose(&sizes)).filter_map(|(timed, path)| Some((timed, path?)));
    let mut again: Vec<Compared> = chosen
        .map(|(timed, path)| Compared::new(case(what, timed.bytes, on_gpus), vec![timed.built_in, path]))
        .collect();
    in_turn(group, &mut again)?;
    let turn = |compared: Compared| {
        let Timed { bytes, built_in, paths } = compared.timed();
        let [(_, untuned), (path, tuned)] = paths[..] else { return None };
        Some(Turn { bytes, built_in, path, untuned, tuned })
    };
    Ok(Sizes { what, sizes, turns: again.into_iter().filter_map(turn).collect() })
}

/// Returns the case to measure; on GPUs in bf16, as models compute.
fn case(what: Collective, bytes: u64, on_gpus: bool) -> Case {
    // At least four: calls rotate over as many buffers, so that caches are as cold as in real use.
    let calls = (2_000_000 / bytes.max(1)).clamp(4, 30) as usize;
    let dtype = if on_gpus { DType::BF16 } else { DType::F32 };
    Case { dtype, ..Case::new(what, usize::try_from(bytes).unwrap_or(usize::MAX), calls) }
}

/// A size on several paths, of which the first is the built-in one.
struct Compared {
    case: Case,
    /// Bytes of the array, which has whole elements.
    bytes: u64,
    /// Each path with the medians of its rounds, in microseconds.
    paths: Vec<(Path, Vec<f64>)>,
}

impl Compared {
    fn new(case: Case, paths: Vec<Path>) -> Self {
        let paths = paths.into_iter().map(|path| (path, Vec::with_capacity(ROUNDS))).collect();
        Self { case, bytes: 0, paths }
    }

    fn timed(self) -> Timed {
        let built_in = self.paths[0].0;
        let paths = self.paths.into_iter().map(|(path, medians)| (path, summary(medians))).collect();
        Timed { bytes: self.bytes, built_in, paths }
    }
}

/// Measures every size on each of its paths, then all again, each time in the reverse order: a temporary disturbance affects
/// all paths of a size, and shows in the spread of their rounds.
fn in_turn(group: &mut ProcessGroup, cases: &mut [Compared]) -> Result<(), Error> {
    for round in 0..ROUNDS {
        for Compared { case, bytes, paths } in &mut *cases {
            let count = paths.len();
            for index in 0..count {
                let (path, medians) = &mut paths[if round % 2 == 0 { index } else { count - 1 - index }];
                group.force_path(Some(*path))?;
                // On GPUs from graphs, as models make their calls.
                let is_graph = group.memory() != Memory::Host;
                let figures = measure_group(group, is_graph, case)?;
                if figures.errors > 0 {
                    let shown = units::bytes(figures.bytes as f64);
                    let reason = format!("{} values of {} of {shown} are wrong", figures.errors, case.what);
                    return Err(Error::SelfCheck { path: path.to_string(), reason });
                }
                *bytes = figures.bytes as u64;
                medians.push(figures.latency.median_us);
            }
        }
    }
    Ok(())
}
