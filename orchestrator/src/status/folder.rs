//! The folder of the sockets, one for each running job of a user.

use std::fs::{DirBuilder, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::rendezvous::Environment;

/// Suffix of the name of a socket.
const SUFFIX: &str = "sock";

/// The reason why the folder of the sockets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Others could put their own sockets there, or see those of this user.
    #[error("{folder} {why}; remove it, or set XDG_RUNTIME_DIR to a folder of your own with mode 0700", folder = .folder.display())]
    Refused {
        /// The folder.
        folder: PathBuf,
        /// The fault of the folder.
        why: String,
    },
    /// The folder lies in a folder of another user, who could move it away.
    #[error("{folder} belongs to user {owner}, not to user {user}; set XDG_RUNTIME_DIR to a folder of your own with mode 0700", folder = .folder.display())]
    Foreign {
        /// The parent of the folder of the sockets.
        folder: PathBuf,
        /// Owner of that folder.
        owner: u32,
        /// User of this process.
        user: u32,
    },
    /// The operating system refused something.
    #[error("{path}: {source}", path = .path.display())]
    System {
        /// Path of the folder, or of a file in it.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl FolderError {
    pub(super) fn system(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::System { path, source }
    }
}

/// Returns the folder for the sockets of this user's launchers: `ryz` in `XDG_RUNTIME_DIR`, or else `/tmp/ryz-UID`.
pub fn folder(environment: &Environment) -> PathBuf {
    match environment.get("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => Path::new(folder).join("ryz"),
        None => format!("/tmp/ryz-{}", user()).into(),
    }
}

/// Returns the user of this process.
pub(super) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes the folder, if it does not exist, and checks it.
pub(super) fn make(folder: &Path) -> Result<(), FolderError> {
    check_parent(folder)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(FolderError::system(folder)(error)),
        _ => check(folder),
    }
}

/// Checks that only this user can access the contents of the folder.
fn check(folder: &Path) -> Result<(), FolderError> {
    check_parent(folder)?;
    // The link itself, not its target: the user who made the link decides the target.
    let metadata = std::fs::symlink_metadata(folder).map_err(FolderError::system(folder))?;
    match fault(&metadata.into(), user()) {
        Some(why) => Err(FolderError::Refused { folder: folder.to_owned(), why }),
        None => Ok(()),
    }
}

/// Checks that the parent of the folder belongs to this user, or to root. `sudo` may keep another user's `XDG_RUNTIME_DIR`.
fn check_parent(folder: &Path) -> Result<(), FolderError> {
    let Some(parent) = folder.parent() else { return Ok(()) };
    let metadata = std::fs::metadata(parent).map_err(FolderError::system(parent))?;
    let (owner, user) = (metadata.uid(), user());
    if is_foreign(owner, metadata.mode(), user) {
        return Err(FolderError::Foreign { folder: parent.to_owned(), owner, user });
    }
    Ok(())
}

/// Returns true if another user owns the folder. A sticky folder is `/tmp`, whose owner has no number in a user namespace.
const fn is_foreign(owner: u32, mode: u32, user: u32) -> bool {
    owner != user && owner != 0 && mode & 0o1000 == 0
}

/// The relevant metadata of a folder.
struct Entry {
    is_folder: bool,
    owner: u32,
    mode: u32,
}

impl From<Metadata> for Entry {
    fn from(metadata: Metadata) -> Self {
        Self { is_folder: metadata.is_dir(), owner: metadata.uid(), mode: metadata.mode() & 0o7777 }
    }
}

/// Returns the reason why `user` must not trust the folder.
fn fault(entry: &Entry, user: u32) -> Option<String> {
    if !entry.is_folder {
        return Some("is not a folder".into());
    }
    if entry.owner != user {
        return Some(format!("belongs to user {}, not to user {user}", entry.owner));
    }
    (entry.mode & 0o077 != 0)
        .then(|| format!("has mode {:04o}, so others can reach it; 0700 is needed", entry.mode))
}

/// Returns the socket of the job that the process `pid` supervises. Containers may share the folder, and have a process of this
/// id each: the number of the PID namespace distinguishes them.
pub(super) fn socket(folder: &Path, pid: u32) -> PathBuf {
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino());
    folder.join(format!("{pid}-{namespace}.{SUFFIX}"))
}

/// Returns the sockets with a listener. Those that a killed launcher left are removed. Empty if there is no folder.
pub(super) fn live(folder: &Path) -> Result<Vec<PathBuf>, FolderError> {
    match check(folder) {
        Err(FolderError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(Vec::new());
        }
        checked => checked?,
    }
    let mut live = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(FolderError::system(folder))? {
        let path = entry.map_err(FolderError::system(folder))?.path();
        if path.extension().is_none_or(|extension| extension != SUFFIX) {
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
            Err(error) => return Err(FolderError::system(&path)(error)),
        }
    }
    live.sort();
    Ok(live)
}

/// Connects without waiting for a launcher that is stopped.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_folder_of_another_user_or_open_to_others_is_refused() {
        let entry = |is_folder, owner, mode| Entry { is_folder, owner, mode };
        assert_eq!(fault(&entry(true, 1000, 0o700), 1000), None);
        assert_eq!(
            fault(&entry(true, 1001, 0o700), 1000).as_deref(),
            Some("belongs to user 1001, not to user 1000")
        );
        assert!(fault(&entry(true, 0, 0o700), 1000).is_some(), "root's is not this user's either");
        assert!(fault(&entry(true, 1000, 0o750), 1000).is_some_and(|why| why.contains("0750")));
        assert!(fault(&entry(true, 1000, 0o701), 1000).is_some());
        assert_eq!(fault(&entry(false, 1000, 0o700), 1000).as_deref(), Some("is not a folder"));
    }

    #[test]
    fn a_folder_in_another_users_is_refused_and_one_in_roots_is_not() {
        assert!(is_foreign(1000, 0o700, 0), "root does not use the runtime folder that sudo kept");
        assert!(is_foreign(1001, 0o777, 1000));
        assert!(!is_foreign(1000, 0o700, 1000) && !is_foreign(0, 0o755, 1000));
        assert!(!is_foreign(65534, 0o1777, 0), "/tmp in a user namespace");
        let error = FolderError::Foreign { folder: "/run/user/1000".into(), owner: 1000, user: 0 };
        let words = error.to_string();
        assert!(
            words.contains("/run/user/1000 belongs to user 1000, not to user 0; set XDG_RUNTIME_DIR"),
            "{words}"
        );
    }

    #[test]
    fn the_name_of_a_socket_tells_pid_namespaces_apart() {
        let namespace = std::fs::metadata("/proc/self/ns/pid").unwrap().ino();
        assert_eq!(socket(Path::new("/x"), 7), PathBuf::from(format!("/x/7-{namespace}.sock")));
    }

    #[test]
    fn a_link_to_a_good_folder_is_refused_and_a_new_folder_is_private() {
        let outside = tempfile::tempdir().unwrap();
        let (good, link) = (outside.path().join("good"), outside.path().join("link"));
        make(&good).unwrap();
        assert_eq!(std::fs::metadata(&good).unwrap().permissions().mode() & 0o777, 0o700);
        make(&good).expect("again");
        symlink(&good, &link).unwrap();
        assert!(matches!(make(&link), Err(FolderError::Refused { .. })));
        std::fs::set_permissions(&good, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = check(&good).unwrap_err().to_string();
        assert!(error.contains("0777") && error.contains("XDG_RUNTIME_DIR"), "{error}");
    }

    #[test]
    fn sockets_that_nobody_serves_are_removed() {
        let outside = tempfile::tempdir().unwrap();
        let folder = outside.path().join("ryz");
        assert_eq!(live(&folder).unwrap().len(), 0, "no folder, no jobs");
        make(&folder).unwrap();
        let _listener = UnixListener::bind(socket(&folder, 2)).unwrap();
        drop(UnixListener::bind(socket(&folder, 1)).unwrap());
        std::fs::write(folder.join("note.txt"), "not a socket").unwrap();
        let found = live(&folder).unwrap();
        assert_eq!(found, [socket(&folder, 2)]);
        assert!(!socket(&folder, 1).exists() && folder.join("note.txt").exists());
    }

    #[test]
    fn the_folder_is_in_the_runtime_directory_or_in_tmp() {
        let environment = |value: &str| Environment::from([("XDG_RUNTIME_DIR".into(), value.into())]);
        assert_eq!(folder(&environment("/run/user/7")), Path::new("/run/user/7/ryz"));
        let in_tmp = PathBuf::from(format!("/tmp/ryz-{}", user()));
        assert_eq!((folder(&environment("")), folder(&Environment::new())), (in_tmp.clone(), in_tmp));
    }
}
