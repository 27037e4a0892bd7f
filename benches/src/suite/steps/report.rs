//! Steps as tables and JSON, and the verdicts on them. Pure.

use std::fmt::Write as _;

use ryzanstein_process_group::units;

use super::super::Verdict;
use super::{ABOVE_EFFICIENCY, LIMIT, StepRow};
use crate::communication::{Advice, BELOW_SHARE, JobContext, Part, percent};
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

const COLUMNS: [Column<'static>; 11] = [
    Column::left("step"),
    Column::left("shape"),
    Column::right("layers").drop_priority(3),
    Column::right("sequences"),
    Column::right("tokens").drop_priority(2),
    Column::right("t1"),
    Column::right("tn"),
    Column::right("speed-up").drop_priority(1),
    Column::right("efficiency"),
    Column::right("comm."),
    Column::left("verdict"),
];

/// Formats one line of JSON.
pub fn json(row: &StepRow) -> String {
    serde_json::to_string(row).expect("numbers and names are always JSON")
}

/// Formats a table of all steps, the compared models, the parts of their communication, and advice. Empty without rows.
pub fn text(rows: &[StepRow], around: &JobContext, processors: usize, screen: Screen) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut text = format!("{}\n", wrap(&compared(first, around, processors), 2, screen));
    text += &table(&COLUMNS, &rows.iter().map(cells).collect::<Vec<_>>(), screen);
    let farthest = rows.iter().fold(0.0, |most: f64, row| most.max(row.difference));
    let correct = rows.iter().all(|row| row.correct);
    let verdict = if correct { screen.paint(Tone::Good, "ok") } else { screen.paint(Tone::Bad, "WRONG") };
    let _ = writeln!(
        text,
        "logits of both: largest difference {farthest:.1e} of the largest value, limit {LIMIT}: {verdict}"
    );
    let parts: Vec<Vec<Cell>> = rows.iter().flat_map(part_cells).collect();
    if !parts.is_empty() {
        let columns: Vec<_> = [Column::left("communication of")].into_iter().chain(Part::COLUMNS).collect();
        let _ = write!(text, "\n{}", table(&columns, &parts, screen));
    }
    for (index, line) in advice(rows, around).into_iter().enumerate() {
        let _ = writeln!(text, "{}{}", if index == 0 { "\n" } else { "" }, wrap(&line, 2, screen));
    }
    text
}

/// Returns the parts of a step's communication. Only the first has the name of the step.
fn part_cells(row: &StepRow) -> Vec<Vec<Cell>> {
    let names = std::iter::once(name(row)).chain(std::iter::repeat(String::new()));
    let parts = names.zip(&row.communication.parts);
    parts.map(|(name, part)| [Cell::from(name)].into_iter().chain(part.cells()).collect()).collect()
}

/// Returns the cause for each step with a large share of communication, and the remedies after the steps to which they apply.
fn advice(rows: &[StepRow], around: &JobContext) -> Vec<String> {
    let mut lines = Vec::new();
    let mut advised = rows.iter().filter_map(|row| Some((row, row.communication.advice(around)?))).peekable();
    while let Some((row, Advice { cause, remedies })) = advised.next() {
        lines.push(format!("{}: {cause}", name(row)));
        if advised.peek().is_none_or(|(_, next)| next.remedies != remedies) {
            lines.extend(remedies);
        }
    }
    lines
}

/// Describes the models whose times are `t1` and `tn`.
fn compared(row: &StepRow, around: &JobContext, processors: usize) -> String {
    let ranks = plural(row.world_size, "rank");
    let layers = format!(
        "Steps of a few layers (column `layers`) in {}, with random weights, on one rank (t1) and sharded over {ranks} (tn)",
        row.dtype
    );
    let (one, each) = (plural(processors, "processor"), (processors / around.sharing_cpus).max(1));
    match (around.on_gpus, around.sharing_cpus == row.world_size) {
        (true, _) => format!("{layers}, each with a GPU."),
        (false, true) => format!(
            "{layers} of one host: one rank computes with all {one}, {ranks} with {each} each. Both have the same \
             processors, so an efficiency t1 / (n tn) of {:.0} % means that sharding costs nothing.",
            100.0 / row.world_size as f64
        ),
        (false, false) => {
            let hosts = plural(around.hosts, "host");
            format!(
                "{layers} of {hosts}: one rank computes with the {one} that it may use, {ranks} with {each} each."
            )
        }
    }
}

fn name(row: &StepRow) -> String {
    match row.step {
        "prefill" => format!("prefill of {} tokens, {}", row.tokens, row.shape),
        _ => format!("{} of {}, {}", row.step, plural(row.sequences, "sequence"), row.shape),
    }
}

fn cells(row: &StepRow) -> Vec<Cell> {
    vec![
        row.step.into(),
        row.shape.as_str().into(),
        row.layers.to_string().into(),
        row.sequences.to_string().into(),
        row.tokens.to_string().into(),
        units::time(row.one_us).into(),
        units::time(row.median_us).into(),
        format!("{:.2}", row.speed_up).into(),
        percent(row.efficiency).into(),
        row.communication_share.map_or_else(|| "-".into(), |share| percent(share).into()),
        if row.correct { Cell::verdict(Some(row.meets_target)) } else { Cell::new("WRONG", Tone::Bad) },
    ]
}

/// Returns the documented targets for steps. The worst row counts, as users cannot choose it. Rows with wrong values do not
/// count, nor does a single rank, which sends nothing. While the share of a row is not known, the others cannot meet the
/// target, but they can miss it.
pub fn verdicts(rows: &[StepRow]) -> [Verdict; 2] {
    let rows = || rows.iter().filter(|row| row.correct && row.world_size > 1);
    let least = rows().min_by(|a, b| a.efficiency.total_cmp(&b.efficiency));
    let is_known = rows().all(|row| row.communication_share.is_some());
    let most = rows().filter_map(|row| row.communication_share).max_by(f64::total_cmp);
    let most = most.filter(|share| is_known || *share >= BELOW_SHARE);
    [
        Verdict::of(
            "scaling efficiency, a step on n ranks against n times one".into(),
            format!("> {:.0} %", ABOVE_EFFICIENCY * 100.0),
            least.map(|row| (percent(row.efficiency), row.efficiency > ABOVE_EFFICIENCY)),
        ),
        Verdict::of(
            "communication, share of a step".into(),
            format!("< {:.0} %", BELOW_SHARE * 100.0),
            most.map(|share| (percent(share), share < BELOW_SHARE)),
        ),
    ]
}
