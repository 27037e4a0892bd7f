//! Compares rows with an earlier result. Pure.

use std::collections::BTreeMap;

use ryzanstein_process_group::{Error, units};
use serde::Deserialize;

use super::Row;
use super::recorded::{one, parse_rows};
use crate::measure::Summary;
use crate::table::{Cell, Column, Screen, Tone, table};

/// What of an earlier row is compared.
#[derive(Clone, PartialEq, Debug, Deserialize)]
struct EarlierRow {
    op: String,
    dtype: String,
    bytes: usize,
    world_size: usize,
    backend: String,
    #[serde(default = "one")]
    groups: usize,
    /// Of `--vary`, whose rows are compared with each other.
    #[serde(default)]
    variant: Option<String>,
    #[serde(flatten)]
    spread: Spread,
}

/// A median and how far it can be trusted.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
struct Spread {
    median_us: f64,
    p25_us: f64,
    p75_us: f64,
    calls: usize,
}

impl From<Spread> for Summary {
    fn from(spread: Spread) -> Self {
        let Spread { median_us, p25_us, p75_us, calls } = spread;
        Self { calls, p25_us, median_us, p75_us, ..Self::default() }
    }
}

/// Rows that are of the same operation, type, size, ranks, backend and groups at once.
type Key = (String, String, usize, usize, String, usize);

/// An earlier result: the lines of `--format json`.
#[derive(Clone, PartialEq, Debug)]
pub struct Earlier(BTreeMap<Key, Vec<Spread>>);

/// How a row compares with the earlier one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Slower by more than the tolerance, and by more than chance.
    Slower,
    /// Quicker by as much.
    Faster,
    /// Neither.
    Same,
    /// The earlier result does not have it.
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
    /// From the text of a file, named in errors.
    ///
    /// # Errors
    /// [`Error::Configuration`] with the number of the first line that is no row.
    pub fn parse(text: &str, file: &str) -> Result<Self, Error> {
        let mut rows = BTreeMap::<Key, Vec<Spread>>::new();
        let plain = |row: &EarlierRow| row.variant.is_none();
        for row in parse_rows::<EarlierRow>(text, "--compare", file)?.into_iter().filter(plain) {
            let key = (row.op, row.dtype, row.bytes, row.world_size, row.backend, row.groups);
            rows.entry(key).or_default().push(row.spread);
        }
        if rows.is_empty() {
            return Err(Error::Configuration(format!(
                "--compare {file}: it has no rows; expected the lines of `ryz bench --format json` without --vary"
            )));
        }
        Ok(Self(rows))
    }

    /// Compares rows, the first one of each kind with the first earlier one of the kind and so on: several paths of an operation
    /// are measured in the same order. `tolerance` is a share.
    pub fn compare(&self, rows: &[Row], tolerance: f64) -> Comparison {
        let mut seen = BTreeMap::<Key, usize>::new();
        let one = |row: &Row| {
            let key = row.key();
            let key = (key.op, key.dtype, key.bytes, key.world_size, key.backend, key.groups);
            let number = seen.entry(key.clone()).or_default();
            let before =
                self.0.get(&key).and_then(|spreads| spreads.get(*number)).copied().map(Summary::from);
            *number += 1;
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
    /// How many rows changed so.
    pub fn count(&self, change: Change) -> usize {
        self.rows.iter().filter(|(.., of)| *of == change).count()
    }

    /// How many rows were compared.
    pub fn compared(&self) -> usize {
        self.rows.len() - self.count(Change::Missing)
    }

    /// For people.
    pub fn table(&self, screen: Screen) -> String {
        let columns = [
            Column::left("operation"),
            Column::right("bytes"),
            Column::right("before").dispensable(1),
            Column::right("now").dispensable(1),
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
    use crate::bench::json;
    use crate::bench::tests::row;
    use crate::measure::Collective;

    /// A row of 25 calls whose middle half spreads over `spread` microseconds: its half notch is 0.314 of that.
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
    fn a_file_that_is_no_result_is_refused_by_its_line() {
        let error = |text: &str| Earlier::parse(text, "a file").unwrap_err().to_string();
        assert!(error("").contains("it has no rows"), "{}", error(""));
        let old =
            r#"{"op":"all_reduce","dtype":"f32","bytes":1,"world_size":2,"backend":"tcp","median_us":1.0}"#;
        let said = error(&format!("{}\n{old}\n", json(&spread(1.0, 1.0))));
        assert!(
            said.contains("a file: line 2") && said.contains("p25_us") && said.contains("again"),
            "{said}"
        );
    }
}
