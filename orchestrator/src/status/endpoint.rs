//! The server in a launcher: it serves the state of its job on a Unix socket.
//!
//! The services only forward requests. The supervisor, which knows the answer, handles them between two events.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::folder::{self, FolderError};
use super::wire;
use super::wire::status_server::{Status as StatusService, StatusServer};

/// The name under which the health service reports on the job. The empty name is the endpoint itself.
const JOB: &str = "job";

type Accepted = mpsc::Sender<io::Result<tokio::net::UnixStream>>;

/// The socket of one job, served until this is dropped, which removes it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    socket: Bound,
    /// True once the socket has gone and a new one could not be made, which has been reported.
    is_lost: bool,
    accepted: Accepted,
    questions: mpsc::Receiver<oneshot::Sender<wire::Job>>,
    health: HealthReporter,
    /// The health that was last reported.
    is_healthy: Option<bool>,
    accepting: JoinHandle<()>,
    serving: JoinHandle<()>,
}

impl Endpoint {
    /// Serves on the runtime of this thread.
    ///
    /// # Errors
    /// Fails when the folder is not this user's alone, or the system refuses the socket.
    pub(crate) fn serve(folder: &Path) -> Result<Self, FolderError> {
        let (socket, listener) = Bound::new(folder.to_owned())?;
        // Removes the sockets of killed launchers. Faults of other sockets do not concern this one.
        let _ = folder::live(folder);
        let (ask, questions) = mpsc::channel(16);
        let (accepted, incoming) = mpsc::channel(16);
        let accepting = tokio::spawn(accept(listener, accepted.clone()));
        let (health, health_service) = tonic_health::server::health_reporter();
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .unwrap_or_else(|error| unreachable!("descriptors that are checked in: {error}"));
        let router = tonic::transport::Server::builder()
            .add_service(StatusServer::new(Service { ask }))
            .add_service(health_service)
            .add_service(reflection);
        let serving = tokio::spawn(async move {
            if let Err(error) = router.serve_with_incoming(ReceiverStream::new(incoming)).await {
                tracing::error!(%error, "the status endpoint ended");
            }
        });
        let (is_lost, is_healthy) = (false, None);
        Ok(Self { socket, is_lost, accepted, questions, health, is_healthy, accepting, serving })
    }

    /// Makes the socket again if it has gone: cleaners of temporary folders remove old files.
    ///
    /// # Errors
    /// Fails the first time that the socket has gone and cannot be made again.
    pub(crate) fn renew(&mut self) -> Result<(), FolderError> {
        if self.socket.is_there() {
            return Ok(());
        }
        match Bound::new(self.socket.folder.clone()) {
            Ok((socket, listener)) => {
                (self.socket, self.is_lost) = (socket, false);
                let accepting = tokio::spawn(accept(listener, self.accepted.clone()));
                std::mem::replace(&mut self.accepting, accepting).abort();
                Ok(())
            }
            Err(_) if self.is_lost => Ok(()),
            Err(error) => {
                self.is_lost = true;
                Err(error)
            }
        }
    }

    /// Waits for a request for the state of the job.
    pub(crate) async fn asked(&mut self) -> oneshot::Sender<wire::Job> {
        match self.questions.recv().await {
            Some(question) => question,
            None => std::future::pending().await,
        }
    }

    /// Sets the health that the health service reports of the job. Watchers are notified of changes only.
    pub(crate) async fn set_health(&mut self, is_healthy: bool) {
        if self.is_healthy.replace(is_healthy) == Some(is_healthy) {
            return;
        }
        let status = if is_healthy { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.health.set_service_status(JOB, status).await;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.accepting.abort();
        self.serving.abort();
    }
}

/// A socket that this process has bound. Dropping it removes it.
#[derive(Debug)]
struct Bound {
    folder: PathBuf,
    path: PathBuf,
    inode: Option<Inode>,
}

/// Device and number of an inode.
type Inode = (u64, u64);

fn inode(path: &Path) -> Option<Inode> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Bound {
    fn new(folder: PathBuf) -> Result<(Self, UnixListener), FolderError> {
        folder::make(&folder)?;
        let path = folder::socket(&folder, std::process::id());
        let listener = listen(&path).map_err(FolderError::system(&path))?;
        let inode = inode(&path);
        Ok((Self { folder, path, inode }, listener))
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

/// Listens under another name first: a client that finds the name finds a socket that listens.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let unfinished = path.with_extension("new");
    // The file of a killed process with the same id.
    let _ = std::fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

/// Accepts processes of this user, and of root.
async fn accept(listener: UnixListener, accepted: Accepted) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most likely the process has no descriptors left: do not spin.
                tracing::debug!(%error, "the status endpoint could not accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                continue;
            }
        };
        match stream.peer_cred() {
            Ok(peer) if is_admitted(peer.uid(), folder::user()) => {
                if accepted.send(Ok(stream)).await.is_err() {
                    return;
                }
            }
            Ok(peer) => tracing::warn!(user = peer.uid(), "refused another user at the status endpoint"),
            Err(error) => {
                tracing::debug!(%error, "cannot find out which user connected to the status endpoint");
            }
        }
    }
}

const fn is_admitted(peer: u32, me: u32) -> bool {
    peer == me || peer == 0
}

struct Service {
    ask: mpsc::Sender<oneshot::Sender<wire::Job>>,
}

#[tonic::async_trait]
impl StatusService for Service {
    async fn get(&self, _: Request<wire::GetRequest>) -> Result<Response<wire::Job>, Status> {
        let ended = || Status::unavailable("the job has ended");
        let (reply, answer) = oneshot::channel();
        self.ask.send(reply).await.map_err(|_| ended())?;
        answer.await.map(Response::new).map_err(|_| ended())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_that_was_removed_with_its_folder_is_made_again() {
        let outside = tempfile::tempdir().unwrap();
        let folder = outside.path().join("ryz");
        let mut endpoint = Endpoint::serve(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        endpoint.renew().unwrap();
        assert_eq!(folder::live(&folder).unwrap().len(), 1);
        let before = inode(&endpoint.socket.path);
        endpoint.renew().unwrap();
        assert_eq!(inode(&endpoint.socket.path), before, "it is there");
        drop(endpoint);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "removed at the end");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_folder_that_cannot_be_made_again_is_told_once() {
        let outside = tempfile::tempdir().unwrap();
        let folder = outside.path().join("ryz");
        let mut endpoint = Endpoint::serve(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::write(&folder, "not a folder").unwrap();
        endpoint.renew().expect_err("told");
        endpoint.renew().expect("told before");
        std::fs::remove_file(&folder).unwrap();
        endpoint.renew().unwrap();
        assert_eq!(folder::live(&folder).unwrap().len(), 1);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_socket_of_another_process_is_left_alone() {
        let outside = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::serve(&outside.path().join("ryz")).unwrap();
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
