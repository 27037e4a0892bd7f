//! A rank's end of a rendezvous: blocking calls with deadlines, from inside or outside any runtime.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use ryzanstein_config::HostPort;
use ryzanstein_process_group::store::{Store, check_lengths};
use ryzanstein_process_group::{
    Candidate, Epoch, Error, LocalRank, Membership, Rank, Rendezvous, Result, Secret,
};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Response, Status};

use super::core::Participant;
use super::handshake::HandshakeError;
use super::runtime_thread::RuntimeThread;
use super::{codec, handshake};
use crate::control as wire;
use crate::control::control_client::ControlClient;

/// How long an answer that needs no waiting may take.
const UNARY_TIMEOUT: Duration = Duration::from_secs(20);
/// What the network gets beyond the deadline that the rendezvous itself keeps, so that its answer, which names who is
/// missing, arrives.
const NETWORK_MARGIN: Duration = Duration::from_secs(2);
/// Between two attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// How long a rendezvous that says nothing is trusted to be alive.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Who this rank is, as far as it has been told.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its rank; none to be given one.
    pub rank: Option<Rank>,
    /// Its position on its host.
    pub local_rank: Option<LocalRank>,
    /// Its host's position.
    pub node_rank: Option<u32>,
    /// How many ranks there are.
    pub world_size: u32,
    /// The epoch it was started for; none takes the one that is current.
    pub epoch: Option<Epoch>,
}

/// A connection to a rendezvous. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
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
    /// Connects, trying again while nobody listens there yet, until the deadline.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] that says where it tried, what happened there and what to look at.
    pub fn connect(server: HostPort, secret: Secret, identity: Identity, deadline: Instant) -> Result<Self> {
        let runtime = RuntimeThread::start("ryz-control")
            .map_err(|error| Error::Transport(format!("no thread for the rendezvous: {error}")))?;
        let connecting = connect(server.clone(), secret.clone(), deadline);
        let (stub, local) = runtime
            .block_on(deadline + NETWORK_MARGIN, connecting)
            .unwrap_or_else(|| Err("it did not answer in time".into()))
            .map_err(|why| Error::Rendezvous(format!("cannot reach the rendezvous at {server}: {why}")))?;
        let joined = OnceLock::new();
        let inner = Inner { stub, server, local, identity, secret, joined, runtime };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Says why this rank gives up, so that the launcher can name the cause. `last_call` is the last collective.
    ///
    /// # Errors
    /// When the rendezvous cannot be told. The rank is about to end anyway: log it.
    pub fn report_failure(&self, error: &Error, last_call: Option<&str>) -> Result<()> {
        let caused_by = match error.root_cause() {
            Error::PeerLost { rank, .. } | Error::PeerAborted { rank, .. } => Some(rank.0),
            Error::Timeout { missing, .. } => missing.first().map(|rank| rank.0),
            _ => None,
        };
        self.report(error.root_cause().to_string(), last_call.map(str::to_owned), caused_by)
    }

    /// As [`Client::report_failure`], for an error that is no process group's.
    ///
    /// # Errors
    /// When the rendezvous cannot be told, or this rank does not know its number yet.
    pub fn report(&self, cause: String, last_call: Option<String>, caused_by: Option<u32>) -> Result<()> {
        let rank = self.inner.joined.get().map(|(rank, _)| *rank).or(self.inner.identity.rank);
        let Some(rank) = rank else {
            return Err(Error::Rendezvous("a process without a rank has nothing to report".into()));
        };
        let request = wire::ReportRequest { epoch: self.epoch(), rank: rank.0, cause, last_call, caused_by };
        // Not as patient as other calls: whoever reports is on the way out.
        let reply =
            self.call(Duration::from_secs(1), |mut stub| async move { stub.report(request).await })?;
        refused(reply.refusal)
    }

    /// Waits until every rank has come to the barrier of this name.
    ///
    /// # Errors
    /// [`Error::Timeout`] that names the ranks which did not come.
    pub fn barrier(&self, name: &str, deadline: Instant) -> Result<()> {
        let Some((rank, _)) = self.inner.joined.get() else {
            return Err(Error::Rendezvous("join before waiting at a barrier".into()));
        };
        let wait = until(deadline);
        let request = wire::BarrierRequest {
            epoch: self.epoch(),
            name: name.into(),
            rank: rank.0,
            timeout_ms: codec::milliseconds(wait),
        };
        let reply =
            self.call(wait + NETWORK_MARGIN, |mut stub| async move { stub.barrier(request).await })?;
        refused(reply.refusal)
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
                "the rendezvous at {server} has not answered for {wait:.1?}: its host or the network to it hangs"
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

/// The error at the bottom, which is the one the operating system gave.
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

/// Resolves, connects and shakes hands; again and again while nobody listens.
async fn open(server: &HostPort, secret: &Secret) -> Result<TcpStream, io::Error> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in tokio::net::lookup_host((server.host(), server.port())).await? {
        match TcpStream::connect(address).await {
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                handshake::connect(&mut stream, secret).await.map_err(io::Error::other)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn connect(
    server: HostPort,
    secret: Secret,
    deadline: Instant,
) -> Result<(ControlClient<Channel>, IpAddr), String> {
    let started = Instant::now();
    let stream = loop {
        let error = match tokio::time::timeout_at(deadline.into(), open(&server, &secret)).await {
            Ok(Ok(stream)) => break stream,
            Ok(Err(error)) => error,
            Err(_) => {
                return Err(format!(
                    "it accepted the connection but said nothing for {:.1?}; another kind of service may have this port",
                    started.elapsed()
                ));
            }
        };
        let handshake = error.get_ref().and_then(|inner| inner.downcast_ref::<HandshakeError>());
        // A connection that broke may be a rendezvous that is just coming up; any other reason is there to stay.
        if handshake.is_some_and(|inner| !matches!(inner, HandshakeError::Io(_))) {
            return Err(error.to_string());
        }
        if Instant::now() + RETRY_INTERVAL >= deadline {
            return Err(format!(
                "{error}, tried for {:.1?}; see that the launcher (or rank 0) runs there, that the address is the one \
                 it printed, and that no firewall is between",
                started.elapsed()
            ));
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    };
    let local =
        stream.local_addr().map(|address: SocketAddr| address.ip()).map_err(|error| error.to_string())?;

    let mut first = Some(stream);
    let connector = tower::service_fn(move |_: Uri| {
        let ready = first.take();
        let (server, secret) = (server.clone(), secret.clone());
        async move {
            let stream = match ready {
                Some(stream) => stream,
                // The first connection broke. If the rendezvous is still there, it knows us again.
                None => open(&server, &secret).await?,
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
        .map_err(|error| innermost(&error))?;
    // The roster of the largest world fits.
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
        let request = codec::join_request(participant, epoch, world_size, wait);
        let reply = self.call(wait + NETWORK_MARGIN, |mut stub| async move { stub.join(request).await })?;
        refused(reply.refusal)?;
        let joined = codec::decode_roster(&reply.roster).map_err(Error::Rendezvous)?;
        let rank = Rank(reply.rank);
        let _ = self.inner.joined.set((rank, joined.roster.epoch));
        Ok(Membership {
            rank,
            roster: joined.roster,
            agreement: joined.agreement,
            store: Arc::new(self.clone()),
            secret: self.inner.secret.clone(),
            loopback: None,
        })
    }
}

impl Store for Client {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_lengths(key, value)?;
        let request = wire::SetRequest {
            epoch: self.epoch(),
            key: key.into(),
            value: bytes::Bytes::copy_from_slice(value),
        };
        refused(self.call(UNARY_TIMEOUT, |mut stub| async move { stub.set(request).await })?.refusal)
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
        let request = wire::AddRequest { epoch: self.epoch(), key: key.into(), amount };
        let reply = self.call(UNARY_TIMEOUT, |mut stub| async move { stub.add(request).await })?;
        refused(reply.refusal)?;
        Ok(reply.value)
    }
}
