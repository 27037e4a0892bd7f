//! The files that results are written to.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use ryzanstein_orchestrator::bench::{self, Recorded, RecordedRow, Row, parse_rows};
use tempfile::NamedTempFile;

/// Writes a whole result at once.
pub(super) fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let what = || format!("cannot write --out {}", file.display());
    let mut unfinished = temporary_file_for(file)?;
    unfinished.write_all(text.as_bytes()).with_context(what)?;
    unfinished.persist(target(file)).with_context(what)?;
    Ok(())
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

/// A temporary file in the same folder. It replaces `file` at the end, so a run that fails leaves an earlier result as it was.
pub(super) fn temporary_file_for(file: &Path) -> anyhow::Result<NamedTempFile> {
    let shown = file.display();
    if file.is_dir() {
        bail!("cannot write --out {shown}: it is a folder; name a file in it");
    }
    if file.exists() && !file.is_file() {
        bail!("cannot write --out {shown}: it is not a regular file; name another one");
    }
    let file = target(file);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Those of the file that it replaces, or of a new one; both less the umask.
    let permissions = std::fs::metadata(&file)
        .map_or_else(|_| std::fs::Permissions::from_mode(0o666), |metadata| metadata.permissions());
    tempfile::Builder::new()
        .prefix(".ryz-bench-")
        .permissions(permissions)
        .tempfile_in(folder)
        .with_context(|| format!("cannot write --out {shown}"))
}

/// The file that a link leads to.
fn target(file: &Path) -> PathBuf {
    file.canonicalize().unwrap_or_else(|_| file.to_owned())
}
