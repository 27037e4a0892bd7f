//! A self-contained page: plots, targets and all figures, light or dark like the reader's system.

use std::fmt::Write as _;

use ryzanstein_process_group::targets::TARGETS;
use ryzanstein_process_group::units;

use ryzanstein_orchestrator::table::{Cell, Column, Tone};

use super::Row;
use super::plot::{COLOURS, Curve, Plot, Target};
use super::report::Report;
use super::rows::{row_cells, verdict_cells};

const STYLE: &str = "
:root { color-scheme: light dark; --back: #fff; --ink: #1d2129; --grid: #dfe3e8; --good: #1b7f45; --bad: #c62f3b; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --ink: #dde2ea; --grid: #333a45; --good: #5cc98a; --bad: #ff7b86; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1400px;
  margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.told { font: 13px/1.5 ui-monospace, monospace; margin: 0; padding: 0; list-style: none; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.4rem; border-bottom: 1px solid var(--grid); text-align: left; }
th.n, td.n { text-align: right; white-space: nowrap; } tbody tr:hover { background: var(--grid); }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: bold; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 0 1.5rem; }
h3 { font-size: 1rem; margin: 0.8rem 0 0.2rem; } figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; }
.key { margin: 0.4rem 0; } .key span { display: inline-block; margin-right: 1.2em; }
";

/// The style of every plot.
const PLOT_STYLE: &str = "
svg text { fill: var(--ink); font: 17px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; white-space: pre; }
.grid { stroke: var(--grid); } .c { fill: none; stroke-width: 2.5; }
.model { stroke-dasharray: 2 5; stroke-linecap: round; } .bar { stroke: var(--ink); stroke-width: 4; }
";

/// Colours that are readable on both backgrounds.
const PALETTE: [&str; COLOURS] = [
    "#2f7ed8", "#e0792b", "#2e9e5b", "#d64550", "#8f6bd6", "#9c6b4e", "#d667b0", "#7f8794", "#a9a21f",
    "#1fa9b8",
];

pub(super) fn page(report: &Report) -> String {
    let told = joined(report.heading.lines().map(|line| format!("<li>{}</li>\n", escape(line))));
    let operations = joined(grouped(&report.rows).into_iter().map(|rows| section(report, &rows)));
    let wrong: u64 = report.rows.iter().map(|row| row.errors).sum();
    let verdict = if wrong == 0 {
        "<p class=\"good\">All values are right.</p>".into()
    } else {
        format!("<p class=\"bad\">{wrong} VALUES ARE WRONG.</p>")
    };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>ryz bench</title>\n<style>{STYLE}{}</style>\n</head>\n<body>\n<h1>ryz bench</h1>\n\
         <ul class=\"told\">\n{told}</ul>\n{verdict}\n\
         {}{operations}</body>\n</html>\n",
        plot_style(),
        verdicts(report),
    )
}

/// Returns the rows of each operation, in the order of the first ones.
fn grouped(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|group| group[0].op == row.op) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
}

/// Returns the plots and the figures of one operation.
fn section(report: &Report, rows: &[&Row]) -> String {
    let op = &rows[0].op;
    let (latency, bandwidth) = (latencies(report, rows), bandwidths(report, rows));
    let targets = targets(report, op);
    let plots = [
        figure(
            "Latency, median of the slowest rank",
            &Plot { name: "latency", curves: &latency, targets: &targets, unit: units::time },
        ),
        figure(
            "Bus bandwidth",
            &Plot { name: "bus bandwidth", curves: &bandwidth, targets: &[], unit: gigabytes },
        ),
    ];
    let (columns, cells) = row_cells(rows.iter().copied(), report.judged);
    format!(
        "<section>\n<h2>{}</h2>\n<div class=\"plots\">\n{}</div>\n{}</section>\n",
        escape(op),
        plots.concat(),
        // The heading names the operation.
        table(&columns[1..], &cells.into_iter().map(|row| row[1..].to_vec()).collect::<Vec<_>>())
    )
}

fn plot_style() -> String {
    PALETTE.iter().enumerate().fold(PLOT_STYLE.to_owned(), |mut style, (index, colour)| {
        let _ = writeln!(
            style,
            ".c{index} {{ stroke: {colour}; }} circle.c{index}, .k{index} {{ fill: {colour}; color: {colour}; }}"
        );
        style
    })
}

/// Formats a value on the axis, or of a point.
fn gigabytes(gbs: f64) -> String {
    let text = if gbs < 1.0 { format!("{gbs:.4}") } else { format!("{gbs:.2}") };
    format!("{} GB/s", text.trim_end_matches('0').trim_end_matches('.'))
}

fn latencies(report: &Report, rows: &[&Row]) -> Vec<Curve> {
    curves(report, rows, |row| row.median_us, |row| row.expected_us)
}

fn bandwidths(report: &Report, rows: &[&Row]) -> Vec<Curve> {
    // Bandwidth is inverse to time.
    let expected = |row: &Row| row.expected_us.map(|us| row.busbw_gbs * row.median_us / us);
    curves(report, rows, |row| row.busbw_gbs, expected)
}

/// Returns the documented targets of an operation's measured sizes.
fn targets(report: &Report, op: &str) -> Vec<Target> {
    let is_measured = |bytes: u64| {
        // A size may be smaller by the remainder of a division among ranks.
        let near = bytes - bytes / 1000..=bytes;
        report.rows.iter().any(|row| row.what.name() == op && near.contains(&(row.bytes as u64)))
    };
    let targets =
        TARGETS.iter().filter(|target| report.judged && target.op == op && is_measured(target.bytes));
    let one = |target: &ryzanstein_process_group::targets::Target| Target {
        label: format!(
            "{} {} < {}",
            target.op,
            units::bytes(target.bytes as f64),
            units::time(target.below_us)
        ),
        at: (target.bytes as f64, target.below_us),
    };
    targets.map(one).collect()
}

fn verdicts(report: &Report) -> String {
    if !report.judged {
        return String::new();
    }
    let (columns, rows) = verdict_cells(&report.verdicts());
    format!("<h2>Documented targets</h2>\n{}", table(&columns, &rows))
}

/// Returns the path of the calls of a row as the user asked for it.
fn path(row: &Row) -> &str {
    if row.is_forced { &row.path } else { "auto" }
}

/// Returns one curve per path, in the order of the rows; barriers have no size and no curve. A path has the same colour on the whole
/// page.
fn curves(
    report: &Report,
    rows: &[&Row],
    value: impl Fn(&Row) -> f64,
    expected: impl Fn(&Row) -> Option<f64>,
) -> Vec<Curve> {
    let mut labels: Vec<&str> = Vec::new();
    for row in &report.rows {
        let label = path(row);
        if !labels.contains(&label) {
            labels.push(label);
        }
    }
    let mut curves: Vec<Curve> = Vec::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        let label = path(row);
        let index = curves.iter().position(|curve| curve.label == label).unwrap_or_else(|| {
            let colour = labels.iter().position(|known| *known == label).unwrap_or(0) % COLOURS;
            curves.push(Curve { label: label.into(), colour, points: Vec::new(), expected: Vec::new() });
            curves.len() - 1
        });
        let bytes = row.bytes as f64;
        curves[index].points.push((bytes, value(row)));
        curves[index].expected.extend(expected(row).map(|expected| (bytes, expected)));
    }
    curves
}

/// Returns a plot with its heading and its key; nothing if there is nothing to draw.
fn figure(heading: &str, plot: &Plot<'_>) -> String {
    let Some(svg) = plot.svg() else { return String::new() };
    let entries = plot
        .curves
        .iter()
        .map(|curve| format!("<span><b class=\"k{}\">●</b> {}</span>", curve.colour, escape(&curve.label)));
    format!(
        "<figure>\n<h3>{heading}</h3>\n{svg}<figcaption><p class=\"key\">{}</p><p class=\"key\">{}</p></figcaption>\n</figure>\n",
        joined(entries),
        plot.legend()
    )
}

fn table(columns: &[Column<'_>], rows: &[Vec<Cell>]) -> String {
    let class = |column: &Column<'_>| if column.is_left() { "" } else { " class=\"n\"" };
    let heads =
        joined(columns.iter().map(|column| format!("<th{}>{}</th>", class(column), escape(column.head()))));
    let cell = |(column, cell): (&Column<'_>, &Cell)| {
        // A path may break behind its transport.
        let text = escape(cell.text()).replace('/', "/<wbr>");
        let text = match cell.tone() {
            Tone::Good => format!("<span class=\"good\">{text}</span>"),
            Tone::Bad | Tone::Warning => format!("<span class=\"bad\">{text}</span>"),
            Tone::Plain | Tone::Faint | Tone::Strong => text,
        };
        format!("<td{}>{text}</td>", class(column))
    };
    let line = |row: &Vec<Cell>| format!("<tr>{}</tr>\n", joined(columns.iter().zip(row).map(cell)));
    let rows = joined(rows.iter().map(line));
    format!(
        "<div class=\"wide\"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )
}

/// Escapes a text for HTML or SVG.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect()
}
