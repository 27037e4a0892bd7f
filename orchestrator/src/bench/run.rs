//! Measures what a request asks for, row by row.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, Memory, ProcessGroup, ProcessGroupManager, Rank, Roster};

use super::paths::{expected_path, paths_of};
use super::recorded::{Recorded, RowKey};
use super::{Calibration, Request, Row, Start, label, sizes, start};
use crate::Orchestrator;
use crate::measure::{Case, Collective, Samples, sample_group};

/// Calls by default, where each starts a group or more.
const STARTS: usize = 10;

/// What happens while rows are measured.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A row is going to be measured.
    Next {
        /// Its number, from 1.
        number: usize,
        /// How many there are.
        of: usize,
        /// The operation, as rows name it.
        op: &'a str,
        /// Bytes that were asked for.
        bytes: usize,
    },
    /// A row was recorded before, and is not measured again.
    Known,
    /// The path of a variant is not there, so it is left out.
    Absent {
        /// The variant.
        variant: &'a str,
        /// Why the path is not there.
        why: &'a str,
    },
    /// A row has been measured.
    Row(&'a Row),
}

/// One row to measure.
struct Step {
    case: Case,
    /// The path that is forced, if one is.
    path: Option<Path>,
}

/// Measures everything in the request, and tells what it expects by the calibration; calls `tell` for each [`Event`]. Rows that
/// rank 0 passes in `recorded` are left out; all ranks pass it or none does. Every rank calls this with the same request.
///
/// # Errors
/// [`Error::Configuration`] for a path that the backend does not have, or values that cannot be checked exactly; and those of the
/// collectives and of `tell`.
pub fn run<E: From<Error>>(
    orchestrator: &mut Orchestrator,
    request: &Request,
    calibration: &Calibration,
    mut recorded: Option<Recorded>,
    mut tell: impl FnMut(Event<'_>) -> Result<(), E>,
) -> Result<Vec<Row>, E> {
    let manager = orchestrator.manager();
    let one_host = is_one_host(manager.roster());
    let mut own = own_group(manager, request.groups)?;
    let group = team(&mut own, manager);
    let paths = match (paths_of(&request.paths, group), &request.part) {
        (Err(Error::Configuration(why)), Some(part)) => {
            tell(Event::Absent { variant: &part.variant, why: &why })?;
            return Ok(Vec::new());
        }
        (paths, _) => paths?,
    };
    let steps = steps(request, &paths, group.memory() == Memory::Host);
    let (mut rows, mut is_any_known) = (Vec::new(), false);
    for (index, Step { case, path }) in steps.iter().enumerate() {
        let op = label(case.what, case.reduction, case.out_of_place);
        tell(Event::Next { number: index + 1, of: steps.len(), op: &op, bytes: case.bytes })?;
        let group = team(&mut own, orchestrator.manager());
        if group.world_size() > 1 {
            group.force_path(*path)?;
        }
        if let Some(recorded) = &mut recorded {
            let expected = expected_path(group, case)?;
            // No row is kept of an operation that does not have the forced path.
            let may_be_known = path.is_none() || expected == *path || group.world_size() == 1;
            let is_known = may_be_known && recorded.take(&key(group, request, case, expected));
            if orchestrator.manager().world().broadcast_object(Some(&is_known), Rank(0))? {
                is_any_known = true;
                tell(Event::Known)?;
                continue;
            }
        }
        let figures = sample(orchestrator, &mut own, request, case)?.figures();
        let group = team(&mut own, orchestrator.manager());
        // An operation that does not have the forced path takes another, whose figures do not belong here; but wrong
        // values are always reported.
        if path.is_some() && figures.path != *path && group.world_size() > 1 && figures.errors == 0 {
            continue;
        }
        let mut row = Row::new(case, &figures, group, calibration, request.judged, path.is_some());
        (row.groups, row.graph) = (request.groups, request.graph);
        if let Some(skew) = figures.skew.filter(|_| one_host) {
            (row.skew_us, row.skew_p99_us) = (Some(skew.median_us), Some(skew.p99_us));
        }
        if let Some(part) = &request.part {
            (row.variant, row.round) = (Some(part.variant.clone()), Some(part.round));
        }
        if request.why {
            let operation = case.what.operation(case.reduction);
            let choice = group.explain(operation, case.dtype, case.count(group.world_size()))?;
            row.why = Some(choice.into());
        }
        tell(Event::Row(&row))?;
        rows.push(row);
    }
    let world = orchestrator.manager().world();
    if world.world_size() > 1 {
        world.force_path(None)?;
    }
    if rows.is_empty() && !is_any_known && request.part.is_none() {
        return Err(Error::Configuration(format!(
            "nothing was measured: none of the operations has --path {}; `--path all` shows the paths of each",
            request.paths.join(",")
        ))
        .into());
    }
    Ok(rows)
}

/// Whether all ranks share a host, and so a clock.
fn is_one_host(roster: &Roster) -> bool {
    roster.members.windows(2).all(|pair| pair[0].host == pair[1].host)
}

/// Whether rows say how far apart the ranks entered a call: on host memory, among ranks that share a clock.
pub fn measures_skew(manager: &mut ProcessGroupManager) -> bool {
    is_one_host(manager.roster()) && manager.world().memory() == Memory::Host
}

/// Every row that the request asks for.
fn steps(request: &Request, paths: &[Option<Path>], is_host: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    for &what in &request.ops {
        // A barrier has no data, so it has one size.
        let sizes = if what == Collective::Barrier { &[0][..] } else { &request.sizes };
        let places: &[bool] = match what.is_out_of_place() {
            usual if request.out_of_place && what.has_both_places() => &[usual, !usual],
            true => &[true],
            false => &[false],
        };
        for &bytes in sizes {
            let usual = case(request, what, bytes, is_host);
            let variants = paths.iter().flat_map(|path| places.iter().map(|place| (*path, *place)));
            steps.extend(
                variants.map(|(path, out_of_place)| Step { case: Case { out_of_place, ..usual }, path }),
            );
        }
    }
    steps
}

fn case(request: &Request, what: Collective, bytes: u64, is_host: bool) -> Case {
    let start = request.part.as_ref().and_then(|part| part.start);
    let iterations = request.iterations.unwrap_or_else(|| match start {
        Some(Start::NewGroup | Start::Initialize) => STARTS,
        Some(Start::Reuse) | None => sizes::iterations(bytes, is_host),
    });
    let usual = Case::new(what, usize::try_from(bytes).unwrap_or(usize::MAX), iterations);
    Case {
        reduction: request.reduction,
        dtype: request.dtype,
        warmup: request.warmup.unwrap_or(usual.warmup),
        ..usual
    }
}

/// What the row of a case will be of, if its calls take this path.
fn key(group: &ProcessGroup, request: &Request, case: &Case, path: Option<Path>) -> RowKey {
    RowKey {
        op: label(case.what, case.reduction, case.out_of_place),
        dtype: case.dtype.to_string(),
        bytes: case.array_bytes(group.world_size()),
        world_size: group.world_size(),
        backend: group.backend().to_string(),
        path: path.map_or_else(|| "-".into(), |path| path.to_string()),
        groups: request.groups,
        graph: request.graph,
        variant: request.part.as_ref().map(|part| part.variant.clone()),
        round: request.part.as_ref().map(|part| part.round),
    }
}

/// The group of this rank's own, if the ranks are divided into several: neighbours are together.
fn own_group(manager: &mut ProcessGroupManager, groups: usize) -> Result<Option<ProcessGroup>, Error> {
    if groups == 1 {
        return Ok(None);
    }
    let (rank, all) = (manager.rank().index(), manager.roster().world_size());
    let size = all / groups;
    let first = rank / size * size;
    let members: Vec<Rank> = Rank::all(all).skip(first).take(size).collect();
    manager.new_group(&members)
}

/// The group that is measured: this rank's own, or the world.
fn team<'a>(own: &'a mut Option<ProcessGroup>, manager: &'a mut ProcessGroupManager) -> &'a mut ProcessGroup {
    match own {
        Some(own) => own,
        None => manager.world(),
    }
}

/// The samples of a case, of all groups that call at the same time.
fn sample(
    orchestrator: &mut Orchestrator,
    own: &mut Option<ProcessGroup>,
    request: &Request,
    case: &Case,
) -> Result<Samples, Error> {
    if let Some(start) = request.part.as_ref().and_then(|part| part.start) {
        return start::sample(orchestrator, start, case);
    }
    let world = orchestrator.manager().world();
    let Some(own) = own else { return sample_group(world, request.graph, case) };
    // All groups begin together.
    world.barrier()?;
    let mine = sample_group(own, request.graph, case)?;
    // Every rank of a group has the same.
    let told = (own.rank() == Rank(0)).then_some(mine.clone());
    let all = world.all_gather_object(&told)?.into_iter().flatten().collect();
    Ok(Samples::together(all).unwrap_or(mine))
}
