//! Rows as tables, JSON and CSV.

use ryzanstein_orchestrator::table::{self as layout, Cell, Column, Layout, Screen, Tone};
use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{DType, units};

use super::{Row, Verdict};

const COLUMNS: [Column<'static>; 18] = {
    let [bytes, calls, median, p90, p99, max, algbw, busbw] = layout::Figures::COLUMNS;
    [
        Column::left("operation"),
        Column::left("dtype").drop_priority(5),
        Column::left("path").drop_priority(1),
        bytes,
        calls,
        median,
        p90,
        p99,
        max,
        algbw,
        busbw,
        Column::right("host").drop_priority(10),
        Column::right("of link").drop_priority(11),
        Column::right("expected").drop_priority(12),
        Column::right("error").drop_priority(13),
        Column::right("wrong").drop_priority(2),
        Column::right("target").drop_priority(4),
        Column::left("verdict"),
    ]
};

/// The optional columns of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Columns {
    /// True for the columns of the documented targets.
    pub judged: bool,
    /// True for the columns that compare with the bandwidth of the links and with the expected times.
    pub expected: bool,
}

impl Columns {
    /// Returns the elements of `all` whose columns the table has.
    fn of<T: Clone>(self, all: &[T]) -> Vec<T> {
        let is_shown = |index: usize| match index {
            12..=14 => self.expected,
            16 | 17 => self.judged,
            _ => true,
        };
        all.iter().enumerate().filter(|(index, _)| is_shown(*index)).map(|(_, one)| one.clone()).collect()
    }
}

/// Formats the rows as a table, with latencies of the slowest rank of each call.
pub fn table(rows: &[Row], judged: bool, screen: Screen) -> String {
    let (columns, cells) = row_cells(rows.iter(), judged);
    layout::table(&columns, &cells, screen)
}

/// Returns the columns and cells of that table.
pub(super) fn row_cells<'a>(
    rows: impl Iterator<Item = &'a Row> + Clone,
    judged: bool,
) -> (Vec<Column<'static>>, Vec<Vec<Cell>>) {
    let expected = rows.clone().any(|row| row.link_share.is_some() || row.expected_us.is_some());
    let columns = Columns { judged, expected };
    (columns.of(&COLUMNS), rows.map(|row| columns.of(&cells(row))).collect())
}

/// Writes the same table row by row, each as soon as it is measured. `paths` are those of the group.
#[derive(Debug)]
pub struct RowWriter(Columns, Layout<'static>);

impl RowWriter {
    /// Creates a writer for rows of these operations in a group with these paths.
    pub fn new(
        operations: &[String],
        dtype: DType,
        paths: &[Path],
        columns: Columns,
        screen: Screen,
    ) -> Self {
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
            "100.0 %".len(),
            time,
            "+100 %".len(),
            0,
            wider,
            "missed".len(),
        ];
        Self(columns, Layout::new(&columns.of(&COLUMNS), &columns.of(&widths), screen))
    }

    /// Returns the header line.
    pub fn head(&self) -> String {
        self.1.head()
    }

    /// Returns the line of a row.
    pub fn row(&self, row: &Row) -> String {
        self.1.row(&self.0.of(&cells(row)))
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
        row.link_share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0).into()),
        row.expected_us.map_or_else(|| "-".into(), |us| units::time(us).into()),
        row.expected_error_percent.map_or_else(|| "-".into(), |error| format!("{error:+.0} %").into()),
        Cell::new(row.errors.to_string(), wrong),
        row.target_us.map_or_else(|| "-".into(), |us| format!("< {}", units::time(us)).into()),
        Cell::verdict(row.meets_target),
    ]);
    cells
}

pub(super) fn verdict_table(verdicts: &[Verdict], screen: Screen) -> String {
    let (columns, cells) = verdict_cells(verdicts);
    layout::table(&columns, &cells, screen)
}

/// Returns the columns and cells of that table.
pub(super) fn verdict_cells(verdicts: &[Verdict]) -> ([Column<'static>; 4], Vec<Vec<Cell>>) {
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
    (columns, rows)
}

/// Formats one line of JSON, with exactly the documented fields.
pub fn json(row: &Row) -> String {
    serde_json::to_string(row).expect("numbers and names are always JSON")
}

/// Returns the head of the CSV: the fields of the JSON in the same order, then the host time.
pub const fn csv_head() -> &'static str {
    "op,dtype,bytes,world_size,backend,path,median_us,p99_us,algbw_gbs,busbw_gbs,errors,target_us,meets_target,\
     link_share,expected_us,expected_error_percent,p25_us,p75_us,calls,graph,host_us"
}

/// Formats one line of CSV.
pub fn csv_row(row: &Row) -> String {
    let optional = |value: Option<String>| value.unwrap_or_default();
    let cells = [
        row.op.clone(),
        row.dtype.to_string(),
        row.bytes.to_string(),
        row.world_size.to_string(),
        row.backend.to_string(),
        row.path.clone(),
        row.median_us.to_string(),
        row.p99_us.to_string(),
        row.algbw_gbs.to_string(),
        row.busbw_gbs.to_string(),
        row.errors.to_string(),
        optional(row.target_us.map(|v| v.to_string())),
        optional(row.meets_target.map(|v| v.to_string())),
        optional(row.link_share.map(|v| v.to_string())),
        optional(row.expected_us.map(|v| v.to_string())),
        optional(row.expected_error_percent.map(|v| v.to_string())),
        row.p25_us.to_string(),
        row.p75_us.to_string(),
        row.calls.to_string(),
        row.graph.to_string(),
        row.host_us.to_string(),
    ];
    cells.join(",")
}

pub(super) fn csv(rows: &[Row]) -> String {
    rows.iter().fold(format!("{}\n", csv_head()), |text, row| text + &csv_row(row) + "\n")
}
