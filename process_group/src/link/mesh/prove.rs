//! The handshake in which the two ends of a link prove to each other that they know the job's secret.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::link::security::{Channel, Connecting, Mismatch, Protection, Security, is_of_tls};
use crate::link::wire::hello::{
    self, CHALLENGE, CLIENT_PROOF, HELLO, Hello, LinkId, Nonce, Opening, PREFACE, REPLY, WELCOME,
};
use crate::membership::half_open::AdmissionToken;
use crate::membership::roster::Secret;
use crate::types::rank::{Epoch, Rank};

/// The reason why a link was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Io(io::Error),
    #[error("it does not know the job's secret")]
    WrongSecret,
    #[error(
        "its proof of the job's secret is for another connection: somebody in the network between the two ranks has taken this \
         one over"
    )]
    Intercepted,
    #[error("it looks for rank {to} of epoch {epoch}, this is rank {me} of epoch {current}")]
    WrongRank { to: Rank, epoch: Epoch, me: Rank, current: Epoch },
    #[error("what answers there is no rank of this version")]
    WrongVersion,
    #[error("it refused this rank: another secret or another epoch")]
    Refused,
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error(
        "TLS failed: {0}; the bytes of this connection were changed on their way, or something else answers at this address"
    )]
    Tls(io::Error),
    #[error("it has not finished the handshake in {0:?}")]
    TimedOut(Duration),
}

impl HandshakeError {
    /// Returns one word, for the counter of rejected connections.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) | Self::Refused => "broken",
            Self::WrongSecret => "secret",
            Self::Intercepted => "intercepted",
            Self::WrongRank { .. } => "epoch",
            Self::WrongVersion => "protocol",
            Self::Mismatch(_) => "encryption",
            Self::Tls(_) => "tls",
            Self::TimedOut(_) => "late",
        }
    }

    /// Returns true if another attempt would have the same result. Only the reply of a rank that knows the secret leads to this:
    /// bytes that an outsider sends, or changes on the way, may have another result the next time.
    pub(super) const fn is_final(&self) -> bool {
        matches!(self, Self::Mismatch(_))
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        if is_of_tls(&error) { Self::Tls(error) } else { Self::Io(error) }
    }
}

impl HandshakeError {
    /// Interprets the absence of an expected answer: the end that rejects closes the connection.
    fn while_waiting(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Self::Refused
            }
            _ => error.into(),
        }
    }
}

/// The data with which this rank proves itself.
#[derive(Debug)]
pub(super) struct Prover {
    pub(super) secret: Secret,
    pub(super) security: Security,
    /// Timeout of a handshake.
    pub(super) limit: Duration,
}

impl Prover {
    /// Executes the accepting end, as rank `me` of an epoch. Returns `None` for a client that disconnects without a byte, like
    /// those that only check whether this rank is alive. A client that knows the secret leaves its admission.
    pub(super) async fn accept<S: Connecting>(
        &self,
        stream: S,
        here: Protection,
        epoch: Epoch,
        me: Rank,
        admission: &AdmissionToken,
    ) -> Result<Option<(LinkId, Channel)>, HandshakeError> {
        let handshake = timeout(self.limit, self.accept_whenever(stream, here, epoch, me, admission));
        handshake.await.unwrap_or(Err(HandshakeError::TimedOut(self.limit)))
    }

    async fn accept_whenever<S: Connecting>(
        &self,
        mut stream: S,
        here: Protection,
        epoch: Epoch,
        me: Rank,
        admission: &AdmissionToken,
    ) -> Result<Option<(LinkId, Channel)>, HandshakeError> {
        let challenge = hello::challenge(here, &random());
        stream.write_all(&challenge).await?;
        let mut proof = [0; CLIENT_PROOF];
        let (preface, rest) = proof.split_first_chunk_mut::<PREFACE>().expect("a proof is longer");
        let first = stream.read(preface).await?;
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut preface[first..]).await?;
        let there = hello::read_preface(*preface).ok_or(HandshakeError::WrongVersion)?;
        stream.read_exact(rest).await?;
        let opening =
            Opening::verify_client(&self.secret, &challenge, &proof).ok_or(HandshakeError::WrongSecret)?;
        admission.leave();
        // An end with other settings gets it too, and can then report the mismatch.
        stream.write_all(&opening.reply(&self.secret)).await?;
        Security::agree(here, there)?;

        let mut stream = self.security.accept(here, stream).await.map_err(HandshakeError::while_waiting)?;
        let binding = *stream.binding();
        let mut bytes = [0; HELLO];
        stream.read_exact(&mut bytes).await.map_err(HandshakeError::while_waiting)?;
        let hello =
            Hello::decode(&self.secret, &opening, &binding, &bytes).ok_or(HandshakeError::Intercepted)?;
        let Hello(id) = hello;
        if id.epoch != epoch || id.to != me {
            return Err(HandshakeError::WrongRank { to: id.to, epoch: id.epoch, me, current: epoch });
        }
        stream.write_all(&hello.welcome(&self.secret, &opening, &binding)).await?;
        stream.flush().await?;
        Ok(Some((id, Channel::new(stream)?)))
    }

    /// Executes the dialling end.
    pub(super) async fn dial<S: Connecting>(
        &self,
        stream: S,
        here: Protection,
        id: &LinkId,
    ) -> Result<Channel, HandshakeError> {
        let handshake = timeout(self.limit, self.dial_whenever(stream, here, id));
        handshake.await.unwrap_or(Err(HandshakeError::TimedOut(self.limit)))
    }

    async fn dial_whenever<S: Connecting>(
        &self,
        mut stream: S,
        here: Protection,
        id: &LinkId,
    ) -> Result<Channel, HandshakeError> {
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge).await?;
        let preface = *challenge.first_chunk().expect("a challenge is longer");
        let there = hello::read_preface(preface).ok_or(HandshakeError::WrongVersion)?;
        let (proof, opening) = Opening::prove_client(&self.secret, &challenge, here, &random());
        // An end with other settings gets it too, and can then report the mismatch.
        stream.write_all(&proof).await?;
        let mut reply = [0; REPLY];
        stream.read_exact(&mut reply).await.map_err(HandshakeError::while_waiting)?;
        if !opening.is_reply(&self.secret, &reply) {
            return Err(HandshakeError::WrongSecret);
        }
        Security::agree(here, there)?;

        let mut stream = self.security.connect(here, stream).await.map_err(HandshakeError::while_waiting)?;
        let binding = *stream.binding();
        let hello = Hello(*id);
        stream.write_all(&hello.encode(&self.secret, &opening, &binding)).await?;
        stream.flush().await?;
        let mut welcome = [0; WELCOME];
        stream.read_exact(&mut welcome).await.map_err(HandshakeError::while_waiting)?;
        if !hello.is_welcome(&self.secret, &opening, &binding, &welcome) {
            return Err(HandshakeError::WrongSecret);
        }
        Ok(Channel::new(stream)?)
    }
}

fn random() -> Nonce {
    *Secret::random().expose()
}
