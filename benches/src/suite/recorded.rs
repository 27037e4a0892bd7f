//! Rows of variants, from the lines that their ranks have written. Pure.

use ryzanstein_process_group::Error;
use serde::Deserialize;

/// The fields of a row by which variants are compared.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct RecordedRow {
    /// The operation, as named in rows.
    pub op: String,
    /// Bytes of the whole array.
    pub bytes: usize,
    /// The variant.
    pub variant: String,
    /// Median latency of the slowest rank in microseconds.
    pub median_us: f64,
}

/// Parses the rows in the text of `file`.
///
/// # Errors
/// [`Error::Configuration`] with the number of the first line that is not a row of a variant.
pub fn parse_rows(text: &str, file: &str) -> Result<Vec<RecordedRow>, Error> {
    let parse = |(index, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            Error::Configuration(format!("--rows {file}: line {} is no row of a variant: {error}", index + 1))
        })
    };
    text.lines().enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Collective;
    use crate::suite::json;
    use crate::suite::tests::row;

    #[test]
    fn a_line_that_is_no_row_of_a_variant_is_refused_by_its_number() {
        let mut of_variant = row(Collective::Barrier, 0, 1.0);
        of_variant.variant = Some("RING".into());
        let rows = parse_rows(&json(&of_variant), "a file").expect("a row");
        assert_eq!((rows[0].variant.as_str(), rows[0].median_us), ("RING", 1.0));
        let text = format!("{}\n{}\n", json(&of_variant), json(&row(Collective::Barrier, 0, 1.0)));
        let error = parse_rows(&text, "a file").unwrap_err().to_string();
        assert!(error.contains("--rows a file: line 2"), "{error}");
    }
}
