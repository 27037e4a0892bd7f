//! Accepts connections to the rendezvous, authenticates and serves each, and bounds their number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use ryzanstein_config::RendezvousConfig;
use ryzanstein_process_group::security::{self, Handshake, Protocol, Security};
use ryzanstein_process_group::{AdmissionToken, HalfOpen, Secret};
use tokio::net::TcpListener;
use tower::ServiceBuilder;
use tower::util::MapResponseLayer;

use super::roster_body;
use super::server::RendezvousService;

/// Maximum number of concurrent requests of one connection. A rank has few threads that wait at the rendezvous.
const REQUESTS_A_CONNECTION: u32 = 256;
/// HTTP/2 keep-alive: a peer silent for this long is pinged, and dropped if it stays silent as long again.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Counters of the acceptor.
#[derive(Debug, Default)]
pub(super) struct ConnectionCounts {
    refused: AtomicU64,
    connections: AtomicUsize,
}

impl ConnectionCounts {
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Counts and logs a refused connection. `reason` is for metrics, `why` for people.
    fn refuse(&self, peer: std::net::SocketAddr, reason: &'static str, why: &dyn std::fmt::Display) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        security::count_refused("control", reason);
        tracing::debug!(%peer, %why, "refused a connection to the rendezvous");
    }

    /// Counts a request of another epoch, on a connection that stays.
    pub(super) fn other_epoch(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        security::count_refused("control", "epoch");
    }

    fn evicted(&self, connections: usize) {
        self.refused.fetch_add(connections as u64, Ordering::Relaxed);
        (0..connections).for_each(|_| security::count_refused("control", "evicted"));
    }
}

pub(super) struct Acceptor {
    handshake: Handshake,
    handshake_timeout: Duration,
    most: usize,
    counts: Arc<ConnectionCounts>,
    service: RendezvousService,
}

impl Acceptor {
    pub(super) fn new(
        secret: Secret,
        security: Security,
        config: &RendezvousConfig,
        counts: Arc<ConnectionCounts>,
        service: RendezvousService,
    ) -> Self {
        Self {
            handshake: Handshake { protocol: Protocol::Control, secret, security },
            handshake_timeout: config.handshake_timeout.get(),
            most: config.max_connections.get() as usize,
            counts,
            service,
        }
    }

    /// Accepts connections for ever. Connections that have not proved the secret have a separate bound, and a new one evicts
    /// the oldest: a rank of the job needs only milliseconds.
    pub(super) async fn run(self, listener: TcpListener) {
        let mut half_open = HalfOpen::at_most(self.most);
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .max_concurrent_streams(REQUESTS_A_CONNECTION)
            .max_header_list_size(8 << 10)
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        let service =
            ServiceBuilder::new().layer(MapResponseLayer::new(roster_body::attach)).service(self.service);
        let service = TowerToHyperService::new(service);
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely the process has no descriptors left: make room, and do not spin.
                    self.counts.evicted(half_open.shed("the rendezvous", &error));
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            if self.counts.connections() >= self.most {
                self.counts.refuse(peer, "full", &"rendezvous.max_connections is reached");
                continue;
            }
            let counts = Arc::clone(&self.counts);
            let (handshake, wait) = (self.handshake.clone(), self.handshake_timeout);
            let (http, service, admission) = (http.clone(), service.clone(), AdmissionToken::default());
            let own = admission.clone();
            let task = tokio::spawn(async move {
                let _ = stream.set_nodelay(true);
                let Ok(here) = stream.local_addr() else { return };
                let protection = handshake.security.protection(here.ip());
                let admitting = async {
                    match handshake.accept::<_, 0>(stream, protection, &own).await? {
                        Some(client) => client.welcome().await.map(Some),
                        None => Ok(None),
                    }
                };
                match tokio::time::timeout(wait, admitting).await {
                    // Somebody looks whether the port is open.
                    Ok(Ok(None)) => {}
                    Ok(Ok(Some(stream))) => {
                        let _open = Open::count(&counts);
                        if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                            let error = &error as &dyn std::error::Error;
                            tracing::debug!(%peer, error, "a connection to the rendezvous ended");
                        }
                    }
                    Ok(Err(error)) => {
                        if error.is_of_a_member() {
                            tracing::warn!(%peer, "refused a rank's connection to the rendezvous: {error}");
                        }
                        counts.refuse(peer, error.reason(), &error);
                    }
                    Err(_) => {
                        counts.refuse(peer, "late", &"it did not prove in time that it belongs to the job");
                    }
                }
            });
            self.counts.evicted(half_open.push(task.abort_handle(), admission).await);
        }
    }
}

/// A connection that has proved that it knows the secret, counted until it ends.
struct Open(Arc<ConnectionCounts>);

impl Open {
    fn count(counts: &Arc<ConnectionCounts>) -> Self {
        counts.connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(counts))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}
