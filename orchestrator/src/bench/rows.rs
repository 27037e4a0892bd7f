//! Rows as tables, JSON and CSV.

use std::fmt::Write as _;

use ryzanstein_process_group::table as layout;
use ryzanstein_process_group::units;

use super::{Row, Verdict};

/// The rows as a table, latencies of the slowest rank of each call.
pub fn table(rows: &[Row]) -> String {
    let head = [
        &["operation", "dtype", "path"][..],
        &layout::Figures::HEAD,
        &["host", "wrong", "target", "verdict"],
    ];
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    layout::columns(&head.concat(), 3, &cells)
}

fn cells(row: &Row) -> Vec<String> {
    let l = row.latency;
    let figures = layout::Figures {
        bytes: row.bytes as f64,
        calls: l.calls as u64,
        latency_us: [l.median_us, l.p90_us, l.p99_us, l.max_us],
        algbw_gbs: row.algbw_gbs,
        busbw_gbs: row.busbw_gbs,
    };
    let mut cells = vec![row.op.clone(), row.dtype.to_string(), row.path.clone()];
    cells.extend(figures.cells());
    let target = row.target_us.map_or_else(|| "-".into(), |us| format!("< {}", units::time(us)));
    let verdict = row.meets_target.map_or("-", |met| if met { "met" } else { "missed" });
    cells.extend([units::time(row.host_us), row.errors.to_string(), target, verdict.into()]);
    cells
}

pub(super) fn verdict_table(verdicts: &[Verdict]) -> String {
    let rows: Vec<Vec<String>> = verdicts
        .iter()
        .map(|v| {
            let measured = v.measured.clone().unwrap_or_else(|| "-".into());
            vec![v.what.clone(), v.wanted.clone(), measured, v.word().into()]
        })
        .collect();
    layout::columns(&["target", "wanted", "measured", "verdict"], 1, &rows)
}

/// One line of JSON, with exactly the documented fields.
pub fn json(row: &Row) -> String {
    serde_json::to_string(row).expect("numbers and names are always JSON")
}

/// The fields of the JSON in the same order, then the number of calls and the host time.
pub(super) fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "op,dtype,bytes,world_size,backend,path,median_us,p99_us,algbw_gbs,busbw_gbs,errors,target_us,meets_target,\
         calls,host_us\n",
    );
    for row in rows {
        let optional = |value: Option<String>| value.unwrap_or_default();
        let _ = writeln!(
            text,
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
        );
    }
    text
}
