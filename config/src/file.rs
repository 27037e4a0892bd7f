//! Reads files of users: regular files only, up to a limit for each kind. Writes files that others may read meanwhile.
//!
//! A pipe, a device or a huge file in the place of a small one must neither block nor fill the memory.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read, Write as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::ByteSize;

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Something other than a regular file.
    #[error("this is {found}, not a regular file; give the path of the file itself")]
    NotRegular {
        /// What it is, such as `a pipe`.
        found: &'static str,
    },
    /// A file larger than any of its kind.
    #[error(
        "the file has more than {limit}, the most that is read of a file of this kind; is it the right one?"
    )]
    TooLarge {
        /// The most bytes that a file of this kind may have.
        limit: ByteSize,
    },
    /// What Git leaves in place of a large file that has not been fetched.
    #[error(
        "this is a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned, or download the file"
    )]
    LfsPointer,
    /// A file that is not text.
    #[error("the file is not UTF-8 text ({0}); is it the right one?")]
    NotText(#[from] std::str::Utf8Error),
}

impl FileError {
    /// Whether another try would fail in the same way.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Io(error) => matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied
            ),
            Self::NotRegular { .. } | Self::TooLarge { .. } | Self::LfsPointer | Self::NotText(_) => true,
        }
    }

    /// Whether there is no such file.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// [`FileError::Io`], or [`FileError::NotRegular`].
pub fn open(path: &Path) -> Result<File, FileError> {
    // Without `NONBLOCK`, a pipe would block until somebody writes into it.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => {
            check_regular(file.metadata()?.file_type())?;
            Ok(file)
        }
        Err(error) => {
            // A socket, and a device without a driver, cannot even be opened.
            if let Ok(metadata) = path.metadata() {
                check_regular(metadata.file_type())?;
            }
            Err(error.into())
        }
    }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// [`FileError`], but never [`FileError::NotText`].
pub fn read(path: &Path, limit: ByteSize) -> Result<Vec<u8>, FileError> {
    let file = open(path)?;
    let mut bytes = Vec::new();
    // The length in the metadata may be wrong by the time of reading; what is read counts.
    file.take(limit.get().saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit.get() {
        return Err(FileError::TooLarge { limit });
    }
    check_fetched(&bytes)?;
    Ok(bytes)
}

/// As [`read`], for a file of UTF-8 text.
///
/// # Errors
/// [`FileError`].
pub fn read_text(path: &Path, limit: ByteSize) -> Result<String, FileError> {
    String::from_utf8(read(path, limit)?).map_err(|error| error.utf8_error().into())
}

/// Refuses a Git LFS pointer. [`read`] already does this.
///
/// # Errors
/// [`FileError::LfsPointer`].
pub fn check_fetched(start: &[u8]) -> Result<(), FileError> {
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(FileError::LfsPointer);
    }
    Ok(())
}

/// Writes a file that only its owner can read, whole or not at all. Replaces the one that is there, never writes into it. Leaves
/// nothing else in the folder, also when it fails.
///
/// # Errors
/// The operating system's.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".ryz-").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

fn check_regular(kind: FileType) -> Result<(), FileError> {
    let found = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    Err(FileError::NotRegular { found })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    const LIMIT: ByteSize = ByteSize::bytes(4);

    fn refused(path: &Path) -> String {
        let error = read_text(path, LIMIT).unwrap_err();
        assert!(error.is_permanent() && !error.is_not_found(), "{error}");
        error.to_string()
    }

    #[test]
    fn what_is_not_a_regular_file_is_named_and_never_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        assert!(refused(folder.path()).starts_with("this is a folder, not a regular file"));
        assert!(refused("/dev/zero".as_ref()).starts_with("this is a device"));
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(refused(&pipe).starts_with("this is a pipe"));
        let socket = folder.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(refused(&socket).starts_with("this is a socket"));
    }

    #[test]
    fn a_file_is_replaced_whole_and_is_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        std::fs::write(&other, "other").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        for bytes in [&b"first"[..], b"2"] {
            replace(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read(&other).unwrap(), b"other", "a link is replaced, not followed");
        let taken = folder.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        replace(&taken, b"3").unwrap_err();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left");
    }

    #[test]
    fn a_file_is_read_up_to_its_limit_and_only_as_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(read(&path, LIMIT).unwrap_err().is_not_found());
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_text(&path, LIMIT).unwrap(), "four");
        std::fs::write(&path, "five!").unwrap();
        assert!(refused(&path).starts_with("the file has more than 4B"));
        std::fs::write(&path, [0xff]).unwrap();
        assert!(refused(&path).starts_with("the file is not UTF-8 text"));
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
        let error = read(&path, ByteSize::kib(1)).unwrap_err();
        assert!(error.is_permanent() && error.to_string().contains("git lfs pull"), "{error}");
        // As large as it says, although nothing was ever written.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(refused(&path).starts_with("the file has more than 4B"));
    }
}
