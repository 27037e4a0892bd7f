//! Compares rows with an earlier result. Pure.

use std::collections::BTreeMap;

use ryzanstein_process_group::{Error, units};

use super::Row;
use super::recorded::{RecordedRow, RowKey, parse_rows};
use crate::measure::Summary;
use ryzanstein_orchestrator::table::{Cell, Column, Screen, Tone, table};

impl From<&RecordedRow> for Summary {
    fn from(row: &RecordedRow) -> Self {
        let RecordedRow { median_us, p25_us, p75_us, calls, .. } = *row;
        Self { calls, p25_us, median_us, p75_us, ..Self::default() }
    }
}

/// Splits a key into the key without its path, and the path: rows that differ in their path only are compared.
fn split(key: RowKey) -> (RowKey, String) {
    let path = key.path;
    (RowKey { path: String::new(), ..key }, path)
}

/// An earlier result, from the lines of `--format json`. For each kind of row, it has the path and the figures of all rows, in
/// their order.
#[derive(Clone, PartialEq, Debug)]
pub struct Earlier(BTreeMap<RowKey, Vec<(String, Summary)>>);

/// The change of a row from the earlier one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Slower by more than the tolerance, and by more than chance.
    Slower,
    /// Faster by as much.
    Faster,
    /// Neither slower nor faster.
    Same,
    /// The row is not in the earlier result.
    Missing,
}

impl Change {
    fn cell(self) -> Cell {
        match self {
            Self::Slower => Cell::new("slower", Tone::Bad),
            Self::Faster => Cell::new("faster", Tone::Good),
            Self::Same => "same".into(),
            Self::Missing => Cell::new("not there", Tone::Faint),
        }
    }
}

/// The comparison of a whole result.
#[derive(Clone, PartialEq, Debug)]
pub struct Comparison {
    rows: Vec<(String, usize, Option<f64>, f64, Change)>,
    tolerance: f64,
}

impl Earlier {
    /// Parses the text of a file, which is named in errors.
    ///
    /// # Errors
    /// [`Error::Configuration`] with the number of the first line that is not a row.
    pub fn parse(text: &str, file: &str) -> Result<Self, Error> {
        let mut rows = BTreeMap::<RowKey, Vec<(String, Summary)>>::new();
        // Rows of `--vary` are compared with each other.
        let plain = |row: &RecordedRow| row.key.variant.is_none();
        for row in parse_rows(text, "--compare", file)?.into_iter().filter(plain) {
            let figures = Summary::from(&row);
            let (key, path) = split(row.key);
            rows.entry(key).or_default().push((path, figures));
        }
        if rows.is_empty() {
            return Err(Error::Configuration(format!(
                "--compare {file}: it has no rows; expected the lines of `ryz bench --format json` without --vary"
            )));
        }
        Ok(Self(rows))
    }

    /// Compares rows, the first one of each kind with the first earlier one of the kind and so on: several paths of an
    /// operation are measured in the same order. Where there are more or fewer than before, a row of a forced path is compared
    /// with one of the same path. `tolerance` is a share.
    pub fn compare(&self, rows: &[Row], tolerance: f64) -> Comparison {
        let mut counts = BTreeMap::<RowKey, usize>::new();
        for row in rows {
            *counts.entry(split(row.key()).0).or_default() += 1;
        }
        // Earlier rows that have not been compared yet.
        let mut left = self.0.clone();
        let one = |row: &Row| {
            let (key, path) = split(row.key());
            let before = left.get_mut(&key).and_then(|left| {
                let all = self.0.get(&key).map_or(0, Vec::len);
                let is_first = left.len() == all && !row.is_forced;
                let is_alike =
                    |one: &(String, Summary)| counts.get(&key) == Some(&all) || is_first || one.0 == path;
                let at = left.iter().position(is_alike)?;
                Some(left.remove(at).1)
            });
            let now = Summary {
                calls: row.calls,
                p25_us: row.p25_us,
                median_us: row.median_us,
                p75_us: row.p75_us,
                ..row.latency
            };
            let change = match before {
                None => Change::Missing,
                Some(before) if now.is_slower(&before, tolerance) => Change::Slower,
                Some(before) if before.is_slower(&now, tolerance) => Change::Faster,
                Some(_) => Change::Same,
            };
            (row.label(), row.bytes, before.map(|before| before.median_us), now.median_us, change)
        };
        Comparison { rows: rows.iter().map(one).collect(), tolerance }
    }
}

impl Comparison {
    /// Returns the number of rows with this change.
    pub fn count(&self, change: Change) -> usize {
        self.rows.iter().filter(|(.., of)| *of == change).count()
    }

    /// Returns the number of compared rows.
    pub fn compared(&self) -> usize {
        self.rows.len() - self.count(Change::Missing)
    }

    /// Formats the comparison for people.
    pub fn table(&self, screen: Screen) -> String {
        let columns = [
            Column::left("operation"),
            Column::right("bytes"),
            Column::right("before").drop_priority(1),
            Column::right("now").drop_priority(1),
            Column::right("ratio"),
            Column::left("change"),
        ];
        let cells = |(label, bytes, before, now, change): &(String, usize, Option<f64>, f64, Change)| {
            let shown = |value: Option<String>| value.map_or_else(|| "-".into(), Cell::from);
            vec![
                label.as_str().into(),
                units::bytes(*bytes as f64).into(),
                shown(before.map(units::time)),
                units::time(*now).into(),
                shown(before.filter(|before| *before > 0.0).map(|before| format!("{:.2}", now / before))),
                change.cell(),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.rows.iter().map(cells).collect();
        format!(
            "Compared with the earlier result; slower and faster: by more than {} %, and by more than chance\n{}",
            self.tolerance * 100.0,
            table(&columns, &rows, screen)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Collective;
    use crate::suite::json;
    use crate::suite::tests::row;

    /// Returns a row of 25 calls whose middle half spreads over `spread` microseconds: its half notch is 0.314 of that.
    fn spread(median_us: f64, spread: f64) -> Row {
        let row = row(Collective::AllReduce, 1000, median_us);
        Row { p25_us: median_us - spread / 2.0, p75_us: median_us + spread / 2.0, calls: 25, ..row }
    }

    fn change(before: &Row, now: Row) -> Change {
        let earlier = Earlier::parse(&json(before), "a file").expect("a row");
        earlier.compare(&[now], 0.1).rows[0].4
    }

    #[test]
    fn a_change_counts_beyond_the_tolerance_and_beyond_chance_only() {
        assert_eq!(change(&spread(100.0, 10.0), spread(109.0, 1.0)), Change::Same, "within the tolerance");
        assert_eq!(change(&spread(100.0, 10.0), spread(112.0, 10.0)), Change::Slower);
        assert_eq!(change(&spread(100.0, 30.0), spread(112.0, 30.0)), Change::Same, "notches overlap");
        assert_eq!(change(&spread(112.0, 10.0), spread(100.0, 10.0)), Change::Faster);
        let other = row(Collective::Broadcast, 1000, 1.0);
        assert_eq!(change(&spread(100.0, 1.0), other), Change::Missing);
    }

    #[test]
    fn rows_of_several_paths_are_compared_in_their_order() {
        let before = format!("{}\n\n{}\n", json(&spread(100.0, 1.0)), json(&spread(50.0, 1.0)));
        let earlier = Earlier::parse(&before, "a file").expect("rows");
        let compared = earlier.compare(&[spread(100.0, 1.0), spread(100.0, 1.0), spread(1.0, 1.0)], 0.1);
        assert_eq!(
            (compared.count(Change::Same), compared.count(Change::Slower), compared.compared()),
            (1, 1, 2)
        );
        let text = compared.table(Screen::PLAIN);
        assert!(text.contains("all_reduce   1 KB   50 us  100 us   2.00  slower"), "{text}");
    }

    #[test]
    fn rows_of_other_numbers_of_paths_are_compared_by_path() {
        let of = |path: &str, median_us: f64, is_forced| Row {
            path: path.into(),
            is_forced,
            ..spread(median_us, 1.0)
        };
        let before = [of("nccl", 50.0, false), of("nccl", 50.0, true)].map(|row| json(&row)).join("\n");
        let earlier = Earlier::parse(&before, "a file").expect("rows");
        let now = [of("peer/one_shot", 25.0, false), of("peer/one_shot", 25.0, true), of("nccl", 50.0, true)];
        let changes: Vec<Change> = earlier.compare(&now, 0.1).rows.iter().map(|row| row.4).collect();
        assert_eq!(changes, [Change::Faster, Change::Missing, Change::Same]);
        let graph = Row { graph: true, ..of("nccl", 50.0, false) };
        assert_eq!(earlier.compare(&[graph], 0.1).compared(), 0, "replays are no calls");
    }

    #[test]
    fn a_file_that_is_no_result_is_refused_by_its_line() {
        let error = |text: &str| Earlier::parse(text, "a file").unwrap_err().to_string();
        assert!(error("").contains("it has no rows"), "{}", error(""));
        let old = r#"{"op":"all_reduce","dtype":"f32","bytes":1,"world_size":2,"backend":"tcp","path":"tcp/ring","median_us":1.0}"#;
        let said = error(&format!("{}\n{old}\n", json(&spread(1.0, 1.0))));
        assert!(
            said.contains("a file: line 2") && said.contains("p25_us") && said.contains("again"),
            "{said}"
        );
    }
}
