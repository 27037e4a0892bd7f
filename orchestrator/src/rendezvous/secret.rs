//! Reads and hands over the job's secret: through a descriptor inherited from the launcher, or a file that only its owner
//! can read. Never on a command line, never in a variable.

use std::fs::{DirEntry, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use ryzanstein_config::file;
use ryzanstein_process_group::Secret;
use tempfile::TempPath;

fn how_to_make(path: &Path) -> String {
    format!("make one with: (umask 077; head -c 32 /dev/urandom > {})", path.display())
}

/// Reads the secret from an inherited descriptor, which stays open and can be read again by a child.
///
/// # Errors
/// States the fault in the setup of this process.
pub(crate) fn from_descriptor(number: &str) -> Result<Secret, String> {
    let descriptor: u32 =
        number.parse().map_err(|_| format!("RYZ_SECRET_FD is `{number}`, not a descriptor's number"))?;
    // Reopened through /proc, so that the position is this reader's own, and no raw descriptor is trusted.
    let file = file::open(format!("/proc/self/fd/{descriptor}").as_ref()).map_err(|error| {
        format!(
            "descriptor {descriptor}, which holds the job's secret, was not handed down to this process ({error}); the \
             program that started it must leave descriptors open (in Python: close_fds=False)"
        )
    })?;
    read(file).map_err(|why| format!("descriptor {descriptor} {why}"))
}

/// Reads the secret from a file: a regular one of this user, with mode 0600, that contains 32 bytes or 64 hexadecimal digits.
///
/// # Errors
/// States the fault of the file, and the way to make a valid one.
pub(crate) fn from_file(path: &Path) -> Result<Secret, String> {
    if path.as_os_str().is_empty() {
        return Err("RYZ_SECRET_FILE is empty; name the secret's file, or unset the variable".into());
    }
    let shown = path.display();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file =
        OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path).map_err(
            |error| format!("cannot open the secret's file {shown}: {error}; {}", how_to_make(path)),
        )?;
    let metadata =
        file.metadata().map_err(|error| format!("cannot examine the secret's file {shown}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("the secret's file {shown} is not a regular file"));
    }
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(format!("the secret's file {shown} belongs to user {owner}, not to {user}"));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "the secret's file {shown} has mode {mode:04o}, so others can read it: chmod 0600 {shown}"
        ));
    }
    read(file).map_err(|why| format!("the secret's file {shown} {why}; {}", how_to_make(path)))
}

/// Returns the secret, or the fault of the contents.
fn read(file: impl Read) -> Result<Secret, String> {
    let mut bytes = Vec::new();
    // One more than the longest valid form, with the newline of an editor.
    file.take(66).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
    if let Ok(bytes) = <[u8; 32]>::try_from(bytes.as_slice()) {
        return Ok(Secret::new(bytes));
    }
    let text = bytes.trim_ascii();
    let digit = |c: u8| (c as char).to_digit(16).map(|digit| digit as u8);
    let decoded: Option<Vec<u8>> =
        text.chunks(2).map(|pair| Some((digit(pair[0])? << 4) | digit(*pair.get(1)?)?)).collect();
    let secret = decoded.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()).map(Secret::new);
    secret.ok_or_else(|| {
        format!("holds {} bytes, not a secret of 32 bytes or 64 hexadecimal digits", bytes.len())
    })
}

/// Returns an anonymous sealed file that contains the secret, for ranks to inherit.
///
/// # Errors
/// Returns the operating system's error.
pub(crate) fn to_descriptor(secret: &Secret) -> io::Result<OwnedFd> {
    let descriptor = rustix::fs::memfd_create("ryz-secret", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(descriptor);
    file.write_all(secret.expose())?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// The file through which rank 0 gives the secret to the other ranks of this user on this host, if no launcher does.
///
/// Its folder may be one where every user creates files, so its name ends in random characters: nobody can take it first. The
/// other ranks look for it among the files of their own user.
pub(super) struct SharedFile {
    folder: PathBuf,
    prefix: String,
}

impl SharedFile {
    const SUFFIX: &str = ".secret";

    /// Returns the file of the rendezvous at this port.
    pub(super) fn new(folder: PathBuf, port: u16) -> Self {
        let user = rustix::process::geteuid().as_raw();
        Self { folder, prefix: format!("ryzanstein-{user}-{port}-") }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Leaves the secret in a new file of mode 0600, which exists as long as the returned path. Removes those of ranks that
    /// had the port before.
    ///
    /// # Errors
    /// Returns the operating system's error.
    pub(super) fn leave(&self, secret: &Secret) -> io::Result<TempPath> {
        for (_, old) in self.list()? {
            let _ = std::fs::remove_file(old);
        }
        let mut file =
            tempfile::Builder::new().prefix(&self.prefix).suffix(Self::SUFFIX).tempfile_in(&self.folder)?;
        file.write_all(secret.expose())?;
        Ok(file.into_temp_path())
    }

    /// Reads the newest secret that rank 0 has left.
    ///
    /// # Errors
    /// States that there is none yet, or only part of one.
    pub(super) fn find(&self) -> Result<Secret, String> {
        let folder = self.folder.display();
        let list = self.list().map_err(|error| format!("cannot list {folder}: {error}"))?;
        let newest = list.into_iter().max().ok_or_else(|| {
            let user = rustix::process::geteuid().as_raw();
            format!("{folder} has no file {}….secret of user {user}", self.prefix)
        });
        from_file(&newest?.1)
    }

    /// Returns the files of this user with such names, and when they were written.
    fn list(&self) -> io::Result<Vec<(SystemTime, PathBuf)>> {
        let user = rustix::process::geteuid().as_raw();
        let own = |entry: io::Result<DirEntry>| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let name = name.to_str()?;
            if !name.starts_with(&self.prefix) || !name.ends_with(Self::SUFFIX) {
                return None;
            }
            // The metadata is of the entry itself, not of the target of a link.
            let metadata = entry.metadata().ok().filter(|metadata| metadata.uid() == user)?;
            Some((metadata.modified().ok()?, entry.path()))
        };
        Ok(std::fs::read_dir(&self.folder)?.filter_map(own).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_can_be_read_from_its_descriptor_any_number_of_times() {
        let secret = Secret::random();
        let descriptor = to_descriptor(&secret).expect("a descriptor");
        for _ in 0..2 {
            assert_eq!(from_descriptor(&descriptor.as_raw_fd().to_string()).expect("read"), secret);
        }
        assert!(from_descriptor("999").unwrap_err().contains("not handed down"));
        assert!(from_descriptor("x").unwrap_err().contains("not a descriptor's number"));
    }

    #[test]
    fn a_secret_file_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let secret = Secret::random();
        file::replace(&path, secret.expose()).expect("written");
        assert_eq!(from_file(&path).expect("read"), secret);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("chmod");
        assert!(from_file(&path).unwrap_err().contains("0640"));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(from_file(&link).unwrap_err().starts_with("cannot open"));
        assert!(from_file(folder.path()).unwrap_err().contains("not a regular file"));
        assert!(from_file("".as_ref()).unwrap_err().starts_with("RYZ_SECRET_FILE is empty"));
    }

    #[test]
    fn the_newest_secret_that_was_left_is_found_and_nobody_can_take_its_name_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let shared = SharedFile::new(folder.path().into(), 29500);
        assert!(shared.find().unwrap_err().contains("has no file"));
        // Who knows the port can guess no more of the name.
        std::fs::create_dir(folder.path().join(shared.prefix.trim_end_matches('-').to_owned() + ".secret"))
            .expect("a folder");
        let other = SharedFile::new(folder.path().into(), 2950);
        let (old, new) = (Secret::random(), Secret::random());
        let killed = shared.leave(&old).expect("left").keep().expect("kept");
        let _other = other.leave(&Secret::random()).expect("left");
        assert_eq!(shared.find().expect("found"), old);
        let left = shared.leave(&new).expect("left");
        assert!(!killed.exists(), "the port has another owner now");
        assert_eq!(shared.find().expect("found"), new);
        let planted = folder.path().join(format!("{}planted.secret", shared.prefix));
        std::fs::write(&planted, [7; 32]).expect("written");
        if std::os::unix::fs::chown(&planted, Some(65534), None).is_ok() {
            assert_eq!(shared.find().expect("found"), new, "a newer file of another user counts for nothing");
        } else {
            eprintln!("skipped: only root can make a file of another user");
        }
        std::fs::remove_file(planted).expect("removed");
        drop(left);
        assert!(shared.find().unwrap_err().contains("has no file"));
    }

    #[test]
    fn a_secret_may_be_written_in_hexadecimal_and_must_be_whole() {
        assert_eq!(read(&b"0f".repeat(32)[..]).expect("read"), Secret::new([15; 32]));
        assert!(read(&b"0f"[..]).unwrap_err().starts_with("holds 2 bytes"));
        assert!(read(&[1; 33][..]).unwrap_err().starts_with("holds 33 bytes"));
    }
}
