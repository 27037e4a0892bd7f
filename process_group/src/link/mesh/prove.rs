//! Both ends of a link prove themselves, and the dialling one says which link it wants.

use std::future::Future;
use std::io;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use crate::link::security::{Channel, Connecting, Handshake, HandshakeError, Protection};
use crate::membership::half_open::AdmissionToken;
use crate::types::rank::{Epoch, Rank};

/// Identity of a link. Its bytes travel as they are, like payloads: every supported machine is little endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct LinkId {
    epoch: u64,
    /// Digest of the group's name.
    group: [u8; 32],
    /// The dialling rank, as a global rank.
    from: u32,
    /// The accepting rank, as a global rank.
    pub(super) to: u32,
}

impl LinkId {
    pub(super) fn new(epoch: Epoch, group: &str, from: Rank, to: Rank) -> Self {
        Self { epoch: epoch.0, group: Sha256::digest(group.as_bytes()).into(), from: from.0, to: to.0 }
    }
}

/// The reason why a link was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("it looks for rank {to} of epoch {epoch}, this is rank {me} of epoch {current}")]
    WrongRank { to: Rank, epoch: Epoch, me: Rank, current: Epoch },
    #[error("it has not finished the handshake in {0:?}")]
    TimedOut(Duration),
}

impl LinkError {
    /// Returns one word, for the counter of rejected connections.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
            Self::Io(_) => "broken",
            Self::Handshake(error) => error.reason(),
            Self::WrongRank { .. } => "epoch",
            Self::TimedOut(_) => "late",
        }
    }

    /// Returns true if another attempt would have the same result. Only an end that knows the secret causes this: bytes that an
    /// outsider sends, or changes on the way, may have another result the next time.
    pub(super) const fn is_final(&self) -> bool {
        matches!(self, Self::Handshake(HandshakeError::Mismatch(_)))
    }
}

/// The data with which this rank proves itself.
#[derive(Debug)]
pub(super) struct Prover {
    pub(super) handshake: Handshake,
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
    ) -> Result<Option<(LinkId, Channel)>, LinkError> {
        self.in_time(async {
            let accepted = self.handshake.accept::<_, { size_of::<LinkId>() }>(stream, here, admission);
            let Some(dialler) = accepted.await? else {
                return Ok(None);
            };
            let id: LinkId = bytemuck::pod_read_unaligned(&dialler.hello);
            let (to, of) = (Rank(id.to), Epoch(id.epoch));
            if of != epoch || to != me {
                return Err(LinkError::WrongRank { to, epoch: of, me, current: epoch });
            }
            Ok(Some((id, Channel::new(dialler.welcome().await?)?)))
        })
        .await
    }

    /// Executes the dialling end.
    pub(super) async fn dial<S: Connecting>(
        &self,
        stream: S,
        here: Protection,
        id: &LinkId,
    ) -> Result<Channel, LinkError> {
        self.in_time(async {
            Ok(Channel::new(self.handshake.connect(stream, here, bytemuck::bytes_of(id)).await?)?)
        })
        .await
    }

    async fn in_time<T>(&self, end: impl Future<Output = Result<T, LinkError>>) -> Result<T, LinkError> {
        timeout(self.limit, end).await.unwrap_or(Err(LinkError::TimedOut(self.limit)))
    }
}
