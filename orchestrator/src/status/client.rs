//! The client of `ryz status`: finds the running jobs of this user and requests their state.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;
use tonic::transport::{Endpoint, Uri};

use super::folder::{self, FolderError};
use super::wire::status_client::StatusClient;
use super::wire::{GetRequest, Job};

/// Timeout of a launcher's answer. It may be busy for some seconds when the job ends.
const PATIENCE: Duration = Duration::from_secs(10);

/// The reason why the state of a job is not known.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// The folder of the sockets cannot be used.
    #[error("cannot look for running jobs: {0}")]
    Folder(#[from] FolderError),
    /// A launcher exists and does not answer.
    #[error("{path}: the launcher of this job does not answer: {why}; the file's name begins with the launcher's process id: inspect it with ps, or end it", path = .path.display())]
    Silent {
        /// Path of the socket of the launcher.
        path: PathBuf,
        /// The failure.
        why: String,
    },
    /// The operating system refused something.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// A connection to the launcher of one job.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stub: StatusClient<tonic::transport::Channel>,
    runtime: Runtime,
}

/// Returns the launchers of this user that run on this host, with sockets in `folder`.
///
/// # Errors
/// [`StatusError::Folder`] if the folder is not this user's alone; the system's error.
pub fn find(folder: &Path) -> Result<Vec<Client>, StatusError> {
    folder::live(folder)?.into_iter().map(|(path, stream)| Client::new(path, stream)).collect()
}

impl Client {
    fn new(path: PathBuf, stream: UnixStream) -> Result<Self, StatusError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        stream.set_nonblocking(true)?;
        let mut first = Some(stream);
        let connector = tower::service_fn(move |_: Uri| {
            // A job has one launcher. A later listener on the socket is another one.
            let stream = first.take().ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted));
            async move { stream.and_then(tokio::net::UnixStream::from_std).map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://status");
        let connecting = async { endpoint.connect_with_connector(connector).await };
        let channel = runtime
            .block_on(async { tokio::time::timeout(PATIENCE, connecting).await })
            .map_err(|_| "no answer".to_owned())
            .and_then(|outcome| outcome.map_err(|error| error.to_string()))
            .map_err(|why| StatusError::Silent { path: path.clone(), why })?;
        Ok(Self { path, stub: StatusClient::new(channel).max_decoding_message_size(64 << 20), runtime })
    }

    /// Returns the state of the job; `None` once it has ended.
    ///
    /// # Errors
    /// [`StatusError::Silent`] if the launcher exists and does not answer.
    pub fn job(&mut self) -> Result<Option<Job>, StatusError> {
        let Self { path, stub, runtime } = self;
        let silent = |why: String| StatusError::Silent { path: path.clone(), why };
        let asked = runtime.block_on(async { tokio::time::timeout(PATIENCE, stub.get(GetRequest {})).await });
        match asked {
            Ok(Ok(reply)) => Ok(Some(reply.into_inner())),
            Ok(Err(_)) if !path.exists() => Ok(None),
            Ok(Err(status)) => match status.code() {
                tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => Ok(None),
                _ => Err(silent(status.message().to_owned())),
            },
            Err(_) => Err(silent(format!("no answer for {} s", PATIENCE.as_secs()))),
        }
    }
}
