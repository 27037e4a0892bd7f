//! Rows that a file has already: the lines of `--format json`. Pure.

use std::collections::BTreeMap;

use ryzanstein_process_group::Error;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// What a row is recognised by, and what is compared side by side.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct RecordedRow {
    /// What it is of.
    #[serde(flatten)]
    pub key: RowKey,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
    /// Wrong elements.
    pub errors: u64,
}

/// What a row is of.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
pub struct RowKey {
    /// The operation as rows name it.
    pub op: String,
    /// Element type.
    pub dtype: String,
    /// Bytes of the whole array.
    pub bytes: usize,
    /// Ranks of a group.
    pub world_size: usize,
    /// The backend.
    pub backend: String,
    /// The path of the calls.
    pub path: String,
    /// Groups that called at the same time.
    #[serde(default = "one")]
    pub groups: usize,
    /// Whether a CUDA graph replayed the calls.
    #[serde(default)]
    pub graph: bool,
    /// The variant, with `--vary`.
    #[serde(default)]
    pub variant: Option<String>,
    /// The round of the variants.
    #[serde(default)]
    pub round: Option<usize>,
}

const fn one() -> usize {
    1
}

/// The rows of a file that need not be measured again.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recorded(BTreeMap<RowKey, usize>);

impl Recorded {
    /// Of rows with right values: others are measured again.
    pub fn new(rows: impl IntoIterator<Item = RecordedRow>) -> Self {
        let mut counts = BTreeMap::new();
        for row in rows.into_iter().filter(|row| row.errors == 0) {
            *counts.entry(row.key).or_default() += 1;
        }
        Self(counts)
    }

    /// Whether one more row of this kind is there. The same path may have been measured twice: as the backend's own choice, and
    /// because it was forced.
    pub fn take(&mut self, key: &RowKey) -> bool {
        match self.0.get_mut(key) {
            Some(count @ 1..) => {
                *count -= 1;
                true
            }
            _ => false,
        }
    }
}

/// The rows in the text of `file`, which `flag` names.
///
/// # Errors
/// [`Error::Configuration`] with the number of the first line that is no row.
pub fn parse_rows<T: DeserializeOwned>(text: &str, flag: &str, file: &str) -> Result<Vec<T>, Error> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(index, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            Error::Configuration(format!(
                "{flag} {file}: line {} is no row of `ryz bench --format json`: {error}; record the result again with this \
                 version",
                index + 1
            ))
        })
    };
    lines.map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::{row, wrong_row};
    use crate::bench::{Row, json};
    use crate::measure::Collective;

    fn parsed(rows: &[Row]) -> Vec<RecordedRow> {
        let text: String = rows.iter().map(|row| json(row) + "\n").collect();
        parse_rows(&text, "--out", "a file").expect("rows")
    }

    #[test]
    fn a_row_is_found_again_as_often_as_it_is_there() {
        let plain = row(Collective::AllReduce, 1000, 5.0);
        let in_round =
            Row { variant: Some("ring".into()), round: Some(2), ..row(Collective::AllReduce, 1000, 5.0) };
        let mut recorded = Recorded::new(parsed(&[plain.clone(), in_round.clone(), plain.clone()]));
        assert!(recorded.take(&plain.key()) && recorded.take(&plain.key()) && !recorded.take(&plain.key()));
        assert!(recorded.take(&in_round.key()));
        assert!(!recorded.take(&Row { round: Some(3), ..in_round }.key()));
    }

    #[test]
    fn a_row_with_wrong_values_is_measured_again() {
        let wrong = wrong_row(Collective::AllReduce, 1000, 5.0, 1);
        assert!(!Recorded::new(parsed(std::slice::from_ref(&wrong))).take(&wrong.key()));
    }

    #[test]
    fn a_line_that_is_no_row_is_refused_by_its_number_and_flag() {
        let text = format!("{}\n{{\"op\":1}}\n", json(&row(Collective::Barrier, 0, 1.0)));
        let error = parse_rows::<RecordedRow>(&text, "--out", "a file").unwrap_err().to_string();
        assert!(error.contains("--out a file: line 2"), "{error}");
    }
}
