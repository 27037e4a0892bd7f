//! A rank's client of the rendezvous: blocking calls with deadlines, usable inside and outside any runtime.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use ryzanstein_config::HostPort;
use ryzanstein_process_group::security::{Handshake, HandshakeError, Protocol, Secured, Security};
use ryzanstein_process_group::store::{Store, check};
use ryzanstein_process_group::{
    Candidate, Epoch, Error, LocalRank, Membership, Rank, Rendezvous, Result, Secret,
};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Response, Status};

use super::codec;
use super::core::Participant;
use crate::control as wire;
use crate::control::control_client::ControlClient;
use crate::status::wire::Report;
use ryzanstein_process_group::RuntimeThread;

/// Timeout of a request that the rendezvous answers immediately.
const UNARY_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a heartbeat: the next one is due soon after.
const BEAT_TIMEOUT: Duration = Duration::from_secs(1);
/// Margin added to the deadline that the rendezvous itself keeps, so that its answer, which names the missing ranks, arrives.
const NETWORK_MARGIN: Duration = Duration::from_secs(2);
/// Time between two attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Connections that a server may close before it counts as another service.
const MOST_CLOSED: u32 = 10;
/// HTTP/2 keep-alive: a rendezvous that is silent for this long is pinged, and considered lost if it stays silent as long
/// again.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The place of this process in the job, as far as it was given.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Rank of the process; `None` asks the rendezvous for one.
    pub rank: Option<Rank>,
    /// Rank of the process on its host.
    pub local_rank: Option<LocalRank>,
    /// Rank of the host.
    pub node_rank: Option<u32>,
    /// Number of ranks in the job.
    pub world_size: u32,
    /// Epoch that the process was started for; `None` takes the current one.
    pub epoch: Option<Epoch>,
}

/// A connection to a rendezvous. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
}

/// A connection that this does not keep open.
#[derive(Debug)]
pub(crate) struct WeakClient(Weak<Inner>);

impl WeakClient {
    pub(crate) fn upgrade(&self) -> Option<Client> {
        Some(Client { inner: self.0.upgrade()? })
    }
}

#[derive(Debug)]
struct Inner {
    stub: ControlClient<Channel>,
    server: HostPort,
    local: IpAddr,
    identity: Identity,
    secret: Secret,
    joined: OnceLock<(Rank, Epoch)>,
    runtime: RuntimeThread,
}

impl Client {
    /// Connects. Retries until the deadline while no server listens there yet.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] states the address, the failure there and the points to check.
    pub fn connect(
        server: HostPort,
        secret: Secret,
        security: Security,
        identity: Identity,
        deadline: Instant,
    ) -> Result<Self> {
        Self::try_connect(server, secret, security, identity, deadline).map_err(Unconnected::into)
    }

    /// Does the same as [`connect`](Self::connect), with an error that tells whether a member of the job refused.
    pub(super) fn try_connect(
        server: HostPort,
        secret: Secret,
        security: Security,
        identity: Identity,
        deadline: Instant,
    ) -> std::result::Result<Self, Unconnected> {
        let runtime = RuntimeThread::start("ryz-control")
            .map_err(Error::system("cannot start the thread of the rendezvous"))
            .map_err(|error| Unconnected { error, by_member: false })?;
        let handshake = Handshake { protocol: Protocol::Control, secret: secret.clone(), security };
        let connecting = connect(server.clone(), handshake, deadline);
        let connected = runtime.block_on(deadline + NETWORK_MARGIN, connecting);
        let (stub, local) = connected.unwrap_or(Err(ConnectError::NoAnswer)).map_err(|why| Unconnected {
            by_member: why.is_of_a_member(),
            error: Error::Rendezvous(format!("cannot reach the rendezvous at {server}: {why}")),
        })?;
        let joined = OnceLock::new();
        let inner = Inner { stub, server, local, identity, secret, joined, runtime };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Reports the reason why this rank gives up, so that the launcher can name the cause. `last_call` is the last collective,
    /// `caused_by` the rank whose failure made this one fail.
    ///
    /// # Errors
    /// Fails when the rendezvous cannot be reached, or this process has no rank yet. The rank is about to exit anyway: log the
    /// error.
    pub fn report(&self, cause: String, last_call: Option<String>, caused_by: Option<u32>) -> Result<()> {
        let rank = self.inner.joined.get().map(|(rank, _)| *rank).or(self.inner.identity.rank);
        let Some(rank) = rank else {
            return Err(Error::Rendezvous("a process without a rank has nothing to report".into()));
        };
        let request = wire::ReportRequest { epoch: self.epoch(), rank: rank.0, cause, last_call, caused_by };
        // Shorter than other deadlines: the rank is about to exit.
        let reply =
            self.call(Duration::from_secs(1), |mut stub| async move { stub.report(request).await })?;
        refused(reply.refusal)
    }

    /// Sends a heartbeat. `Orchestrator` does this for its ranks.
    ///
    /// # Errors
    /// Fails when the rendezvous does not answer within a second, or this process is not in the job's current epoch.
    pub fn beat(&self, report: &Report) -> Result<()> {
        let Some((rank, _)) = self.inner.joined.get() else {
            return Err(Error::Rendezvous("join before sending heartbeats".into()));
        };
        self.beat_as(*rank, report, BEAT_TIMEOUT)
    }

    /// Returns the same connection in a form that does not keep it open.
    pub(crate) fn downgrade(&self) -> WeakClient {
        WeakClient(Arc::downgrade(&self.inner))
    }

    /// Adds to a launcher's counter in the store, with a separate deadline.
    pub(crate) fn count(&self, key: &str, amount: i64, wait: Duration) -> Result<i64> {
        let request = wire::AddRequest { epoch: self.epoch(), key: key.into(), amount };
        let reply = self.call(wait, |mut stub| async move { stub.add(request).await })?;
        refused(reply.refusal)?;
        Ok(reply.value)
    }

    /// Sets a launcher's key in the store, with a separate deadline.
    pub(crate) fn put(&self, key: &str, value: &[u8], wait: Duration) -> Result<()> {
        let value = bytes::Bytes::copy_from_slice(value);
        let request = wire::SetRequest { epoch: self.epoch(), key: key.into(), value };
        refused(self.call(wait, |mut stub| async move { stub.set(request).await })?.refusal)
    }

    /// Reports to the first node's launcher that a rank of this node has left, and that no heartbeat follows.
    pub(crate) fn report_exit(&self, rank: Rank, wait: Duration) -> Result<()> {
        self.beat_as(rank, &Report { leaving: true, ..Report::default() }, wait)
    }

    fn beat_as(&self, rank: Rank, report: &Report, wait: Duration) -> Result<()> {
        let request = wire::BeatRequest { epoch: self.epoch(), rank: rank.0, report: report.encode() };
        refused(self.call(wait, |mut stub| async move { stub.beat(request).await })?.refusal)
    }

    fn epoch(&self) -> u64 {
        let joined = self.inner.joined.get().map(|(_, epoch)| *epoch);
        joined.or(self.inner.identity.epoch).unwrap_or(Epoch(1)).0
    }

    fn call<T, F>(&self, wait: Duration, rpc: impl FnOnce(ControlClient<Channel>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<Response<T>, Status>> + Send + 'static,
    {
        let Inner { stub, server, runtime, .. } = &*self.inner;
        match runtime.block_on(Instant::now() + wait, rpc(stub.clone())) {
            Some(Ok(response)) => Ok(response.into_inner()),
            Some(Err(status)) => Err(lost(server, &status)),
            None => Err(Error::Rendezvous(format!(
                "the rendezvous at {server} has not answered for {wait:.1?}: its host or the network does not respond"
            ))),
        }
    }
}

fn lost(server: &HostPort, status: &Status) -> Error {
    match status.code() {
        tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => {
            Error::Rendezvous(format!(
                "lost the rendezvous at {server}: the process that served it (the launcher, or rank 0) has ended, or the \
             network to it broke ({})",
                innermost(status)
            ))
        }
        _ => Error::Rendezvous(format!("the rendezvous at {server} answered: {}", status.message())),
    }
}

/// Returns the innermost error, which is the operating system's.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

fn refused(refusal: Option<wire::Refusal>) -> Result<()> {
    refusal.map_or(Ok(()), |refusal| Err(codec::error(refusal)))
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// The reason why no connection to the rendezvous could be made.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("it did not answer in time")]
    NoAnswer,
    #[error(
        "it accepted the connection but said nothing for {0:.1?}; another kind of service may have this port"
    )]
    Silent(Duration),
    #[error("{0}")]
    Handshake(io::Error),
    #[error(
        "{error}, tried for {tried:.1?}; check that the launcher (or rank 0) runs there, that the address is right, and \
         that no firewall blocks it"
    )]
    Unreachable {
        #[source]
        error: io::Error,
        tried: Duration,
    },
    #[error("{0}")]
    Socket(io::Error),
    #[error("{}", innermost(.0))]
    Http(#[source] tonic::transport::Error),
}

impl ConnectError {
    /// Returns true if the server has proved that it knows the secret.
    fn is_of_a_member(&self) -> bool {
        let Self::Handshake(error) = self else { return false };
        handshake_error(error).is_some_and(HandshakeError::is_of_a_member)
    }
}

fn handshake_error(error: &io::Error) -> Option<&HandshakeError> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

/// The result of a failed attempt to connect to the rendezvous.
pub(super) struct Unconnected {
    /// The error.
    pub(super) error: Error,
    /// True if the server knows the secret and another attempt would fail the same way: the settings of the two ends differ.
    pub(super) by_member: bool,
}

impl From<Unconnected> for Error {
    fn from(unconnected: Unconnected) -> Self {
        unconnected.error
    }
}

/// Resolves the name, connects and does the handshake, once.
async fn open(server: &HostPort, handshake: &Handshake) -> Result<Secured<TcpStream>, io::Error> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((server.host(), server.port())).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                // The name may be 0.0.0.0; the server decides by the address at which it was reached.
                let protection = handshake.security.protection(stream.peer_addr()?.ip());
                return handshake.connect(stream, protection, &[]).await.map_err(io::Error::other);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect(
    server: HostPort,
    handshake: Handshake,
    deadline: Instant,
) -> Result<(ControlClient<Channel>, IpAddr), ConnectError> {
    let started = Instant::now();
    let (mut last, mut closed) = (None, 0);
    let stream = loop {
        let error = match tokio::time::timeout_at(deadline.into(), open(&server, &handshake)).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(error)) => error,
            // The time may end in an attempt that has not reached anything yet.
            Err(_) => {
                let tried = started.elapsed();
                return Err(match last {
                    Some(error) => ConnectError::Unreachable { error, tried },
                    None => ConnectError::Silent(tried),
                });
            }
        };
        let refusal = handshake_error(&error);
        // The server of a broken connection may be a rendezvous that is just starting, one that strangers flood closes some
        // connections, and somebody may have changed bytes on their way; retrying helps in no other case.
        closed += u32::from(matches!(refusal, Some(HandshakeError::Closed(_))));
        let may_help = match refusal {
            None | Some(HandshakeError::Io(_) | HandshakeError::Refused | HandshakeError::Tls(_)) => true,
            Some(HandshakeError::Closed(_)) => closed < MOST_CLOSED,
            Some(_) => false,
        };
        if !may_help {
            return Err(ConnectError::Handshake(error));
        }
        if Instant::now() + RETRY_INTERVAL >= deadline {
            return Err(ConnectError::Unreachable { error, tried: started.elapsed() });
        }
        last = Some(error);
        tokio::time::sleep(RETRY_INTERVAL).await;
    };
    let local = stream
        .get_ref()
        .local_addr()
        .map(|address: SocketAddr| address.ip())
        .map_err(ConnectError::Socket)?;

    let mut first = Some(stream);
    let connector = tower::service_fn(move |_: Uri| {
        let ready = first.take();
        let (server, handshake) = (server.clone(), handshake.clone());
        async move {
            let stream = match ready {
                Some(stream) => stream,
                // The first connection broke. If the rendezvous still runs, it accepts this rank again.
                None => open(&server, &handshake).await?,
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://rendezvous")
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(ConnectError::Http)?;
    // Enough for the roster of the largest world, unless its lists of CPUs are long.
    Ok((ControlClient::new(channel).max_decoding_message_size(16 << 20), local))
}

impl Rendezvous for Client {
    fn local_address(&self) -> Result<IpAddr> {
        Ok(self.inner.local)
    }

    fn local_rank(&self) -> Option<LocalRank> {
        self.inner.identity.local_rank
    }

    fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership> {
        let Identity { rank, local_rank, node_rank, world_size, epoch } = self.inner.identity.clone();
        let wait = until(deadline);
        let participant = Participant { rank, local_rank, node_rank, candidate };
        let request = codec::join_request(&participant, epoch, world_size, wait);
        let reply = self.call(wait + NETWORK_MARGIN, |mut stub| async move { stub.join(request).await })?;
        refused(reply.refusal)?;
        let joined = codec::decode_roster(&reply.roster).map_err(Error::Rendezvous)?;
        let rank = Rank(reply.rank);
        let _ = self.inner.joined.set((rank, joined.roster.epoch));
        Ok(Membership {
            rank,
            roster: joined.roster,
            selection: joined.selection,
            store: Arc::new(self.clone()),
            secret: self.inner.secret.clone(),
        })
    }
}

impl Store for Client {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check(key, value)?;
        self.put(key, value, UNARY_TIMEOUT)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>> {
        let wait = until(deadline);
        let request =
            wire::GetRequest { epoch: self.epoch(), key: key.into(), timeout_ms: codec::milliseconds(wait) };
        let reply = self.call(wait + NETWORK_MARGIN, |mut stub| async move { stub.get(request).await })?;
        refused(reply.refusal)?;
        Ok(reply.value.into())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check(key, &[])?;
        self.count(key, amount, UNARY_TIMEOUT)
    }
}
