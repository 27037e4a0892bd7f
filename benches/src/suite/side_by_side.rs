//! Variants of a measurement in columns. Pure.

use ryzanstein_process_group::units;

use super::RecordedRow;
use super::vary::Variant;
use crate::measure;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, table};

/// The measurements of an operation and size.
struct Line<'a> {
    op: &'a str,
    bytes: usize,
    /// For each variant, the medians of its rounds.
    medians: Vec<Vec<f64>>,
}

/// Formats each operation and size in a line, each variant in a column: the median over the rounds, and its ratio to that of
/// the first variant. If that is too wide, each variant has a separate line.
pub fn side_by_side(rows: &[RecordedRow], variants: &[Variant], screen: Screen) -> String {
    let lines = lines(rows, variants);
    let wide = in_columns(&lines, variants, Screen { width: None, ..screen });
    let width = in_columns(&lines, variants, Screen::PLAIN).lines().map(|line| line.chars().count()).max();
    if width.unwrap_or(0) <= screen.width.unwrap_or(usize::MAX) {
        return wide;
    }
    let columns = [
        Column::left("operation"),
        Column::right("bytes"),
        Column::left("variant"),
        Column::right("median"),
        Column::right("ratio"),
    ];
    let of_line = |line: &Line<'_>| {
        let [op, bytes] = line.heads();
        let cells = line.cells();
        variants
            .iter()
            .zip(cells)
            .map(move |(variant, [median, ratio])| {
                vec![op.clone(), bytes.clone(), variant.name.into(), median, ratio]
            })
            .collect::<Vec<_>>()
    };
    table(&columns, &lines.iter().flat_map(of_line).collect::<Vec<_>>(), screen)
}

fn in_columns(lines: &[Line<'_>], variants: &[Variant], screen: Screen) -> String {
    let mut columns = vec![Column::left("operation"), Column::right("bytes")];
    columns.extend(variants.iter().flat_map(|variant| [Column::right(variant.name), Column::right("ratio")]));
    // The first variant's ratio to itself carries no information.
    columns.remove(3);
    let cells = |line: &Line<'_>| {
        let mut cells: Vec<Cell> =
            line.heads().into_iter().chain(line.cells().into_iter().flatten()).collect();
        cells.remove(3);
        cells
    };
    table(&columns, &lines.iter().map(cells).collect::<Vec<_>>(), screen)
}

fn lines<'a>(rows: &'a [RecordedRow], variants: &[Variant]) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    for row in rows {
        let Some(index) = variants.iter().position(|v| row.variant == v.name) else {
            continue;
        };
        let is_it = |line: &Line<'_>| line.op == row.op && line.bytes == row.bytes;
        let at = lines.iter().position(is_it).unwrap_or_else(|| {
            lines.push(Line { op: &row.op, bytes: row.bytes, medians: vec![Vec::new(); variants.len()] });
            lines.len() - 1
        });
        lines[at].medians[index].push(row.median_us);
    }
    lines
}

impl Line<'_> {
    fn heads(&self) -> [Cell; 2] {
        [self.op.into(), units::bytes(self.bytes as f64).into()]
    }

    /// Returns the median and the ratio of each variant.
    fn cells(&self) -> Vec<[Cell; 2]> {
        let shown = |value: Option<String>| value.map_or_else(|| "-".into(), Cell::from);
        let first = self.medians.first().and_then(|first| median(first)).filter(|us| *us > 0.0);
        let of_variant = |medians: &Vec<f64>| {
            let us = median(medians);
            let ratio = us.zip(first).map(|(us, first)| format!("{:.2}", us / first));
            [shown(us.map(units::time)), shown(ratio)]
        };
        self.medians.iter().map(of_variant).collect()
    }
}

fn median(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| measure::median(values.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::Vary;
    use ryzanstein_process_group::BackendKind;

    fn row(bytes: usize, variant: &str, median_us: f64) -> RecordedRow {
        RecordedRow { op: "all_reduce".into(), bytes, variant: variant.into(), median_us }
    }

    #[test]
    fn a_round_in_which_the_machine_was_slow_is_not_in_the_ratio() {
        let variants = &Vary::Algorithm.variants(BackendKind::Nccl, 2, 2).expect("variants")[..3];
        // The machine is ten times as slow in the second round.
        let rows = [
            row(1000, "nccl", 10.0),
            row(1000, "RING", 20.0),
            row(1000, "nccl", 100.0),
            row(1000, "RING", 200.0),
            row(1000, "nccl", 11.0),
            row(1000, "RING", 22.0),
            row(2000, "nccl", 30.0),
        ];
        let text = side_by_side(&rows, variants, Screen::PLAIN);
        let cells: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(cells[0], ["operation", "bytes", "nccl", "RING", "ratio", "TREE", "ratio"]);
        assert_eq!(cells[1], ["all_reduce", "1", "KB", "11", "us", "22", "us", "2.00", "-", "-"]);
        assert_eq!(cells[2], ["all_reduce", "2", "KB", "30", "us", "-", "-", "-", "-"]);
        let narrow = side_by_side(&rows, variants, Screen { width: Some(50), color: false });
        assert!(narrow.contains("all_reduce   1 KB  RING      22 us   2.00"), "{narrow}");
    }
}
