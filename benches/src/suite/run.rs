//! Measures the rows of a request, one by one.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, Memory};

use super::paths::paths_of;
use super::{Request, Row, Start, label, sizes, start};
use crate::measure::{Case, Collective, CollectiveForm, Figures, measure_group};
use ryzanstein_orchestrator::Orchestrator;

/// Default number of calls if each starts at least one group.
const STARTS: usize = 10;

/// An event during the measurement of rows.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A row is about to be measured.
    Next {
        /// The number of the row, from 1.
        number: usize,
        /// The number of rows.
        of: usize,
        /// The operation, as named in rows.
        op: &'a str,
        /// The requested bytes.
        bytes: usize,
    },
    /// The path of a variant is not available, so the variant is left out.
    Absent {
        /// The variant.
        variant: &'a str,
        /// The reason why the path is not available.
        why: &'a str,
    },
    /// A row has been measured.
    Row(&'a Row),
}

/// One row to measure.
struct Step {
    case: Case,
    /// The forced path, if one is forced.
    path: Option<Path>,
}

/// Measures everything in the request, with the bandwidth of a link from [`prepare`](super::prepare); calls `tell` for each [`Event`].
/// Every rank calls this with the same request.
///
/// # Errors
/// Returns [`Error::Configuration`] for a path that the backend or every operation lacks, or values that cannot be checked exactly;
/// and the errors of the collectives and of `tell`.
pub fn run<E: From<Error>>(
    orchestrator: &mut Orchestrator,
    request: &Request,
    link_gbs: Option<f64>,
    mut tell: impl FnMut(Event<'_>) -> Result<(), E>,
) -> Result<Vec<Row>, E> {
    let group = orchestrator.manager().world();
    let paths = match (paths_of(&request.paths, group), &request.part) {
        (Err(Error::Configuration(why)), Some(part)) => {
            tell(Event::Absent { variant: &part.variant, why: &why })?;
            return Ok(Vec::new());
        }
        (paths, _) => paths?,
    };
    let steps = steps(request, &paths, group.memory() == Memory::Host);
    let measured = measure_rows(orchestrator, request, &steps, link_gbs, &mut tell);
    // The group outlives the request.
    let world = orchestrator.manager().world();
    let released = if world.world_size() > 1 { world.force_path(None) } else { Ok(()) };
    let rows = measured?;
    released?;
    if rows.is_empty() && request.part.is_none() {
        return Err(Error::Configuration(format!(
            "nothing was measured: none of the operations has --path {}; `--path all` shows the paths of each",
            request.paths.join(",")
        ))
        .into());
    }
    Ok(rows)
}

/// Measures each step. A path stays forced.
fn measure_rows<E: From<Error>>(
    orchestrator: &mut Orchestrator,
    request: &Request,
    steps: &[Step],
    link_gbs: Option<f64>,
    tell: &mut impl FnMut(Event<'_>) -> Result<(), E>,
) -> Result<Vec<Row>, E> {
    let mut rows = Vec::new();
    for (index, Step { case, path }) in steps.iter().enumerate() {
        let op = label(case.form(), case.reduction);
        tell(Event::Next { number: index + 1, of: steps.len(), op: &op, bytes: case.bytes })?;
        let group = orchestrator.manager().world();
        if group.world_size() > 1 {
            group.force_path(*path)?;
        }
        let figures = measure(orchestrator, request, case)?;
        let group = orchestrator.manager().world();
        // An operation that does not have the forced path takes another, whose figures do not belong here; but wrong
        // values are always reported.
        if path.is_some() && figures.path != *path && group.world_size() > 1 && figures.errors == 0 {
            continue;
        }
        let mut row = Row::new(case, &figures, group, link_gbs, request.judged, path.is_some());
        row.graph = request.graph;
        if let Some(part) = &request.part {
            (row.variant, row.round) = (Some(part.variant.clone()), Some(part.round));
        }
        if group.world_size() > 1 {
            let operation = case.what.operation(case.reduction);
            let choice = group.explain(operation, case.dtype, case.count(group.world_size()))?;
            row.explain(case, &choice, link_gbs);
        }
        tell(Event::Row(&row))?;
        rows.push(row);
    }
    Ok(rows)
}

/// Returns every row of the request.
fn steps(request: &Request, paths: &[Option<Path>], is_host: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    for &form in &request.ops {
        // A barrier has no data, so it has one size.
        let sizes = if form.what == Collective::Barrier { &[0][..] } else { &request.sizes };
        for &bytes in sizes {
            let case = case(request, form, bytes, is_host);
            steps.extend(paths.iter().map(|path| Step { case, path: *path }));
        }
    }
    steps
}

fn case(request: &Request, form: CollectiveForm, bytes: u64, is_host: bool) -> Case {
    let start = request.part.as_ref().and_then(|part| part.start);
    let iterations = request.iterations.unwrap_or_else(|| match start {
        Some(Start::NewGroup | Start::Initialize) => STARTS,
        Some(Start::Reuse) | None => sizes::iterations(bytes, is_host),
    });
    let usual = Case::new(form.what, usize::try_from(bytes).unwrap_or(usize::MAX), iterations);
    Case {
        reduction: request.reduction,
        dtype: request.dtype,
        out_of_place: form.out_of_place,
        warmup: request.warmup.unwrap_or(usual.warmup),
        ..usual
    }
}

fn measure(orchestrator: &mut Orchestrator, request: &Request, case: &Case) -> Result<Figures, Error> {
    match request.part.as_ref().and_then(|part| part.start) {
        Some(start) => start::measure(orchestrator, start, case),
        None => measure_group(orchestrator.manager().world(), request.graph, case),
    }
}
