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
use crate::wire::hello::{self, CHALLENGE, HELLO, Hello, LinkId, MemoryToken, Nonce, WELCOME};

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

impl HandshakeError {
    /// The reason in metrics.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) => "broken",
            Self::WrongSecret => "wrong_secret",
            Self::WrongRank { .. } => "wrong_rank",
            Self::WrongVersion => "wrong_version",
            Self::Refused => "refused",
            Self::TimedOut(_) => "timeout",
        }
    }
}

/// What this rank proves itself with.
#[derive(Debug)]
pub(super) struct Prover {
    pub(super) secret: Secret,
    /// How long a handshake may take.
    pub(super) limit: Duration,
    /// What other ends find in this process's memory, if they may read it and be read.
    pub(super) memory: Option<MemoryProbe>,
}

impl Prover {
    fn memory(&self) -> MemoryToken {
        self.memory.as_ref().map(MemoryProbe::token).unwrap_or_default()
    }

    fn readable(&self, other: &MemoryToken) -> Option<ReadableProcess> {
        self.memory.as_ref().and_then(|_| ReadableProcess::probe(other))
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
        let accepting = random();
        stream.write_all(&hello::challenge(&accepting)).await?;
        let mut bytes = [0; HELLO];
        let first = stream.read(&mut bytes).await?;
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut bytes[first..]).await?;
        let hello = Hello::decode(&self.secret, &accepting, &bytes).ok_or(HandshakeError::WrongSecret)?;
        let id = hello.id;
        if id.epoch != epoch || id.to != me {
            return Err(HandshakeError::WrongRank { to: id.to, epoch: id.epoch, me, current: epoch });
        }
        let readable = self.readable(&hello.memory);
        stream.write_all(&hello.welcome(&self.secret, &accepting, self.memory())).await?;
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
        let hello = Hello { nonce: random(), memory: self.memory(), id: *id };
        stream.write_all(&hello.encode(&self.secret, &accepting)).await?;
        let mut welcome = [0; WELCOME];
        stream.read_exact(&mut welcome).await.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => HandshakeError::Refused,
            _ => error.into(),
        })?;
        let memory = hello.read_welcome(&self.secret, &accepting, &welcome);
        let readable = self.readable(&memory.ok_or(HandshakeError::WrongSecret)?);
        Ok(Connection { stream: stream.into_std()?, readable })
    }
}

fn random() -> Nonce {
    *Secret::random().expose()
}
