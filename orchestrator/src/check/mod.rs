//! `ryz check`: a rank's self-check, and the default job of `ryz launch`.
//!
//! Validates every path by value, compares a sharded Llama block with the unsharded one, and compares latencies of
//! all-reduce and broadcast with the documented targets. A wrong value is a failure; a missed target is a verdict.

mod block;

use std::fmt::Write as _;

use ryzanstein_process_group::targets::TARGETS;
use ryzanstein_process_group::{ProcessGroup, ReduceOp, table, units};

use crate::Orchestrator;
use crate::bench::{self, Row};
use crate::measure::{Case, Collective, measure_group, total};

/// The result of the check, the same on all ranks.
#[derive(Clone, Debug)]
pub struct CheckReport {
    /// The report as text.
    pub text: String,
    /// All values were right.
    pub correct: bool,
    /// All documented targets were met.
    pub targets_met: bool,
}

/// A size without a target, but typical of decoding.
const SMALL: usize = 1000;
/// Lengths in elements at which paths are validated: they divide into chunks evenly and unevenly.
const LENGTHS: [usize; 3] = [1, 1021, 65_539];

/// Runs the whole check of the job called `name`. Every rank calls this.
///
/// # Errors
/// Those of the collectives and of the model.
pub fn run(
    orchestrator: &mut Orchestrator,
    name: &str,
) -> Result<CheckReport, ryzanstein_tensor_parallel::Error> {
    let mut text = format!("job {name}: ");
    text += &roster_table(orchestrator);
    let (paths, paths_correct) = paths(orchestrator.manager().world())?;
    let _ = writeln!(text, "\nAll-reduce by value, on every path:\n{paths}");

    orchestrator.manager().clear_profile();
    let block = block::compare(orchestrator.tensor_parallel())?;
    let profile = table::profile(&orchestrator.manager().profile());
    let _ = writeln!(
        text,
        "Tensor-parallel Llama block, sharded over {} ranks, against its unsharded self:\n\
         largest difference {:.1e} of the largest value, limit {:.0e}: {}\n\n\
         Its collectives, as rank 0 saw them:\n{profile}",
        block.ranks,
        block.difference,
        block::LIMIT,
        if block.correct { "ok" } else { "WRONG" },
    );

    let (latencies, latencies_correct, targets_met) = if orchestrator.manager().world().world_size() == 1 {
        ("nothing to time: one rank alone sends nothing\n".into(), true, true)
    } else {
        latencies(orchestrator.manager().world())?
    };
    let _ = writeln!(
        text,
        "Latency against the documented targets (for 4 GPUs with NVLink), the greatest over the ranks:\n{latencies}"
    );
    let correct = paths_correct && block.correct && latencies_correct;
    let _ = writeln!(
        text,
        "{}; {}",
        if correct { "all values are right" } else { "VALUES ARE WRONG" },
        if targets_met { "all targets are met" } else { "targets are missed (a verdict, no failure)" }
    );
    Ok(CheckReport { text, correct, targets_met })
}

fn roster_table(orchestrator: &mut Orchestrator) -> String {
    let manager = orchestrator.manager();
    let roster = manager.roster();
    let head = ["rank", "local rank", "node", "pid", "host"];
    let rows: Vec<Vec<String>> = roster
        .members
        .iter()
        .map(|m| {
            vec![
                m.rank.to_string(),
                m.local_rank.to_string(),
                m.node_rank.to_string(),
                m.pid.to_string(),
                m.host.clone(),
            ]
        })
        .collect();
    format!(
        "{} ranks, epoch {}, ready in {}\nbackend {}: {}\n\n{}",
        roster.world_size(),
        roster.epoch,
        units::time(manager.init_time().as_secs_f64() * 1e6),
        manager.backend(),
        manager.backend_reason(),
        table::columns(&head, 0, &rows),
    )
}

/// All-reduces small integers on each path, compares exactly, and sums the wrong elements of all ranks.
fn paths(group: &mut ProcessGroup) -> Result<(String, bool), ryzanstein_process_group::Error> {
    let paths = group.describe_paths();
    let there = group.paths();
    let (me, n) = (group.rank().index(), group.world_size());
    let mut rows = Vec::new();
    let mut correct = true;
    for (path, taken) in paths {
        if !there.contains(&path) {
            rows.push(vec![path.to_string(), taken, "-".into(), "-".into()]);
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
        let wrong = total(group, wrong)?;
        correct &= wrong == 0;
        let verdict = if wrong == 0 { "ok".into() } else { format!("{wrong} WRONG") };
        rows.push(vec![path.to_string(), taken, (elements * n).to_string(), verdict]);
    }
    Ok((table::columns(&["path", "taken", "values", "result"], 2, &rows), correct))
}

fn latencies(group: &mut ProcessGroup) -> Result<(String, bool, bool), ryzanstein_process_group::Error> {
    let small = [(Collective::AllReduce, SMALL), (Collective::Broadcast, SMALL)];
    let documented = TARGETS.iter().map(|t| {
        let what =
            if t.op == Collective::Broadcast.name() { Collective::Broadcast } else { Collective::AllReduce };
        (what, t.bytes as usize)
    });
    let mut rows = Vec::new();
    for (what, bytes) in small.into_iter().chain(documented) {
        let case = Case::new(what, bytes, (20_000_000 / bytes).clamp(5, 200));
        let figures = measure_group(group, false, &case)?;
        rows.push(Row::new(&case, &figures, group, false));
    }
    let correct = rows.iter().all(|row| row.errors == 0);
    let met = rows.iter().all(|row| row.meets_target != Some(false));
    Ok((bench::table(&rows), correct, met))
}
