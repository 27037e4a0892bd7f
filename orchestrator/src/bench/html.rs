//! A self-contained page: plots, targets and all figures, light or dark like the reader's system.

use std::fmt::Write as _;

use crate::table::Screen;
use ryzanstein_process_group::units;

use crate::drawing::escape;

use super::Row;
use super::plot::{COLOURS, Curve, svg};
use super::report::Report;
use super::rows::{table as rows_table, verdict_table};

const STYLE: &str = "
:root { color-scheme: light dark; --back: #fff; --ink: #1d2129; --grid: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --ink: #dde2ea; --grid: #333a45; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; font: 12.5px/1.45 ui-monospace, monospace; }
svg { width: 100%; max-width: 900px; } svg text { fill: var(--ink); font-size: 12px; }
.grid { stroke: var(--grid); } .c { fill: none; stroke-width: 2; } .key { margin-right: 1.2em; white-space: nowrap; }
";

/// Readable on both backgrounds.
const PALETTE: [&str; COLOURS] = [
    "#2f7ed8", "#e0792b", "#2e9e5b", "#d64550", "#8f6bd6", "#9c6b4e", "#d667b0", "#7f8794", "#a9a21f",
    "#1fa9b8",
];

pub(super) fn page(report: &Report) -> String {
    let mut style = STYLE.to_owned();
    for (index, colour) in PALETTE.iter().enumerate() {
        let _ = writeln!(
            style,
            ".c{index} {{ stroke: {colour}; }} circle.c{index}, .k{index} {{ fill: {colour}; color: {colour}; }}"
        );
    }
    let latency = curves(&report.rows, |row| row.median_us);
    let bandwidth = curves(&report.rows, |row| row.busbw_gbs);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>ryz bench</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>ryz bench</h1>\n<pre>{}</pre>\n\
         <h2>Latency</h2>\n<p>Median, of the slowest rank of each call.</p>\n{}{}\
         <h2>Bus bandwidth</h2>\n{}{}\
         {}<h2>All figures</h2>\n<pre>{}</pre>\n\
         <p>{}</p>\n</body>\n</html>\n",
        escape(&report.heading),
        svg("latency", &latency, units::time),
        key(&latency),
        svg("bus bandwidth", &bandwidth, |gbs| format!("{gbs} GB/s")),
        key(&bandwidth),
        targets(report),
        escape(&rows_table(&report.rows, report.judged, Screen::PLAIN)),
        if report.is_correct() { "All values are right." } else { "VALUES ARE WRONG." },
    )
}

fn targets(report: &Report) -> String {
    if !report.judged {
        return String::new();
    }
    let table = verdict_table(&report.verdicts(), Screen::PLAIN);
    format!("<h2>Documented targets</h2>\n<pre>{}</pre>\n", escape(&table))
}

/// One curve per label, in the order of the rows; barriers have no size and no curve.
fn curves(rows: &[Row], value: impl Fn(&Row) -> f64) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        let label = escape(&row.label());
        let point = (row.bytes as f64, value(row));
        match curves.iter_mut().find(|curve| curve.label == label) {
            Some(curve) => curve.points.push(point),
            None => curves.push(Curve { label, points: vec![point] }),
        }
    }
    curves
}

fn key(curves: &[Curve]) -> String {
    let entries = curves.iter().enumerate().map(|(index, curve)| {
        format!("<span class=\"key\"><span class=\"k{}\">●</span> {}</span>", index % COLOURS, curve.label)
    });
    format!("<p>{}</p>\n", entries.collect::<String>())
}
