//! Profiles for people to read.

use std::fmt::Write as _;

use crate::profile::ProfileRow;
use crate::targets::target;
use crate::units::{bytes, time};

/// Fewer calls than this are cold starts, which no target is meant for.
const JUDGED_FROM: u64 = 5;

/// Lays cells out in columns: the first `left` columns to the left, the others to the right.
pub fn columns(head: &[&str], left: usize, rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (index, (cell, width)) in cells.zip(&widths).enumerate() {
            let gap = if index == 0 { "" } else { "  " };
            let _ = if index < left {
                write!(text, "{gap}{cell:<width$}")
            } else {
                write!(text, "{gap}{cell:>width$}")
            };
        }
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(&mut head.iter().copied());
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    out
}

/// What the documented target says of a latency, with the verdict.
pub fn verdict(op: &str, bytes: u64, median_us: f64) -> (String, String) {
    match target(op, bytes) {
        None => ("-".into(), "-".into()),
        Some(t) => {
            (format!("< {}", time(t.below_us)), if median_us < t.below_us { "met" } else { "missed" }.into())
        }
    }
}

/// Figures of calls of one kind, as every table of latencies shows them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Figures {
    /// Bytes of the whole array.
    pub bytes: f64,
    /// Number of calls.
    pub calls: u64,
    /// Median, 90th and 99th percentile and largest latency, in microseconds.
    pub latency_us: [f64; 4],
    /// In 10⁹ bytes per second.
    pub algbw_gbs: f64,
    /// In 10⁹ bytes per second.
    pub busbw_gbs: f64,
}

impl Figures {
    /// The heads of [`cells`](Self::cells).
    pub const HEAD: [&'static str; 8] =
        ["bytes", "calls", "median", "p90", "p99", "max", "algbw GB/s", "busbw GB/s"];

    /// One row's cells.
    pub fn cells(&self) -> [String; 8] {
        let [median, p90, p99, max] = self.latency_us.map(time);
        let bandwidth = |gbs: f64| format!("{gbs:.3}");
        [
            bytes(self.bytes),
            self.calls.to_string(),
            median,
            p90,
            p99,
            max,
            bandwidth(self.algbw_gbs),
            bandwidth(self.busbw_gbs),
        ]
    }
}

/// The rows of a profile as a table with percentiles, bandwidths, path, target and verdict; and where the capability of
/// the links is known, the share of it that was used.
pub fn profile(rows: &[ProfileRow]) -> String {
    let linked = rows.iter().any(|r| r.link_share.is_some());
    let share: &[&str] = if linked { &["of NVLink"] } else { &[] };
    let head = [&["group", "operation", "dtype", "path"][..], &Figures::HEAD, share, &["target", "verdict"]]
        .concat();
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            let (target, verdict) = if r.timed < JUDGED_FROM || r.path == "local" {
                ("-".into(), "-".into())
            } else {
                verdict(r.op, r.bytes_mean as u64, r.median_us)
            };
            let reduction = r.reduction.map_or_else(String::new, |op| format!("({op})"));
            let figures = Figures {
                bytes: r.bytes_mean,
                calls: r.calls,
                latency_us: [r.median_us, r.p90_us, r.p99_us, r.max_us],
                algbw_gbs: r.algbw_gbs,
                busbw_gbs: r.busbw_gbs,
            };
            let mut row =
                vec![r.group.clone(), format!("{}{reduction}", r.op), r.dtype.to_string(), r.path.clone()];
            if r.timed == 0 {
                row.extend([bytes(r.bytes_mean), r.calls.to_string()]);
                row.extend((2..Figures::HEAD.len()).map(|_| "-".into()));
            } else {
                row.extend(figures.cells());
            }
            if linked {
                row.push(r.link_share.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0)));
            }
            row.extend([target, verdict]);
            row
        })
        .collect();
    columns(&head, 4, &cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_at_most_and_no_empty_ones() {
        assert_eq!(bytes(100_000.0), "100 KB");
        assert_eq!(bytes(10_500_000.0), "10.5 MB");
        assert_eq!(bytes(7.0), "7 B");
        assert_eq!(time(500.0), "500 us");
        assert_eq!(time(9.512), "9.51 us");
        assert_eq!(time(75_157.9), "75.16 ms");
    }

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["bcd".into(), "22".into()]];
        assert_eq!(columns(&["x", "n"], 1, &rows), "x     n\na     1\nbcd  22\n");
    }
}
