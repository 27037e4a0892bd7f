//! Being reached by the ranks that dial this one.

use std::net::TcpListener;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::RETRY;
use super::arrivals::Arrivals;
use super::prove::{HandshakeError, Prover};
use crate::rank::{Epoch, Rank};
use crate::sync::lock;

/// Connections that may be proving themselves at one time. Each costs a few hundred bytes.
const HALF_OPEN: usize = 4096;

/// How this rank is reached.
pub(super) struct Acceptor {
    pub(super) epoch: Epoch,
    pub(super) me: Rank,
    pub(super) prover: Arc<Prover>,
    pub(super) arrivals: Arc<Arrivals>,
}

impl Acceptor {
    /// Accepts for good.
    pub(super) async fn accept(self, listener: TcpListener) {
        let listener = match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot accept links"),
        };
        let this = Arc::new(self);
        let half_open = Arc::new(Semaphore::new(HALF_OPEN));
        loop {
            let Ok(slot) = Arc::clone(&half_open).acquire_owned().await else { return };
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, say: others may be freed soon.
                    tracing::warn!(%error, "accepting a link failed");
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let this = Arc::clone(&this);
            tokio::spawn(async move {
                let _slot = slot;
                if let Err(reason) = this.welcome(stream).await {
                    metrics::counter!("ryz_links_refused_total").increment(1);
                    tracing::debug!(%from, %reason, "refused a connection to the data plane");
                }
            });
        }
    }

    async fn welcome(&self, stream: TcpStream) -> Result<(), HandshakeError> {
        if let Some((id, connection)) = self.prover.accept(stream, self.epoch, self.me).await? {
            lock(&self.arrivals.links).keep(id, connection);
            self.arrivals.arrived.notify_all();
        }
        Ok(())
    }
}
