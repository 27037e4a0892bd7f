//! Rows of variants, from the lines that their ranks have written. Pure.

use ryzanstein_process_group::Error;
use serde::Deserialize;

/// The part of a row that variants are compared by.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct RecordedRow {
    /// The operation, as named in rows.
    pub op: String,
    /// Bytes of the whole array.
    pub bytes: usize,
    /// The variant.
    pub variant: Option<String>,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
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
