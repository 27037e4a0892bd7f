//! Rows that a file has already: the lines of `--format json`. Pure.

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
    /// Ranks.
    pub world_size: usize,
    /// The backend.
    pub backend: String,
    /// The path of the calls.
    pub path: String,
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
    use crate::measure::Collective;
    use crate::suite::json;
    use crate::suite::tests::row;

    #[test]
    fn a_line_that_is_no_row_is_refused_by_its_number_and_flag() {
        let text = format!("{}\n{{\"op\":1}}\n", json(&row(Collective::Barrier, 0, 1.0)));
        let error = parse_rows::<RecordedRow>(&text, "--out", "a file").unwrap_err().to_string();
        assert!(error.contains("--out a file: line 2"), "{error}");
    }
}
