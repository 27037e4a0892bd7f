//! The result as tables and JSON. Pure.

use std::fmt::Write as _;

use ryzanstein_process_group::{BackendKind, units};
use serde::Serialize;

use super::{CompressedRow, Sent};
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
    /// All-reduces in 16 bits; none on GPUs.
    pub compressed: Vec<CompressedRow>,
    /// Wrong gradients, over all ranks and strategies.
    pub errors: u64,
}

/// A line of JSON: a row, and the common fields of all rows.
#[derive(Serialize)]
struct Line<'a, T> {
    measured: &'static str,
    world_size: usize,
    backend: BackendKind,
    #[serde(flatten)]
    pass: Option<PassFields>,
    #[serde(flatten)]
    row: &'a T,
}

#[derive(Clone, Copy, Serialize)]
struct PassFields {
    bytes: u64,
    parameters: usize,
    compute: &'static str,
    compute_us: f64,
    errors: u64,
}

impl OverlapReport {
    /// Returns true if every gradient was right, and every error of 16-bit types within its bound.
    pub fn is_correct(&self) -> bool {
        let sent = self.compressed.iter().flat_map(|row| [row.bf16, row.f16]);
        self.errors == 0 && sent.into_iter().all(|sent| sent.error <= sent.bound)
    }

    /// Formats one object per line.
    pub fn json(&self) -> String {
        let Self { bytes, parameters, compute_us, errors, .. } = *self;
        let compute = if self.backend == BackendKind::Nccl { "products" } else { "wait" };
        let pass = Some(PassFields { bytes, parameters, compute, compute_us, errors });
        let rows = self.rows.iter().map(|row| self.line("overlap", pass, row));
        let compressed = self.compressed.iter().map(|row| self.line("compressed", None, row));
        rows.chain(compressed).collect()
    }

    fn line<T: Serialize>(&self, measured: &'static str, pass: Option<PassFields>, row: &T) -> String {
        let line = Line { measured, world_size: self.world_size, backend: self.backend, pass, row };
        serde_json::to_string(&line).expect("numbers and names are always JSON") + "\n"
    }

    /// Formats the report for people.
    pub fn text(&self, screen: Screen) -> String {
        let kind = match self.backend {
            BackendKind::Nccl => "products of matrices on the compute stream",
            _ => "the host waits, as for an accelerator",
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
        if !self.compressed.is_empty() {
            let _ = write!(text, "\n{}", self.compressed_text(screen));
        }
        let verdict = match (self.is_correct(), self.errors) {
            (true, _) => screen.paint(Tone::Good, "all values are right"),
            (false, 0) => screen.paint(Tone::Bad, "ERRORS EXCEED THEIR BOUND"),
            (false, errors) => screen.paint(Tone::Bad, &format!("{errors} VALUES ARE WRONG")),
        };
        let _ = writeln!(text, "\n{verdict}");
        text
    }

    fn compressed_text(&self, screen: Screen) -> String {
        let columns = [
            Column::right("bytes"),
            Column::right("f32"),
            Column::right("bf16"),
            Column::right("f32/bf16"),
            Column::right("error").drop_priority(2),
            Column::right("bound").drop_priority(1),
            Column::right("f16"),
            Column::right("f32/f16"),
            Column::right("error").drop_priority(2),
            Column::right("bound").drop_priority(1),
        ];
        let cells = |row: &CompressedRow| {
            let sent = |sent: Sent| {
                [
                    units::time(sent.median_us),
                    format!("{:.2}", row.f32_us / sent.median_us),
                    format!("{:.1e}", sent.error),
                    format!("{:.1e}", sent.bound),
                ]
            };
            let first = [units::bytes(row.bytes as f64), units::time(row.f32_us)];
            first.into_iter().chain(sent(row.bf16)).chain(sent(row.f16)).map(Cell::from).collect()
        };
        let rows: Vec<Vec<Cell>> = self.compressed.iter().map(cells).collect();
        let head = "all-reduce of f32 values, sent as they are and in 16 bits; errors relative to the sum of absolute values";
        format!("{}\n{}", wrap(head, 2, screen), table(&columns, &rows, screen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> OverlapReport {
        let first = OverlapRow::new(None, 64, [100.0, 210.0, 100.0], 210.0);
        let sent = Sent { median_us: 50.0, error: 1e-3, bound: 8e-3 };
        OverlapReport {
            world_size: 2,
            backend: BackendKind::Tcp,
            bytes: 64_000_000,
            parameters: 64,
            compute_us: 100.0,
            rows: vec![first, OverlapRow::new(Some(25_000_000), 4, [90.0, 127.0, 100.0], 210.0)],
            compressed: vec![CompressedRow { bytes: 100_000, f32_us: 100.0, bf16: sent, f16: sent }],
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
        assert_eq!(lines.len(), 3);
        assert!(lines[0]["bucket_bytes"].is_null() && lines[1]["bucket_bytes"] == 25_000_000, "{json}");
        assert!(
            lines[1]["compute"] == "wait"
                && lines[1]["compute_us"] == 100.0
                && lines[2]["measured"] == "compressed",
            "{json}"
        );
        assert!(report.text(Screen::PLAIN).ends_with("all values are right\n"));
        report.errors = 3;
        assert!(!report.is_correct() && report.text(Screen::PLAIN).contains("3 VALUES ARE WRONG"));
        report.errors = 0;
        report.compressed[0].f16.error = 1.0;
        assert!(!report.is_correct());
    }
}
