//! The server in a launcher: it sends the state of its job to each process of this user that connects to a Unix socket.

use std::path::Path;
use std::time::Duration;

use tempfile::TempPath;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{UnixListener, UnixStream};

use super::client::PATIENCE;
use super::sockets::{self, SocketError};
use super::wire;

/// The socket of one job, served until this is dropped, which removes it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    listener: UnixListener,
    _socket: TempPath,
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
        let (socket, listener) = sockets::listen(folder).map_err(SocketError::at(folder))?;
        let listener = UnixListener::from_std(listener).map_err(SocketError::at(&socket))?;
        // Removes the sockets of killed launchers. Faults of other sockets do not concern this one.
        let _ = sockets::live(folder);
        Ok(Self { listener, _socket: socket })
    }

    /// Waits for a process of this user, or of root, that asks for the state of the job.
    pub(crate) async fn asked(&self) -> Question {
        loop {
            let stream = match self.listener.accept().await {
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
        let Self(mut stream) = self;
        let json = serde_json::to_vec(job).expect("every job has a form in JSON");
        drop(tokio::spawn(async move { tokio::time::timeout(PATIENCE, stream.write_all(&json)).await }));
    }
}

const fn is_admitted(peer: u32, me: u32) -> bool {
    peer == me || peer == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn the_socket_is_removed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::serve(folder.path()).unwrap();
        assert_eq!(sockets::live(folder.path()).unwrap().len(), 1);
        drop(endpoint);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn only_this_user_and_root_are_admitted() {
        assert!(is_admitted(1000, 1000) && is_admitted(0, 1000));
        assert!(!is_admitted(1001, 1000) && !is_admitted(1000, 0));
    }
}
