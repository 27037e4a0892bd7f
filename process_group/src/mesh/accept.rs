//! Being reached by the ranks that dial this one.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use tokio::net::TcpStream;

use super::RETRY;
use super::arrivals::Arrivals;
use super::prove::{HandshakeError, Prover};
use crate::half_open::{HalfOpen, Seat};
use crate::rank::{Epoch, Rank};
use crate::security;
use crate::sync::lock;

/// How this rank is reached.
pub(super) struct Acceptor {
    pub(super) epoch: Epoch,
    pub(super) me: Rank,
    pub(super) prover: Arc<Prover>,
    pub(super) arrivals: Arc<Arrivals>,
}

impl Acceptor {
    /// Accepts for good.
    pub(super) async fn accept(self, listener: TcpListener, mut half_open: HalfOpen) {
        let listener = match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot accept links"),
        };
        let this = Arc::new(self);
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: make room, and do not spin.
                    tracing::debug!(%error, "accepting a link failed");
                    evicted(half_open.shed());
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let (this, seat) = (Arc::clone(&this), Seat::default());
            let own = seat.clone();
            let task = tokio::spawn(async move {
                if let Err(why) = this.welcome(stream, &own).await {
                    refused(from, &why);
                }
            });
            evicted(half_open.push(task.abort_handle(), seat));
        }
    }

    async fn welcome(&self, stream: TcpStream, seat: &Seat) -> Result<(), HandshakeError> {
        if let Some((id, connection)) = self.prover.accept(stream, self.epoch, self.me, seat).await? {
            lock(&self.arrivals.links).keep(id, connection);
            self.arrivals.arrived.notify_all();
        }
        Ok(())
    }
}

fn evicted(connections: usize) {
    (0..connections).for_each(|_| security::count_refused("data", "evicted"));
}

fn refused(from: SocketAddr, why: &HandshakeError) {
    security::count_refused("data", why.reason());
    match why {
        // It knows the secret: no outsider can fill the log.
        HandshakeError::Mismatch(_) | HandshakeError::Intercepted | HandshakeError::Security(_) => {
            tracing::warn!(%from, "refused a rank's connection: {why}");
        }
        _ => tracing::debug!(%from, %why, "refused a connection to the data plane"),
    }
}
