//! The result as tables and JSON. Pure.

use std::fmt::Write as _;

use ryzanstein_process_group::{BackendKind, units};
use serde::Serialize;

use crate::communication::percent;
use ryzanstein_orchestrator::plural;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table, wrap};

/// One strategy to reduce the gradients of a step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct OverlapRow {
    /// The largest bytes of a bucket; `null` for one all-reduce per parameter after the pass.
    pub bucket_bytes: Option<usize>,
    /// Number of all-reduces in a step.
    pub all_reduces: usize,
    /// Median time of a step without compute, in microseconds.
    pub alone_us: f64,
    /// Median time of a step with compute.
    pub step_us: f64,
    /// The share of `alone_us` that the compute hides; `null` without buckets, where nothing overlaps.
    pub hidden: Option<f64>,
    /// The share of the step without overlap that is saved; below 0 where steps take longer.
    pub saved: f64,
}

impl OverlapRow {
    /// Creates a row from medians in microseconds: the step without overlap takes `unhidden`.
    pub(super) fn new(
        bucket_bytes: Option<usize>,
        all_reduces: usize,
        [alone_us, step_us, compute_us]: [f64; 3],
        unhidden: f64,
    ) -> Self {
        let hidden = bucket_bytes.map(|_| (1.0 - (step_us - compute_us) / alone_us).clamp(0.0, 1.0));
        Self { bucket_bytes, all_reduces, alone_us, step_us, hidden, saved: 1.0 - step_us / unhidden }
    }

    fn cells(&self) -> Vec<Cell> {
        vec![
            self.bucket_bytes.map_or_else(|| "none".into(), |bytes| units::bytes(bytes as f64).into()),
            self.all_reduces.to_string().into(),
            units::time(self.alone_us).into(),
            units::time(self.step_us).into(),
            self.hidden.map_or_else(|| "-".into(), |hidden| percent(hidden).into()),
            self.bucket_bytes.map_or_else(|| "-".into(), |_| percent(self.saved).into()),
        ]
    }
}

/// A whole result, the same on all ranks.
#[derive(Clone, PartialEq, Debug)]
pub struct OverlapReport {
    /// Number of ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: BackendKind,
    /// Bytes of all gradients, in f32.
    pub bytes: u64,
    /// Number of parameters.
    pub parameters: usize,
    /// Median time of a step's compute, in microseconds.
    pub compute_us: f64,
    /// The rows: without overlap first, then in buckets.
    pub rows: Vec<OverlapRow>,
    /// Wrong gradients, over all ranks and strategies.
    pub errors: u64,
}

/// A line of JSON: a row, and the common fields of all rows.
#[derive(Serialize)]
struct Line<'a> {
    measured: &'static str,
    world_size: usize,
    backend: BackendKind,
    bytes: u64,
    parameters: usize,
    compute: &'static str,
    compute_us: f64,
    errors: u64,
    #[serde(flatten)]
    row: &'a OverlapRow,
}

impl OverlapReport {
    /// Returns true if every gradient was right.
    pub fn is_correct(&self) -> bool {
        self.errors == 0
    }

    /// Formats one object per line.
    pub fn json(&self) -> String {
        let Self { world_size, backend, bytes, parameters, compute_us, errors, .. } = *self;
        let (measured, compute) = ("overlap", if backend == BackendKind::Nccl { "products" } else { "wait" });
        let line = |row| {
            let line =
                Line { measured, world_size, backend, bytes, parameters, compute, compute_us, errors, row };
            serde_json::to_string(&line).expect("numbers and names are always JSON") + "\n"
        };
        self.rows.iter().map(line).collect()
    }

    /// Formats the report for people.
    pub fn text(&self, screen: Screen) -> String {
        let kind = match self.backend {
            BackendKind::Nccl => "products of matrices on the compute stream",
            BackendKind::Tcp => "the host waits, as for an accelerator",
        };
        let head = format!(
            "{} of f32 gradients in {}, {} on {}; compute of a step {} ({kind})",
            units::bytes(self.bytes as f64),
            plural(self.parameters, "parameter"),
            plural(self.world_size, "rank"),
            self.backend,
            units::time(self.compute_us),
        );
        let columns = [
            Column::right("buckets of"),
            Column::right("all-reduces").drop_priority(1),
            Column::right("alone"),
            Column::right("step"),
            Column::right("hidden"),
            Column::right("saved"),
        ];
        let rows: Vec<Vec<Cell>> = self.rows.iter().map(OverlapRow::cells).collect();
        let mut text = format!("{}\n\n{}", wrap(&head, 2, screen), table(&columns, &rows, screen));
        text += "hidden: share of the time alone that the compute hides, the launches of calls included.\n\
                 saved: share of the step without overlap.\n";
        let verdict = match self.errors {
            0 => screen.paint(Tone::Good, "all values are right"),
            errors => screen.paint(Tone::Bad, &format!("{errors} VALUES ARE WRONG")),
        };
        let _ = writeln!(text, "\n{verdict}");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> OverlapReport {
        let first = OverlapRow::new(None, 64, [100.0, 210.0, 100.0], 210.0);
        OverlapReport {
            world_size: 2,
            backend: BackendKind::Tcp,
            bytes: 64_000_000,
            parameters: 64,
            compute_us: 100.0,
            rows: vec![first, OverlapRow::new(Some(25_000_000), 4, [90.0, 127.0, 100.0], 210.0)],
            errors: 0,
        }
    }

    #[test]
    fn a_row_says_what_is_hidden_and_what_is_saved() {
        let report = report();
        let [first, second] = &report.rows[..] else { panic!("{report:?}") };
        assert_eq!((first.hidden, first.saved), (None, 0.0), "nothing overlaps");
        assert!(second.hidden.is_some_and(|hidden| (hidden - 0.7).abs() < 1e-9));
        assert!((second.saved - (1.0 - 127.0 / 210.0)).abs() < 1e-9);
        assert_eq!(
            OverlapRow::new(Some(1), 1, [10.0, 90.0, 100.0], 110.0).hidden,
            Some(1.0),
            "never more than all"
        );
    }

    #[test]
    fn json_has_a_line_for_each_row_and_texts_name_wrong_values() {
        let mut report = report();
        let json = report.json();
        let lines: Vec<serde_json::Value> =
            json.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0]["bucket_bytes"].is_null() && lines[1]["bucket_bytes"] == 25_000_000, "{json}");
        assert!(lines[1]["compute"] == "wait" && lines[1]["compute_us"] == 100.0, "{json}");
        assert!(report.text(Screen::PLAIN).ends_with("all values are right\n"));
        report.errors = 3;
        assert!(!report.is_correct() && report.text(Screen::PLAIN).contains("3 VALUES ARE WRONG"));
    }
}
