//! Connects to a rank that listens.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout, timeout_at};

use super::prove::{LinkError, LinkId, Prover};
use super::{RETRY, unix};
use crate::link::security::Channel;
use crate::types::rank::Rank;

/// Time after which a rank that refuses connections has ended: every rank listens from before it joins until it ends.
const GONE_AFTER: Duration = Duration::from_millis(500);

/// The state with which this rank dials.
#[derive(Clone, Debug)]
pub(super) struct Dialler(pub(super) Arc<Prover>);

/// The reason why a rank was not reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unreached {
    #[error("its port refuses connections; the rank has probably ended")]
    Gone,
    #[error("rank {rank} at {address}: {why}")]
    Refused { rank: Rank, address: SocketAddr, why: LinkError },
    #[error("rank {0} has no data plane")]
    NoAddress(Rank),
    #[error("rank {rank} at {address}: {}", .last.as_ref().map_or_else(|| "it does not answer".into(), ToString::to_string))]
    Late {
        rank: Rank,
        address: SocketAddr,
        /// The result of the last attempt.
        last: Option<LinkError>,
    },
}

impl Dialler {
    /// Tries until the deadline, or until it is clear that the rank has ended. `same_host` is true if the rank at this address runs
    /// on this host.
    pub(super) async fn dial(
        &self,
        address: SocketAddr,
        same_host: bool,
        id: &LinkId,
        deadline: Instant,
    ) -> Result<Channel, Unreached> {
        let mut last = None;
        let mut refused_since = None;
        let attempts = async {
            loop {
                match self.attempt(address, same_host, id).await {
                    Ok(connection) => return Ok(connection),
                    Err(error) if is_refused(&error) => {
                        if refused_since.get_or_insert_with(Instant::now).elapsed() >= GONE_AFTER {
                            return Err(Unreached::Gone);
                        }
                        last = Some(error);
                    }
                    Err(why) if why.is_final() => {
                        return Err(Unreached::Refused { rank: Rank(id.to), address, why });
                    }
                    Err(error) => (refused_since, last) = (None, Some(error)),
                }
                sleep(RETRY).await;
            }
        };
        let reached = timeout_at(deadline.into(), attempts).await;
        reached.unwrap_or_else(|_| Err(Unreached::Late { rank: Rank(id.to), address, last }))
    }

    /// Returns when it is clear that the rank has ended.
    pub(super) async fn until_gone(address: SocketAddr) {
        let mut refused_since = None;
        loop {
            // Most ranks have dialled before this.
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

    async fn attempt(&self, address: SocketAddr, same_host: bool, id: &LinkId) -> Result<Channel, LinkError> {
        if same_host && let Some(stream) = unix::dial(address, geteuid()) {
            let here = self.0.handshake.security.protection_within_host();
            return self.0.dial(stream, here, id).await;
        }
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let here = self.0.handshake.security.protection(address.ip());
        self.0.dial(stream, here, id).await
    }
}

fn is_refused(error: &LinkError) -> bool {
    matches!(error, LinkError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
}
