//! Rows as tables, JSON and CSV.

use crate::table::{self as layout, Cell, Column, Layout, Screen, Tone};
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{DType, units};

use super::{Row, Verdict};

const COLUMNS: [Column<'static>; 15] = {
    let [bytes, calls, median, p90, p99, max, algbw, busbw] = layout::Figures::COLUMNS;
    [
        Column::left("operation"),
        Column::left("dtype").dispensable(5),
        Column::left("path").dispensable(1),
        bytes,
        calls,
        median,
        p90,
        p99,
        max,
        algbw,
        busbw,
        Column::right("host").dispensable(10),
        Column::right("wrong").dispensable(2),
        Column::right("target").dispensable(4),
        Column::left("verdict"),
    ]
};

/// The columns without those of the targets, where nothing is judged.
fn columns(judged: bool) -> &'static [Column<'static>] {
    if judged { &COLUMNS } else { &COLUMNS[..COLUMNS.len() - 2] }
}

/// The rows as a table, latencies of the slowest rank of each call.
pub fn table(rows: &[Row], judged: bool, screen: Screen) -> String {
    let cells: Vec<Vec<Cell>> = rows.iter().map(cells).collect();
    layout::table(columns(judged), &cells, screen)
}

/// The same table before there are rows: each is written as soon as it is measured. `paths` are those of the group.
#[derive(Debug)]
pub struct RowWriter(Layout<'static>);

impl RowWriter {
    /// For rows of these operations in a group with these paths.
    pub fn new(operations: &[String], dtype: DType, paths: &[Path], judged: bool, screen: Screen) -> Self {
        let operation = operations.iter().map(String::len).max().unwrap_or(0);
        let path = paths.iter().map(|path| path.to_string().len()).max().unwrap_or(0);
        let dtype = dtype.to_string().len();
        let (size, calls, time, wider) = ("999.99 MB".len(), 6, "999.99 ms".len(), "< 999 ms".len());
        let widths = [
            operation,
            dtype,
            path,
            size,
            calls,
            time,
            time,
            time,
            time,
            0,
            0,
            time,
            0,
            wider,
            "missed".len(),
        ];
        Self(Layout::new(columns(judged), &widths, screen))
    }

    /// The line of the heads.
    pub fn head(&self) -> String {
        self.0.head()
    }

    /// The line of a row.
    pub fn row(&self, row: &Row) -> String {
        self.0.row(&cells(row))
    }
}

fn cells(row: &Row) -> Vec<Cell> {
    let l = row.latency;
    let figures = layout::Figures {
        bytes: row.bytes as f64,
        calls: l.calls as u64,
        latency_us: [l.median_us, l.p90_us, l.p99_us, l.max_us],
        algbw_gbs: row.algbw_gbs,
        busbw_gbs: row.busbw_gbs,
    };
    let mut cells: Vec<Cell> =
        vec![row.op.as_str().into(), row.dtype.to_string().into(), row.path.as_str().into()];
    cells.extend(figures.cells());
    let wrong = if row.errors == 0 { Tone::Plain } else { Tone::Bad };
    cells.extend([
        units::time(row.host_us).into(),
        Cell::new(row.errors.to_string(), wrong),
        row.target_us.map_or_else(|| "-".into(), |us| format!("< {}", units::time(us)).into()),
        Cell::verdict(row.meets_target),
    ]);
    cells
}

pub(super) fn verdict_table(verdicts: &[Verdict], screen: Screen) -> String {
    let rows: Vec<Vec<Cell>> = verdicts
        .iter()
        .map(|v| {
            let verdict = match v.met {
                None => Cell::new("not measured", Tone::Faint),
                met => Cell::verdict(met),
            };
            let measured = v.measured.as_deref().unwrap_or("-");
            vec![v.what.as_str().into(), v.wanted.as_str().into(), measured.into(), verdict]
        })
        .collect();
    let columns =
        [Column::left("target"), Column::right("wanted"), Column::right("measured"), Column::left("verdict")];
    layout::table(&columns, &rows, screen)
}

/// One line of JSON, with exactly the documented fields.
pub fn json(row: &Row) -> String {
    serde_json::to_string(row).expect("numbers and names are always JSON")
}

/// The head of the CSV: the fields of the JSON in the same order, then the number of calls and the host time.
pub const fn csv_head() -> &'static str {
    "op,dtype,bytes,world_size,backend,path,median_us,p99_us,algbw_gbs,busbw_gbs,errors,target_us,meets_target,calls,\
     host_us"
}

/// One line of CSV.
pub fn csv_row(row: &Row) -> String {
    let optional = |value: Option<String>| value.unwrap_or_default();
    format!(
        "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
        row.op,
        row.dtype,
        row.bytes,
        row.world_size,
        row.backend,
        row.path,
        row.median_us,
        row.p99_us,
        row.algbw_gbs,
        row.busbw_gbs,
        row.errors,
        optional(row.target_us.map(|v| v.to_string())),
        optional(row.meets_target.map(|v| v.to_string())),
        row.latency.calls,
        row.host_us,
    )
}

pub(super) fn csv(rows: &[Row]) -> String {
    rows.iter().fold(format!("{}\n", csv_head()), |text, row| text + &csv_row(row) + "\n")
}
