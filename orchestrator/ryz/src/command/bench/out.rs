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

/// A file that grows by a line with every row.
#[derive(Debug)]
pub(super) struct Growing {
    file: File,
    shown: String,
}

impl Growing {
    /// Opens or creates the file.
    pub(super) fn open(file: &Path) -> anyhow::Result<Self> {
        let shown = file.display().to_string();
        let file = File::options().append(true).create(true).open(file);
        Ok(Self { file: file.with_context(|| format!("cannot write --rows {shown}"))?, shown })
    }

    pub(super) fn add(&mut self, row: &Row) -> anyhow::Result<()> {
        // In one piece, past any buffer: the process that compares reads it meanwhile.
        let line = bench::json(row) + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write --rows {}", self.shown))
    }
}
