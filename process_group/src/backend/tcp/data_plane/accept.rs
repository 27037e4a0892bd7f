//! Being reached by the ranks that dial this one.

use std::net::TcpListener;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use super::{Arrivals, Connection, RETRY, beacon};
use crate::backend::tcp::cross_memory::probe;
use crate::rank::{Epoch, Rank};
use crate::roster::Secret;
use crate::wire::hello::{self, HELLO};

/// Connections that may be proving themselves at one time. Each costs a few hundred bytes.
const HALF_OPEN: usize = 4096;

/// How this rank is reached.
pub(super) struct Acceptor {
    pub(super) epoch: Epoch,
    pub(super) me: Rank,
    pub(super) secret: Secret,
    pub(super) handshake: Duration,
    pub(super) cross_memory: bool,
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
                match tokio::time::timeout(this.handshake, this.welcome(stream)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(reason)) => {
                        metrics::counter!("ryz_links_refused_total").increment(1);
                        tracing::debug!(%from, reason, "refused a connection to the data plane");
                    }
                    Err(_) => {
                        metrics::counter!("ryz_links_refused_total").increment(1);
                        tracing::debug!(%from, "a connection to the data plane did not finish its handshake");
                    }
                }
            });
        }
    }

    async fn welcome(&self, mut stream: tokio::net::TcpStream) -> Result<(), String> {
        let io = |e: std::io::Error| e.to_string();
        stream.set_nodelay(true).map_err(io)?;
        let beacon = beacon(self.cross_memory);
        let accepting = beacon.end();
        stream.write_all(&hello::challenge(&accepting)).await.map_err(io)?;
        let mut bytes = [0; HELLO];
        // Who only looks whether this rank is still there says nothing.
        let first = stream.read(&mut bytes).await.map_err(io)?;
        if first == 0 {
            return Ok(());
        }
        stream.read_exact(&mut bytes[first..]).await.map_err(io)?;
        let hello::Hello { id, dialling, welcome } = hello::read_hello(&self.secret, &accepting, &bytes)
            .ok_or_else(|| "it does not know the job's secret".to_owned())?;
        if id.epoch != self.epoch || id.to != self.me {
            return Err(format!(
                "it looks for rank {} of epoch {}, this is rank {} of epoch {}",
                id.to, id.epoch, self.me, self.epoch
            ));
        }
        // While the dialler waits for the welcome, its nonce is where it says.
        let readable = self.cross_memory.then(|| probe(&dialling)).flatten();
        stream.write_all(&welcome).await.map_err(io)?;
        let stream = stream.into_std().map_err(io)?;
        let mut links = self.arrivals.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.keep(id, Connection { stream, readable });
        self.arrivals.arrived.notify_all();
        Ok(())
    }
}
