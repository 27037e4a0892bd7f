//! The server in a launcher: it sends the state of its job to each process of this user that connects to a Unix socket.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use prost::Message as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{UnixListener, UnixStream};

use super::client::PATIENCE;
use super::sockets::{self, SocketError};
use super::wire;

/// The socket of one job, served until this is dropped, which removes it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    socket: Bound,
    /// True once the socket has gone and a new one could not be made, which has been reported.
    is_lost: bool,
}

/// A process that has asked for the state of the job by connecting.
#[derive(Debug)]
pub(crate) struct Question(UnixStream);

impl Endpoint {
    /// Listens on the runtime of this thread.
    ///
    /// # Errors
    /// Fails when the system refuses the socket.
    pub(crate) fn serve(folder: &Path) -> Result<Self, SocketError> {
        let socket = Bound::new(folder.to_owned())?;
        // Removes the sockets of killed launchers. Faults of other sockets do not concern this one.
        let _ = sockets::live(folder);
        Ok(Self { socket, is_lost: false })
    }

    /// Makes the socket again if it has gone: cleaners of temporary folders remove old files.
    ///
    /// # Errors
    /// Fails the first time that the socket has gone and cannot be made again.
    pub(crate) fn renew(&mut self) -> Result<(), SocketError> {
        if self.socket.is_there() {
            return Ok(());
        }
        match Bound::new(self.socket.folder.clone()) {
            Ok(socket) => {
                (self.socket, self.is_lost) = (socket, false);
                Ok(())
            }
            Err(_) if self.is_lost => Ok(()),
            Err(error) => {
                self.is_lost = true;
                Err(error)
            }
        }
    }

    /// Waits for a process of this user, or of root, that asks for the state of the job.
    pub(crate) async fn asked(&mut self) -> Question {
        loop {
            let stream = match self.socket.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Most likely the process has no descriptors left: do not spin.
                    tracing::debug!(%error, "the status endpoint could not accept a connection");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            match stream.peer_cred() {
                Ok(peer) if is_admitted(peer.uid(), sockets::user()) => return Question(stream),
                Ok(peer) => tracing::warn!(user = peer.uid(), "refused another user at the status endpoint"),
                Err(error) => {
                    tracing::debug!(%error, "cannot find out which user connected to the status endpoint");
                }
            }
        }
    }
}

impl Question {
    /// Sends the answer in the background. A process that does not read it loses it.
    pub(crate) fn answer(self, job: &wire::Job) {
        let (Self(mut stream), bytes) = (self, job.encode_length_delimited_to_vec());
        drop(tokio::spawn(async move { tokio::time::timeout(PATIENCE, stream.write_all(&bytes)).await }));
    }
}

/// A socket that this process has bound. Dropping it removes it.
#[derive(Debug)]
struct Bound {
    folder: PathBuf,
    path: PathBuf,
    inode: Option<Inode>,
    listener: UnixListener,
}

/// Device and number of an inode.
type Inode = (u64, u64);

fn inode(path: &Path) -> Option<Inode> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Bound {
    fn new(folder: PathBuf) -> Result<Self, SocketError> {
        let (path, listener) = sockets::listen(&folder).map_err(SocketError::at(&folder))?;
        let listener = UnixListener::from_std(listener).map_err(SocketError::at(&path))?;
        let inode = inode(&path);
        Ok(Self { folder, path, inode, listener })
    }

    /// Returns true if the socket is still in its place, neither removed nor replaced.
    fn is_there(&self) -> bool {
        self.inode.is_some() && inode(&self.path) == self.inode
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

const fn is_admitted(peer: u32, me: u32) -> bool {
    peer == me || peer == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_that_was_removed_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut endpoint = Endpoint::serve(folder.path()).unwrap();
        std::fs::remove_file(&endpoint.socket.path).unwrap();
        endpoint.renew().unwrap();
        assert_eq!(sockets::live(folder.path()).unwrap().len(), 1);
        let before = inode(&endpoint.socket.path);
        endpoint.renew().unwrap();
        assert_eq!(inode(&endpoint.socket.path), before, "it is there");
        drop(endpoint);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "removed at the end");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_that_cannot_be_made_again_is_told_once() {
        let outside = tempfile::tempdir().unwrap();
        let folder = outside.path().join("runtime");
        std::fs::create_dir(&folder).unwrap();
        let mut endpoint = Endpoint::serve(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        endpoint.renew().expect_err("told");
        endpoint.renew().expect("told before");
        std::fs::create_dir(&folder).unwrap();
        endpoint.renew().unwrap();
        assert_eq!(sockets::live(&folder).unwrap().len(), 1);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_of_another_process_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::serve(folder.path()).unwrap();
        let path = endpoint.socket.path.clone();
        std::fs::remove_file(&path).unwrap();
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(endpoint);
        assert!(path.exists());
    }

    #[test]
    fn only_this_user_and_root_are_admitted() {
        assert!(is_admitted(1000, 1000) && is_admitted(0, 1000));
        assert!(!is_admitted(1001, 1000) && !is_admitted(1000, 0));
    }
}
