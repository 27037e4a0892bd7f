//! Where the job's secret comes from: a descriptor inherited from the launcher, or a file that only its owner can read.
//! Never a command line, never a variable.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use ryzanstein_process_group::Secret;

/// Reads the secret behind an inherited descriptor, which stays open and can be read again by a child.
///
/// # Errors
/// When no such descriptor was inherited, or it holds something else.
pub fn from_descriptor(number: &str) -> Result<Secret, String> {
    let number: u32 =
        number.parse().map_err(|_| format!("RYZ_SECRET_FD is `{number}`, not a descriptor's number"))?;
    // Reopened through /proc, so that the position is this reader's own, and no raw descriptor is taken on trust.
    let file = File::open(format!("/proc/self/fd/{number}")).map_err(|error| {
        format!(
            "descriptor {number}, which holds the job's secret, was not handed down to this process ({error}); whatever \
             started it from a rank must leave descriptors open (in Python: close_fds=False)"
        )
    })?;
    read(file).map_err(|why| format!("descriptor {number} {why}"))
}

/// Reads the secret from a file: a plain one, of this user, with mode 0600, holding 32 bytes or 64 hexadecimal digits.
///
/// # Errors
/// A sentence that says what is wrong with the file, and how to make a good one.
pub fn from_file(path: &Path) -> Result<Secret, String> {
    let shown = path.display();
    let how = format!("make one with: (umask 077; head -c 32 /dev/urandom > {shown})");
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC).bits().cast_signed())
        .open(path)
        .map_err(|error| format!("cannot open the secret's file {shown}: {error}; {how}"))?;
    let metadata =
        file.metadata().map_err(|error| format!("cannot examine the secret's file {shown}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("the secret's file {shown} is no plain file"));
    }
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(format!("the secret's file {shown} belongs to user {}, not to {user}", metadata.uid()));
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!(
            "the secret's file {shown} has mode {mode:04o}; others may not read it: chmod 0600 {shown}"
        ));
    }
    read(file).map_err(|why| format!("the secret's file {shown} {why}; {how}"))
}

fn read(file: impl Read) -> Result<Secret, String> {
    let mut bytes = Vec::new();
    // One more than the longest good form, with the newline of an editor.
    file.take(66).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
    if let Ok(bytes) = <[u8; 32]>::try_from(bytes.as_slice()) {
        return Ok(Secret::new(bytes));
    }
    let text = bytes.trim_ascii();
    let digit = |c: u8| (c as char).to_digit(16).map(|digit| digit as u8);
    let decoded: Option<Vec<u8>> =
        text.chunks(2).map(|pair| Some((digit(pair[0])? << 4) | digit(*pair.get(1)?)?)).collect();
    decoded.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok()).map(Secret::new).ok_or_else(|| {
        format!("holds {} bytes, not a secret of 32 bytes or 64 hexadecimal digits", bytes.len())
    })
}

/// An anonymous sealed file that holds the secret, to be inherited by ranks.
///
/// # Errors
/// What the operating system says.
pub fn to_descriptor(secret: &Secret) -> io::Result<OwnedFd> {
    let descriptor = rustix::fs::memfd_create("ryz-secret", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(descriptor);
    file.write_all(secret.expose())?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Writes the secret to a new file with mode 0600. An older one of that name is replaced, not written to.
///
/// # Errors
/// What the operating system says.
pub fn to_file(secret: &Secret, path: &Path) -> io::Result<()> {
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let _ = std::fs::remove_file(&partial);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
    file.write_all(secret.expose())?;
    // Others see either nothing or the whole.
    std::fs::rename(&partial, path)
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
            assert_eq!(from_descriptor(&descriptor.as_raw_fd().to_string()), Ok(secret.clone()));
        }
        assert!(from_descriptor("999").unwrap_err().contains("not handed down"));
    }

    #[test]
    fn a_secret_file_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        let secret = Secret::random();
        to_file(&secret, &path).expect("written");
        assert_eq!(from_file(&path), Ok(secret));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("chmod");
        assert!(from_file(&path).unwrap_err().contains("0640"));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(from_file(&link).is_err());
    }

    #[test]
    fn a_secret_may_be_written_in_hexadecimal_and_must_be_whole() {
        assert_eq!(read(&b"0f".repeat(32)[..]), Ok(Secret::new([15; 32])));
        assert!(read(&b"0f"[..]).unwrap_err().contains("2 bytes"));
        assert!(read(&[1; 33][..]).is_err());
    }
}
