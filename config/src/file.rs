//! Reads users' files: regular files only, with a size limit for each kind. Replaces files atomically, so that others may read
//! them at the same time.
//!
//! A pipe, a device or a huge file in place of a small one must neither block nor exhaust the memory.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::ByteSize;

/// An error of reading a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// An error of the operating system.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A path of something other than a regular file.
    #[error("this is {found}, not a regular file; give the path of the file itself")]
    NotRegular {
        /// Its type, such as `a pipe`.
        found: &'static str,
    },
    /// A symbolic link to a file that does not exist, as in a copy of a Hugging Face cache without its blobs.
    #[error(
        "this is a link to {}, which does not exist; copy the folder again with `cp -rL`, or download the file", .target.display()
    )]
    BrokenLink {
        /// The path that the link contains.
        target: PathBuf,
    },
    /// A file that is larger than the limit of its kind.
    #[error(
        "the file has more than {limit}, the most that is read of a file of this kind; is it the right one?"
    )]
    TooLarge {
        /// The maximum size of a file of this kind.
        limit: ByteSize,
    },
    /// A Git LFS pointer, which Git leaves in place of a large file that has not been fetched.
    #[error(
        "this is a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned, or download the file"
    )]
    LfsPointer,
    /// Another user may have written a file that decides what this process runs or trusts.
    #[error("{0}")]
    Untrusted(String),
    /// A file that is not text.
    #[error("the file is not UTF-8 text ({0}); is it the right one?")]
    NotText(#[from] std::str::Utf8Error),
}

impl FileError {
    /// Returns true if another attempt would fail in the same way.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Io(error) => matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied
            ),
            Self::NotRegular { .. }
            | Self::BrokenLink { .. }
            | Self::TooLarge { .. }
            | Self::LfsPointer
            | Self::Untrusted(_)
            | Self::NotText(_) => true,
        }
    }

    /// Returns true if the file does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// Returns [`FileError::Io`], [`FileError::NotRegular`] or [`FileError::BrokenLink`].
pub fn open(path: &Path) -> Result<File, FileError> {
    // Without `NONBLOCK`, opening a pipe would block until it has a writer.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => {
            check_regular(file.metadata()?.file_type())?;
            Ok(file)
        }
        Err(error) => {
            // A socket, or a device without a driver, cannot be opened at all.
            if let Ok(metadata) = path.metadata() {
                check_regular(metadata.file_type())?;
            } else if let (ErrorKind::NotFound, Ok(target)) = (error.kind(), path.read_link()) {
                return Err(FileError::BrokenLink { target });
            }
            Err(error.into())
        }
    }
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// Returns any [`FileError`] except [`FileError::NotText`].
pub fn read(path: &Path, limit: ByteSize) -> Result<Vec<u8>, FileError> {
    read_to_limit(open(path)?, limit)
}

/// Reads a file that decides what this process runs or trusts, as [`read`] does: one that no other user may have written.
///
/// # Errors
/// Returns any [`FileError`] except [`FileError::NotText`].
pub fn read_trusted(path: &Path, limit: ByteSize) -> Result<Vec<u8>, FileError> {
    let file = open(path)?;
    let metadata = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    match distrust(metadata.uid(), metadata.gid(), metadata.mode(), user) {
        Some(why) => Err(FileError::Untrusted(why)),
        None => read_to_limit(file, limit),
    }
}

/// Returns the reason why `user` must not trust a file with this owner, group and mode: another user may have written it. Root
/// may write every file.
fn distrust(owner: u32, group: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user && owner != 0 {
        return Some(format!(
            "it belongs to user {owner}, not to user {user} or root, and would decide what this process runs or trusts; if you \
             trust it, run as user {owner}, or use a copy of your own"
        ));
    }
    // By convention, the group with the number of a user has no other members.
    let groups = if group == owner || group == 0 { 0 } else { 0o020 };
    (mode & (groups | 0o002) != 0).then(|| {
        format!(
            "it has mode {:04o}, so other users can write it, and would decide what this process runs or trusts; if you trust \
             it: chmod go-w, or use a copy of your own",
            mode & 0o7777
        )
    })
}

fn read_to_limit(file: File, limit: ByteSize) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    // The size in the metadata may be outdated, so the limit is applied to the bytes that are read.
    file.take(limit.get().saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit.get() {
        return Err(FileError::TooLarge { limit });
    }
    check_fetched(&bytes)?;
    Ok(bytes)
}

/// Reads a file of UTF-8 text, as [`read`] does.
///
/// # Errors
/// Returns any [`FileError`].
pub fn read_text(path: &Path, limit: ByteSize) -> Result<String, FileError> {
    text(read(path, limit)?)
}

pub(crate) fn text(bytes: Vec<u8>) -> Result<String, FileError> {
    String::from_utf8(bytes).map_err(|error| error.utf8_error().into())
}

/// Returns an error if `start` begins a Git LFS pointer. [`read`] checks this itself.
///
/// # Errors
/// Returns [`FileError::LfsPointer`].
pub fn check_fetched(start: &[u8]) -> Result<(), FileError> {
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(FileError::LfsPointer);
    }
    Ok(())
}

/// Writes a file that only its owner can read. Replaces an existing file atomically and never writes into it. Leaves no other
/// file in the folder, even if it fails.
///
/// # Errors
/// Returns the error of the operating system.
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
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("../blobs/0", &link).unwrap();
        assert!(refused(&link).starts_with("this is a link to ../blobs/0, which does not exist"));
    }

    #[test]
    fn a_file_that_another_user_may_have_written_is_not_trusted() {
        const ME: u32 = 1000;
        let refused = |owner, group, mode| distrust(owner, group, mode, ME).unwrap_or_default();
        for (owner, group, mode) in [(ME, ME, 0o664), (ME, 100, 0o644), (0, 0, 0o664), (ME, 0, 0o660)] {
            assert_eq!(refused(owner, group, mode), "", "{owner} {group} {mode:o}");
        }
        assert!(refused(1001, 1001, 0o600).starts_with("it belongs to user 1001, not to user 1000 or root,"));
        assert!(distrust(1001, 1001, 0o600, 0).is_some(), "root acts on no other user's word");
        for (owner, group, mode) in [(ME, ME, 0o100_646), (ME, 100, 0o664), (0, 100, 0o660), (0, 0, 0o666)] {
            assert!(refused(owner, group, mode).contains("chmod go-w"), "{owner} {group} {mode:o}");
        }
        assert!(refused(ME, ME, 0o100_646).starts_with("it has mode 0646"));
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
        // The file has this length, although nothing was ever written.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(refused(&path).starts_with("the file has more than 4B"));
    }
}
