//! Rows of an existing file: the lines of `--format json`. Pure.

use ryzanstein_process_group::Error;
use serde::Deserialize;

/// The identity of a row, and its figures that are compared.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct RecordedRow {
    /// The identity of the row.
    #[serde(flatten)]
    pub key: RowKey,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
    /// 25th percentile of the latency.
    pub p25_us: f64,
    /// 75th percentile of the latency.
    pub p75_us: f64,
    /// Number of timed calls.
    pub calls: usize,
}

/// The identity of a row.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
pub struct RowKey {
    /// The operation, as named in rows.
    pub op: String,
    /// Element type.
    pub dtype: String,
    /// Bytes of the whole array.
    pub bytes: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: String,
    /// The path of the calls.
    pub path: String,
    /// True if a CUDA graph replayed the calls.
    #[serde(default)]
    pub graph: bool,
    /// The variant, with `--vary`.
    #[serde(default)]
    pub variant: Option<String>,
    /// The round of the variants.
    #[serde(default)]
    pub round: Option<usize>,
}

/// Parses the rows in the text of `file`, which `flag` names.
///
/// # Errors
/// [`Error::Configuration`] with the number of the first line that is not a row.
pub fn parse_rows(text: &str, flag: &str, file: &str) -> Result<Vec<RecordedRow>, Error> {
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
    use crate::measure::Collective;
    use crate::suite::json;
    use crate::suite::tests::row;

    #[test]
    fn a_line_that_is_no_row_is_refused_by_its_number_and_flag() {
        let text = format!("{}\n{{\"op\":1}}\n", json(&row(Collective::Barrier, 0, 1.0)));
        let error = parse_rows(&text, "--out", "a file").unwrap_err().to_string();
        assert!(error.contains("--out a file: line 2"), "{error}");
    }
}
