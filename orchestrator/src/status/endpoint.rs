//! A launcher's end: serves the state of its job on a Unix socket.
//!
//! The services only pass questions on. The supervisor, which knows the answer, takes them between two events.

use std::io;
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

/// The name under which the health service tells of the job. The empty name is the endpoint itself.
const JOB: &str = "job";

/// The socket of one job, served until this is dropped, which removes it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    path: PathBuf,
    questions: mpsc::Receiver<oneshot::Sender<wire::Job>>,
    health: HealthReporter,
    /// What it was told last.
    is_healthy: Option<bool>,
    tasks: [JoinHandle<()>; 2],
}

impl Endpoint {
    /// Serves on the runtime of this thread.
    ///
    /// # Errors
    /// When the folder is not this user's alone, or the system refuses the socket.
    pub(crate) fn serve(folder: &Path) -> Result<Self, FolderError> {
        folder::make(folder)?;
        // Removes what killed launchers left. What is wrong with other sockets is no concern of this one.
        let _ = folder::live(folder);
        let path = folder::socket(folder, std::process::id());
        let listener = listen(&path).map_err(FolderError::system(&path))?;
        let (ask, questions) = mpsc::channel(16);
        let (accepted, incoming) = mpsc::channel(16);
        let accepting = tokio::spawn(accept(listener, accepted));
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
        Ok(Self { path, questions, health, is_healthy: None, tasks: [accepting, serving] })
    }

    /// Waits until somebody wants to know the state of the job.
    pub(crate) async fn asked(&mut self) -> oneshot::Sender<wire::Job> {
        match self.questions.recv().await {
            Some(question) => question,
            None => std::future::pending().await,
        }
    }

    /// What the health service tells of the job. Who watches hears of changes only.
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
        let _ = std::fs::remove_file(&self.path);
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Listens under another name first: whoever finds the name finds a socket that listens.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let unfinished = path.with_extension("new");
    // Of a killed process with the same id.
    let _ = std::fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

/// Accepts processes of this user, and of root.
async fn accept(listener: UnixListener, accepted: mpsc::Sender<io::Result<tokio::net::UnixStream>>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: do not spin.
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

    #[test]
    fn only_this_user_and_root_are_admitted() {
        assert!(is_admitted(1000, 1000) && is_admitted(0, 1000));
        assert!(!is_admitted(1001, 1000) && !is_admitted(1000, 0));
    }
}
