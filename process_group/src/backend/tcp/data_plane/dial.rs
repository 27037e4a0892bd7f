//! Reaching a rank that listens.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout, timeout_at};

use super::{Connection, RETRY, beacon};
use crate::backend::tcp::cross_memory::probe;
use crate::roster::Secret;
use crate::wire::hello::{self, CHALLENGE, LinkId, WELCOME};

/// How this rank dials.
#[derive(Debug)]
pub(super) struct Dialler {
    pub(super) secret: Secret,
    pub(super) handshake: Duration,
    pub(super) cross_memory: bool,
}

/// Every rank listens before it joins, until it ends. Nobody listens for this long where one has ended.
const GONE_AFTER: Duration = Duration::from_millis(500);

/// Why a rank was not reached.
pub(super) enum Unreached {
    /// Its process has ended.
    Gone,
    /// What the last attempt came to.
    Because(String),
}

impl Dialler {
    /// Tries until the deadline, or until it is clear that nobody is there any more.
    pub(super) async fn dial(
        &self,
        address: SocketAddr,
        id: &LinkId,
        deadline: Instant,
    ) -> Result<Connection, Unreached> {
        let mut last = "it does not answer".to_owned();
        let mut refused_since = None;
        let attempts = async {
            loop {
                match self.attempt(address, id).await {
                    Ok(connection) => return Ok(connection),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        if refused_since.get_or_insert_with(Instant::now).elapsed() >= GONE_AFTER {
                            return Err(Unreached::Gone);
                        }
                        last = error.to_string();
                    }
                    Err(error) => (refused_since, last) = (None, error.to_string()),
                }
                sleep(RETRY).await;
            }
        };
        let reached = timeout_at(deadline.into(), attempts).await;
        reached.unwrap_or_else(|_| Err(Unreached::Because(format!("rank {} at {address}: {last}", id.to))))
    }

    /// Comes back when it is clear that nobody is there any more.
    pub(super) async fn until_gone(address: SocketAddr) {
        let mut refused_since = None;
        loop {
            // Most have dialled before this.
            sleep(GONE_AFTER / 2).await;
            match timeout(GONE_AFTER, TcpStream::connect(address)).await {
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    if refused_since.get_or_insert_with(Instant::now).elapsed() >= GONE_AFTER {
                        return;
                    }
                }
                _ => refused_since = None,
            }
        }
    }

    async fn attempt(&self, address: SocketAddr, id: &LinkId) -> io::Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        timeout(self.handshake, self.greet(stream, id)).await.unwrap_or_else(|_| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("it has not finished the handshake in {:?}", self.handshake),
            ))
        })
    }

    async fn greet(&self, mut stream: TcpStream, id: &LinkId) -> io::Result<Connection> {
        let refused = |why: &str| io::Error::new(io::ErrorKind::PermissionDenied, why);
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge).await?;
        let accepting = hello::read_challenge(&challenge)
            .ok_or_else(|| refused("what answers there is no rank of this version"))?;
        // While the acceptor waits for the hello, its nonce is where it says.
        let readable = self.cross_memory.then(|| probe(&accepting)).flatten();
        let beacon = beacon(self.cross_memory);
        let dialling = beacon.end();
        stream.write_all(&hello::hello(&self.secret, &accepting, &dialling, id)).await?;
        let mut welcome = [0; WELCOME];
        stream.read_exact(&mut welcome).await.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                refused("it refused this rank: another secret or another epoch")
            }
            _ => e,
        })?;
        if !hello::check_welcome(&self.secret, &accepting, &dialling, id, &welcome) {
            return Err(refused("it does not know the job's secret"));
        }
        Ok(Connection { stream: stream.into_std()?, readable })
    }
}
