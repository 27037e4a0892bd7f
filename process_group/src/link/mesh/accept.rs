//! Accepts links from the ranks that dial this one.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::pending;
use std::sync::{Arc, Condvar, Mutex};

use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::prove::{LinkError, LinkId, Prover};
use super::{Bound, RETRY};
use crate::link::security::{self, Channel, Connecting, Protection};
use crate::membership::half_open::{AdmissionToken, HalfOpen};
use crate::types::rank::{Epoch, Rank};
use crate::types::sync::lock;

/// Connections that other ranks have made and that this rank has not asked for yet.
#[derive(Default, Debug)]
pub(super) struct Arrivals {
    pub(super) links: Mutex<HashMap<LinkId, Channel>>,
    pub(super) arrived: Condvar,
}

/// The state with which this rank accepts links.
pub(super) struct Acceptor {
    pub(super) epoch: Epoch,
    pub(super) me: Rank,
    pub(super) prover: Arc<Prover>,
    pub(super) arrivals: Arc<Arrivals>,
}

impl Acceptor {
    /// Accepts links forever.
    pub(super) async fn accept(self, bound: Bound, mut half_open: HalfOpen) {
        let listeners = TcpListener::from_std(bound.tcp)
            .and_then(|tcp| Ok((tcp, bound.unix.map(UnixListener::from_std).transpose()?)));
        let (tcp, unix) = match listeners {
            Ok(listeners) => listeners,
            Err(error) => return tracing::error!(%error, "cannot accept links"),
        };
        let (me, this) = (self.me, Arc::new(self));
        loop {
            let (this, admission) = (Arc::clone(&this), AdmissionToken::default());
            let own = admission.clone();
            let within_host = async {
                match &unix {
                    Some(listener) => listener.accept().await,
                    None => pending().await,
                }
            };
            let spawned = tokio::select! {
                accepted = tcp.accept() => accepted.map(|(stream, from)| {
                    tokio::spawn(async move { report(from, this.welcome_tcp(stream, &own).await) })
                }),
                accepted = within_host => accepted.map(|(stream, _)| tokio::spawn(async move {
                    let here = this.prover.handshake.security.protection_within_host();
                    report("a Unix socket", this.welcome(stream, here, &own).await);
                })),
            };
            let task = match spawned {
                Ok(task) => task,
                Err(error) => {
                    // The cause is most likely a lack of descriptors: make room, and do not spin.
                    evicted(half_open.shed(&format!("rank {me}"), &error));
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            evicted(half_open.push(task.abort_handle(), admission).await);
        }
    }

    async fn welcome_tcp(&self, stream: TcpStream, admission: &AdmissionToken) -> Result<(), LinkError> {
        stream.set_nodelay(true)?;
        let here = self.prover.handshake.security.protection(stream.local_addr()?.ip());
        self.welcome(stream, here, admission).await
    }

    async fn welcome<S: Connecting>(
        &self,
        stream: S,
        here: Protection,
        admission: &AdmissionToken,
    ) -> Result<(), LinkError> {
        if let Some((id, connection)) =
            self.prover.accept(stream, here, self.epoch, self.me, admission).await?
        {
            lock(&self.arrivals.links).insert(id, connection);
            self.arrivals.arrived.notify_all();
        }
        Ok(())
    }
}

fn evicted(connections: usize) {
    (0..connections).for_each(|_| security::count_refused("data", "evicted"));
}

/// Counts and logs a connection if it was rejected.
fn report(from: impl Display, outcome: Result<(), LinkError>) {
    let Err(why) = outcome else { return };
    security::count_refused("data", why.reason());
    match why {
        // The other end knows the secret: no outsider can fill the log.
        LinkError::Handshake(error) if error.is_of_a_member() => {
            tracing::warn!(%from, "refused a rank's connection: {error}");
        }
        _ => tracing::debug!(%from, %why, "refused a connection to the data plane"),
    }
}
