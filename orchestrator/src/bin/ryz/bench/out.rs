//! The files that results are written to.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use ryzanstein_orchestrator::bench::{self, Recorded, RecordedRow, Row, parse_rows};
use ryzanstein_orchestrator::output_file;

/// Writes a whole result at once.
pub(super) fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    output_file::replace(file, text, &format!("--out {}", file.display()))
}

/// Fails if the result cannot be written at the end. Leaves nothing.
pub(super) fn check(file: &Path) -> anyhow::Result<()> {
    output_file::check(file, &format!("--out {}", file.display()))
}

/// The rows of a file to which rows are added, less a last line that an interrupted run did not finish; and the length of the
/// finished lines. No file has no rows.
pub(super) fn rows(file: &Path) -> anyhow::Result<(Vec<RecordedRow>, u64)> {
    if !file.exists() {
        return Ok((Vec::new(), 0));
    }
    if !file.is_file() {
        bail!("cannot write --out {}: it is not a regular file; name another one", file.display());
    }
    let mut text = String::new();
    File::open(file)
        .and_then(|mut file| file.read_to_string(&mut text))
        .with_context(|| format!("cannot read --out {}", file.display()))?;
    let finished = text.rfind('\n').map_or(0, |end| end + 1);
    let rows = parse_rows(&text[..finished], "--out", &file.display().to_string())?;
    Ok((rows, finished as u64))
}

/// A file that grows by a line with every row.
#[derive(Debug)]
pub(super) struct Growing {
    file: File,
    shown: String,
}

impl Growing {
    /// Opens it, or makes it, and says what it has already.
    pub(super) fn open(file: &Path) -> anyhow::Result<(Self, Recorded)> {
        let shown = file.display().to_string();
        let (rows, finished) = rows(file)?;
        let opened = File::options().append(true).create(true).open(file);
        let opened = opened.and_then(|file| file.set_len(finished).map(|()| file));
        let file = opened.with_context(|| format!("cannot write --out {shown}"))?;
        Ok((Self { file, shown }, Recorded::new(rows)))
    }

    pub(super) fn add(&mut self, row: &Row) -> anyhow::Result<()> {
        // In one piece, past any buffer, so that an interrupted run keeps it.
        let line = bench::json(row) + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| format!("cannot write --out {}", self.shown))
    }
}
