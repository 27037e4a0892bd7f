//! Accepts connections to the rendezvous, authenticates each, and bounds their number.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use ryzanstein_config::RendezvousConfig;
use ryzanstein_process_group::security::{self, Handshake, Protocol, Secured, Security};
use ryzanstein_process_group::{AdmissionToken, HalfOpen, Secret};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

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
    admitted: mpsc::Sender<io::Result<AuthenticatedStream>>,
}

impl Acceptor {
    pub(super) fn new(
        secret: Secret,
        security: Security,
        config: &RendezvousConfig,
        counts: Arc<ConnectionCounts>,
    ) -> (Self, ReceiverStream<io::Result<AuthenticatedStream>>) {
        let (admitted, incoming) = mpsc::channel(64);
        let acceptor = Self {
            handshake: Handshake { protocol: Protocol::Control, secret, security },
            handshake_timeout: config.handshake_timeout.get(),
            most: config.max_connections.get() as usize,
            counts,
            admitted,
        };
        (acceptor, ReceiverStream::new(incoming))
    }

    fn counts(&self) -> Arc<ConnectionCounts> {
        Arc::clone(&self.counts)
    }

    /// Accepts connections for ever. Connections that have not proved the secret have a separate bound, and a new one evicts
    /// the oldest: a rank of the job needs only milliseconds.
    pub(super) async fn run(self, listener: TcpListener) {
        let mut half_open = HalfOpen::at_most(self.most);
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely the process has no descriptors left: make room, and do not spin.
                    tracing::debug!(%error, "the rendezvous could not accept a connection");
                    self.counts.evicted(half_open.shed());
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            if self.counts.connections() >= self.most {
                self.counts.refuse(peer, "full", &"rendezvous.max_connections is reached");
                continue;
            }
            let counts = self.counts();
            let (handshake, wait) = (self.handshake.clone(), self.handshake_timeout);
            let (admitted, admission) = (self.admitted.clone(), AdmissionToken::default());
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
                        counts.connections.fetch_add(1, Ordering::Relaxed);
                        let _ = admitted.send(Ok(AuthenticatedStream { stream, counts })).await;
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

/// A connection that has proved that it knows the secret.
pub(super) struct AuthenticatedStream {
    stream: Secured<TcpStream>,
    counts: Arc<ConnectionCounts>,
}

impl Drop for AuthenticatedStream {
    fn drop(&mut self) {
        self.counts.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connected for AuthenticatedStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for AuthenticatedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for AuthenticatedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
