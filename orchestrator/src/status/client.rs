//! The client of `ryz status`: finds the running jobs of this user and requests their state.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::sockets::{self, SocketError};
use super::wire::Job;

/// Timeout of a launcher's answer. It may be busy for some seconds when the job ends.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum size of an answer.
const MOST_BYTES: u64 = 64 << 20;

/// The reason why the state of a job is not known.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// The folder of the sockets cannot be listed, or none of them be used.
    #[error("cannot look for running jobs: {0}")]
    Sockets(#[from] SocketError),
    /// A launcher answers in a form that this program does not know.
    #[error("{path}: the launcher of this job answers in another form: {why}; use the `ryz` of the version that has launched it", path = .path.display())]
    Unreadable {
        /// Path of the socket of the launcher.
        path: PathBuf,
        /// The failure.
        why: String,
    },
    /// A launcher exists and does not answer.
    #[error("{path}: the launcher of this job does not answer: {why}; the number in the file's name is the launcher's process id: inspect it with ps, or end it", path = .path.display())]
    Silent {
        /// Path of the socket of the launcher.
        path: PathBuf,
        /// The failure.
        why: String,
    },
}

/// The launcher of one job.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
}

/// Returns the launchers of this user that run on this host, with sockets in `folder`.
///
/// # Errors
/// [`StatusError::Sockets`] if the folder cannot be listed.
pub fn find(folder: &Path) -> Result<Vec<Client>, StatusError> {
    // Each is asked when its turn comes: an answer waits for no other launcher.
    Ok(sockets::live(folder)?.into_iter().map(|path| Client { path }).collect())
}

impl Client {
    /// Returns the state of the job; `None` once it has ended.
    ///
    /// # Errors
    /// [`StatusError::Silent`] if the launcher exists and does not answer, [`StatusError::Unreadable`] if it answers in another form.
    pub fn job(&self) -> Result<Option<Job>, StatusError> {
        let Self { path } = self;
        let why = match sockets::connect(path).and_then(|stream| read(&stream)) {
            // A launcher that ends closes the connection, and may have written a part of its answer.
            Ok(answer) => match serde_json::from_slice::<Job>(&answer) {
                Ok(job) => return Ok(Some(job)),
                Err(_) if answer.is_empty() || !path.exists() => return Ok(None),
                Err(_) if answer.len() as u64 == MOST_BYTES => {
                    format!("its answer has more than {MOST_BYTES} bytes")
                }
                Err(error) if error.is_eof() => "its answer has no end".into(),
                Err(error) => {
                    return Err(StatusError::Unreadable { path: path.clone(), why: error.to_string() });
                }
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                format!("no answer for {} s", PATIENCE.as_secs())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => return Ok(None),
                _ => error.to_string(),
            },
        };
        Err(StatusError::Silent { path: path.clone(), why })
    }
}

/// Reads an answer to its end.
fn read(mut stream: &UnixStream) -> io::Result<Vec<u8>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = Vec::new();
    stream.by_ref().take(MOST_BYTES).read_to_end(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn an_answer_in_another_form_and_half_a_one_are_errors_and_none_is_the_end_of_the_job() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ryz-1.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let launcher = std::thread::spawn(move || {
            for answer in ["[1]", r#"{"job":1,"na"#, ""] {
                listener.accept().unwrap().0.write_all(answer.as_bytes()).unwrap();
            }
        });
        let client = Client { path };
        assert!(matches!(client.job(), Err(StatusError::Unreadable { .. })));
        let Err(StatusError::Silent { why, .. }) = client.job() else { panic!("half an answer") };
        assert_eq!(why, "its answer has no end");
        assert_eq!(client.job().unwrap(), None);
        launcher.join().unwrap();
        assert_eq!(client.job().unwrap(), None, "nobody listens");
    }
}
