//! The sockets of the launchers of this user, one for each running job, in a folder where others may create files too.
//!
//! Their names are random, so nobody can take one first, and their mode is 0600. Those of other users are no concern.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_peercred;
use socket2::{Domain, SockAddr, Socket, Type};
use tempfile::TempPath;

use crate::rendezvous::Environment;

/// The name of a socket begins with this, then come the launcher's process id and random characters.
const PREFIX: &str = "ryz-";
/// Extension of the name of a socket that listens.
const EXTENSION: &str = "sock";

/// The operating system refused something about a socket or its folder.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}", path = .path.display())]
pub struct SocketError {
    path: PathBuf,
    source: io::Error,
}

impl SocketError {
    pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, source }
    }
}

/// Returns the folder for the sockets of this user's launchers: `XDG_RUNTIME_DIR`, if that is a folder of this user, or else
/// `/tmp`. `sudo` may keep the variable of another user.
pub fn folder(environment: &Environment) -> PathBuf {
    let is_own = |folder: &PathBuf| {
        std::fs::metadata(folder).is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user())
    };
    environment.get("XDG_RUNTIME_DIR").map(PathBuf::from).filter(is_own).unwrap_or_else(|| "/tmp".into())
}

/// Returns the user of this process.
pub(super) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Listens in the folder. Returns the socket's path, which is unlinked when it is dropped, and the listener. Only this user can connect.
pub(super) fn listen(folder: &Path) -> io::Result<(TempPath, UnixListener)> {
    let prefix = format!("{PREFIX}{}-", std::process::id());
    // Under another name first: a client that finds the name finds a socket that listens.
    let unfinished = tempfile::Builder::new().prefix(&prefix).suffix(".new").make_in(folder, |path| {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        socket.listen(128)?;
        Ok(UnixListener::from(OwnedFd::from(socket)))
    })?;
    let path = unfinished.path().with_extension(EXTENSION);
    let listener = unfinished.persist_noclobber(&path)?;
    Ok((TempPath::try_from_path(path)?, listener))
}

/// Returns the sockets of this user with a listener. Those that a killed launcher left are removed. Empty if there is no folder.
pub(super) fn live(folder: &Path) -> Result<Vec<PathBuf>, SocketError> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(SocketError::at(folder))?,
    };
    let mut live = Vec::new();
    for entry in entries {
        let entry = entry.map_err(SocketError::at(folder))?;
        let path = entry.path();
        let has_name = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        if !has_name || path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        // The metadata is of the entry itself, not of the target of a link.
        let is_own = |metadata: Metadata| metadata.file_type().is_socket() && metadata.uid() == user();
        if !entry.metadata().is_ok_and(is_own) {
            continue;
        }
        match connect(&path) {
            Ok(_) => live.push(path),
            // The socket has no listener, and never will: a name is taken only by a socket that listens already.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(&path);
            }
            // The socket has gone, or its launcher is stopped and has many pending requests.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(SocketError::at(&path)(error)),
        }
    }
    live.sort();
    Ok(live)
}

/// Connects with a launcher of this user, without waiting for one that is stopped.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.connect(&SockAddr::unix(path)?)?;
    // The name may have passed to another user meanwhile.
    if socket_peercred(&socket)?.uid.as_raw() != user() {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(OwnedFd::from(socket).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_a_name_that_nobody_can_guess_and_is_its_users_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (first, _listens) = listen(folder.path()).unwrap();
        let (second, _listens_too) = listen(folder.path()).unwrap();
        assert_eq!(std::fs::metadata(&first).unwrap().permissions().mode() & 0o777, 0o600);
        let mut both = [first.to_path_buf(), second.to_path_buf()];
        both.sort();
        assert_eq!(live(folder.path()).unwrap(), both, "a process may serve two");
    }

    #[test]
    fn sockets_that_nobody_serves_are_removed_and_other_files_are_not() {
        let outside = tempfile::tempdir().unwrap();
        let folder = outside.path();
        assert_eq!(live(&folder.join("none")).unwrap().len(), 0, "no folder, no jobs");
        let (served, _listener) = listen(folder).unwrap();
        let (left, listener) = listen(folder).unwrap();
        let left = left.keep().unwrap();
        drop(listener);
        let other =
            [folder.join("ryz-1-note.sock"), folder.join("other.sock"), folder.join("ryz-1-link.sock")];
        std::fs::write(&other[0], "not a socket").unwrap();
        drop(UnixListener::bind(&other[1]).unwrap());
        std::os::unix::fs::symlink(&other[1], &other[2]).unwrap();
        assert_eq!(live(folder).unwrap(), [served.to_path_buf()]);
        assert!(!left.exists() && other.iter().all(|path| path.symlink_metadata().is_ok()));
    }

    #[test]
    fn the_folder_is_the_users_own_runtime_directory_or_tmp() {
        let environment = |value: &str| Environment::from([("XDG_RUNTIME_DIR".into(), value.into())]);
        let own = tempfile::tempdir().unwrap();
        assert_eq!(folder(&environment(own.path().to_str().unwrap())), own.path());
        for other in ["", "/no/such/folder", "/dev/null"] {
            assert_eq!(folder(&environment(other)), Path::new("/tmp"), "{other}");
        }
        assert_eq!(folder(&Environment::new()), Path::new("/tmp"));
    }
}
