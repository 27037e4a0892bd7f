//! `ryz check`: a rank's self-check, and the default job of `ryz launch`.
//!
//! Validates every path by value, compares a sharded Llama block with the unsharded one, and compares latencies of
//! all-reduce and broadcast with the documented targets. On request it compares the bits of a model on several numbers of ranks. A
//! wrong value is a failure; a missed target is a verdict.

mod block;
mod invariant;

use ryzanstein_orchestrator::table::{self, Cell, Column, Screen, Tone};
use ryzanstein_process_group::targets::TARGETS;
use ryzanstein_process_group::{DType, Memory, ProcessGroup, ReduceOp, units};

use ryzanstein_benches::measure::{Case, Collective, measure_group};
use ryzanstein_benches::suite::{Columns, Row, RowWriter};
use ryzanstein_orchestrator::Orchestrator;
use ryzanstein_orchestrator::plural;

/// The checks to make, and the form of the report.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The name of the job.
    pub job: &'a str,
    /// True to compare latencies with the documented targets on CPUs too. The targets are for GPUs.
    pub targets: bool,
    /// True to check invariant numerics.
    pub invariant: bool,
    /// The destination of the report.
    pub screen: Screen,
}

/// The result of the check, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct CheckReport {
    /// True if all values were right.
    pub correct: bool,
    /// True if the documented targets were met; `None` if none was judged.
    pub targets_met: Option<bool>,
}

/// A size without a target, but typical of decoding.
const SMALL: usize = 1000;
/// Lengths in elements at which paths are validated: they divide into chunks evenly and unevenly.
const LENGTHS: [usize; 3] = [1, 1021, 65_539];

/// Runs the whole check. Every rank calls this. `tell` gets the report piece by piece, as the pieces are made.
///
/// # Errors
/// Returns the errors of the collectives and of the model.
pub fn run(
    orchestrator: &mut Orchestrator,
    options: &Options<'_>,
    tell: &mut dyn FnMut(&str),
) -> Result<CheckReport, ryzanstein_tensor_parallel::Error> {
    let screen = options.screen;
    tell(&format!("job {}: {}", options.job, roster_table(orchestrator, screen)));
    let (paths, paths_correct) = paths(orchestrator.manager().world(), screen)?;
    tell(&format!("\nAll-reduce by value, on every path:\n{paths}"));

    orchestrator.manager().clear_profile();
    let block = block::compare(orchestrator.tensor_parallel())?;
    let profile = table::profile(&orchestrator.manager().profile(), false, screen);
    tell(&format!(
        "\nTensor-parallel Llama block on {} against the same block on one:\n\
         largest difference {:.1e} of the largest value, limit {:.0e}: {}\n\n\
         Its collectives, as rank 0 saw them:\n{profile}",
        plural(block.ranks, "rank"),
        block.difference,
        block::LIMIT,
        screen.paint(tone(block.correct), if block.correct { "ok" } else { "WRONG" }),
    ));

    let mut invariant = true;
    if options.invariant {
        let (report, same) = invariant::compare(orchestrator.manager(), screen)?;
        tell(&format!("\n{report}"));
        invariant = same;
    }

    let group = orchestrator.manager().world();
    let judged = options.targets || group.memory() != Memory::Host;
    let (latencies_correct, targets_met) =
        if group.world_size() == 1 { (true, None) } else { latencies(group, judged, screen, tell)? };
    let correct = paths_correct && block.correct && invariant && latencies_correct;
    let values = if correct { "all values are right" } else { "VALUES ARE WRONG" };
    let verdict = match targets_met {
        None => "",
        Some(true) => "all targets are met\n",
        Some(false) => "some targets were missed (use --strict to make this an error)\n",
    };
    tell(&format!("\n{}\n{verdict}", screen.paint(tone(correct), values)));
    Ok(CheckReport { correct, targets_met })
}

fn tone(correct: bool) -> Tone {
    if correct { Tone::Good } else { Tone::Bad }
}

fn roster_table(orchestrator: &mut Orchestrator, screen: Screen) -> String {
    let manager = orchestrator.manager();
    let roster = manager.roster();
    let columns = [
        Column::right("rank"),
        Column::right("local rank").drop_priority(2),
        Column::right("node").drop_priority(3),
        Column::right("pid").drop_priority(1),
        Column::left("host"),
    ];
    let rows: Vec<Vec<Cell>> = roster
        .members
        .iter()
        .map(|m| {
            vec![
                m.rank.to_string().into(),
                m.local_rank.to_string().into(),
                m.node_rank.to_string().into(),
                m.pid.to_string().into(),
                m.host.as_str().into(),
            ]
        })
        .collect();
    let backend = format!("backend {}: {}", manager.backend(), manager.backend_summary());
    format!(
        "{}, epoch {}, ready in {}\n{}\n\n{}",
        plural(roster.world_size(), "rank"),
        roster.epoch,
        units::time(manager.init_time().as_secs_f64() * 1e6),
        table::wrap(&backend, 2, screen),
        table::table(&columns, &rows, screen),
    )
}

/// All-reduces small integers on each path, compares exactly, and sums the wrong elements of all ranks.
fn paths(
    group: &mut ProcessGroup,
    screen: Screen,
) -> Result<(String, bool), ryzanstein_process_group::Error> {
    let paths = group.describe_paths();
    let there = group.paths();
    let (me, n) = (group.rank().index(), group.world_size());
    let mut rows = Vec::new();
    let mut correct = true;
    for (path, taken) in paths {
        if !there.contains(&path) {
            rows.push(vec![path.to_string().into(), taken.into(), "-".into(), "-".into()]);
            continue;
        }
        group.force_path(Some(path))?;
        let mut elements = 0;
        let mut wrong = 0u64;
        for length in LENGTHS {
            let x: Vec<f32> = (0..length).map(|i| ((me + 1) * (i % 97 + 1)) as f32).collect();
            let mut placed = group.upload(&x)?;
            group.all_reduce(&mut placed, ReduceOp::Sum)?;
            let x = group.download(&placed)?;
            let want = |i: usize| (n * (n + 1) / 2 * (i % 97 + 1)) as f32;
            wrong += x.iter().enumerate().filter(|(i, x)| **x != want(*i)).count() as u64;
            elements += length;
        }
        group.force_path(None)?;
        let wrong: u64 = group.all_gather_object(&wrong)?.into_iter().sum();
        correct &= wrong == 0;
        let verdict = if wrong == 0 { "ok".into() } else { format!("{wrong} WRONG") };
        let verdict = Cell::new(verdict, tone(wrong == 0));
        rows.push(vec![path.to_string().into(), taken.into(), (elements * n).to_string().into(), verdict]);
    }
    let columns = [
        Column::left("path"),
        Column::left("taken").drop_priority(2),
        Column::right("values").drop_priority(1),
        Column::left("result"),
    ];
    Ok((table::table(&columns, &rows, screen), correct))
}

fn latencies(
    group: &mut ProcessGroup,
    judged: bool,
    screen: Screen,
    tell: &mut dyn FnMut(&str),
) -> Result<(bool, Option<bool>), ryzanstein_process_group::Error> {
    let small = [(Collective::AllReduce, SMALL), (Collective::Broadcast, SMALL)];
    let documented = TARGETS.iter().map(|t| {
        let what =
            if t.op == Collective::Broadcast.name() { Collective::Broadcast } else { Collective::AllReduce };
        (what, t.bytes as usize)
    });
    let operations = [Collective::AllReduce, Collective::Broadcast].map(|what| what.to_string());
    let columns = Columns { judged, expected: false };
    let writer = RowWriter::new(&operations, DType::F32, &group.paths(), columns, screen);
    let against = if judged { ", and the targets for 4 GPUs with NVLink" } else { "" };
    tell(&format!("\nLatency of the slowest rank{against}:\n{}", writer.head()));
    let mut rows = Vec::new();
    for (what, bytes) in small.into_iter().chain(documented) {
        let case = Case::new(what, bytes, (20_000_000 / bytes).clamp(5, 200));
        let figures = measure_group(group, false, &case)?;
        let row = Row::new(&case, &figures, group, None, judged, false);
        tell(&writer.row(&row));
        rows.push(row);
    }
    let correct = rows.iter().all(|row| row.errors == 0);
    let met = judged.then(|| rows.iter().all(|row| row.meets_target != Some(false)));
    Ok((correct, met))
}
