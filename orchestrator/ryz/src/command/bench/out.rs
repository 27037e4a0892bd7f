//! The files that results are written to.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use crate::output_file;
use anyhow::Context as _;
use ryzanstein_benches::suite::{self as bench, RecordedRow, Row, parse_rows};

/// Writes a whole result at once.
pub(super) fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    output_file::replace(file, text, &format!("--out {}", file.display()))
}

/// Fails if the result cannot be written at the end. Leaves no file.
pub(super) fn check(file: &Path) -> anyhow::Result<()> {
    output_file::check(file, &format!("--out {}", file.display()))
}

/// Returns the rows of the variants.
pub(super) fn rows(file: &Path) -> anyhow::Result<Vec<RecordedRow>> {
    let shown = file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    Ok(parse_rows(&text, &shown)?)
}

/// Adds a row as a line, in one piece, past any buffer: the process that compares reads the file meanwhile.
pub(super) fn add(file: &Path, row: &Row) -> anyhow::Result<()> {
    let opened = File::options().append(true).create(true).open(file);
    let written = opened.and_then(|mut file| file.write_all((bench::json(row) + "\n").as_bytes()));
    written.with_context(|| format!("cannot write --rows {}", file.display()))
}
