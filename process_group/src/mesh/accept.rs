//! Being reached by the ranks that dial this one.

use std::net::TcpListener;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::RETRY;
use super::arrivals::Arrivals;
use super::prove::{HandshakeError, Prover};
use crate::half_open::HalfOpen;
use crate::metric_names;
use crate::rank::{Epoch, Rank};
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
    pub(super) async fn accept(self, listener: TcpListener) {
        let listener = match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "cannot accept links"),
        };
        let this = Arc::new(self);
        let mut half_open = HalfOpen::default();
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: make room, and do not spin.
                    tracing::debug!(%error, "accepting a link failed");
                    half_open.shed();
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            let this = Arc::clone(&this);
            let task = tokio::spawn(async move {
                if let Err(reason) = this.welcome(stream).await {
                    let labels = [("rank", this.me.to_string()), ("reason", reason.reason().to_owned())];
                    metrics::counter!(metric_names::LINKS_REFUSED.name, &labels).increment(1);
                    tracing::debug!(%from, %reason, "refused a connection to the data plane");
                }
            });
            half_open.push(task.abort_handle());
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
