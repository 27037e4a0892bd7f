//! How the two ends of a link prove to each other that they know the job's secret.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Connection;
use super::memory::{MemoryProbe, ReadableProcess};
use crate::rank::{Epoch, Rank};
use crate::roster::Secret;
use crate::wire::hello::{self, CHALLENGE, HELLO, LinkId, WELCOME};

/// Why a link was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it does not know the job's secret")]
    WrongSecret,
    #[error("it looks for rank {to} of epoch {epoch}, this is rank {me} of epoch {current}")]
    WrongRank { to: Rank, epoch: Epoch, me: Rank, current: Epoch },
    #[error("what answers there is no rank of this version")]
    WrongVersion,
    #[error("it refused this rank: another secret or another epoch")]
    Refused,
    #[error("it has not finished the handshake in {0:?}")]
    TimedOut(Duration),
}

/// What this rank proves itself with.
#[derive(Debug)]
pub(super) struct Prover {
    pub(super) secret: Secret,
    /// How long a handshake may take.
    pub(super) limit: Duration,
    /// Let the other end read this process's memory, and read its.
    pub(super) cross_memory: bool,
}

impl Prover {
    fn probe(&self) -> MemoryProbe {
        MemoryProbe::new(*Secret::random().expose(), self.cross_memory)
    }

    fn readable(&self, end: &hello::End) -> Option<ReadableProcess> {
        if self.cross_memory { ReadableProcess::probe(end) } else { None }
    }

    /// The accepting end, as rank `me` of an epoch. `None` for who hangs up without a word, as those do that only look
    /// whether this rank is still there.
    pub(super) async fn accept(
        &self,
        stream: TcpStream,
        epoch: Epoch,
        me: Rank,
    ) -> Result<Option<(LinkId, Connection)>, HandshakeError> {
        let handshake = timeout(self.limit, self.accept_whenever(stream, epoch, me));
        handshake.await.unwrap_or(Err(HandshakeError::TimedOut(self.limit)))
    }

    async fn accept_whenever(
        &self,
        mut stream: TcpStream,
        epoch: Epoch,
        me: Rank,
    ) -> Result<Option<(LinkId, Connection)>, HandshakeError> {
        stream.set_nodelay(true)?;
        let probe = self.probe();
        let accepting = probe.end();
        stream.write_all(&hello::challenge(&accepting)).await?;
        let mut bytes = [0; HELLO];
        let first = stream.read(&mut bytes).await?;
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut bytes[first..]).await?;
        let hello::Hello { id, dialling, welcome } =
            hello::read_hello(&self.secret, &accepting, &bytes).ok_or(HandshakeError::WrongSecret)?;
        if id.epoch != epoch || id.to != me {
            return Err(HandshakeError::WrongRank { to: id.to, epoch: id.epoch, me, current: epoch });
        }
        // While the dialler waits for the welcome, its nonce is where it says.
        let readable = self.readable(&dialling);
        stream.write_all(&welcome).await?;
        Ok(Some((id, Connection { stream: stream.into_std()?, readable })))
    }

    /// The dialling end.
    pub(super) async fn dial(&self, stream: TcpStream, id: &LinkId) -> Result<Connection, HandshakeError> {
        let handshake = timeout(self.limit, self.dial_whenever(stream, id));
        handshake.await.unwrap_or(Err(HandshakeError::TimedOut(self.limit)))
    }

    async fn dial_whenever(&self, mut stream: TcpStream, id: &LinkId) -> Result<Connection, HandshakeError> {
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge).await?;
        let accepting = hello::read_challenge(&challenge).ok_or(HandshakeError::WrongVersion)?;
        // While the acceptor waits for the hello, its nonce is where it says.
        let readable = self.readable(&accepting);
        let probe = self.probe();
        let dialling = probe.end();
        stream.write_all(&hello::hello(&self.secret, &accepting, &dialling, id)).await?;
        let mut welcome = [0; WELCOME];
        stream.read_exact(&mut welcome).await.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => HandshakeError::Refused,
            _ => error.into(),
        })?;
        if !hello::check_welcome(&self.secret, &accepting, &dialling, id, &welcome) {
            return Err(HandshakeError::WrongSecret);
        }
        Ok(Connection { stream: stream.into_std()?, readable })
    }
}
