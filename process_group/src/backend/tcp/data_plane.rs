//! Where a rank's links come from: one listener a process, a mutual proof of the job's secret for every link.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, oneshot};

use super::cross_memory::{Beacon, probe};
use crate::error::{Error, Result};
use crate::rank::{Epoch, Rank};
use crate::roster::{Member, Secret};
use crate::wire::hello::{self, CHALLENGE, HELLO, LinkId, WELCOME};

/// Connections that may be proving themselves at one time. Each costs a few hundred bytes.
const HALF_OPEN: usize = 4096;
/// Socket buffers between ranks of one host. Bytes in flight are copied twice by the same processor: what does not fit its
/// cache in between comes from memory again. Measured on two cores, 4 ranks, 100 MB: 10 to 20 % less time than with the
/// kernel's own tuning, which lets megabytes pile up on each link.
const LOCAL_BUFFER: usize = 256 << 10;
/// Between two attempts to reach a rank that does not answer yet.
const RETRY: Duration = Duration::from_millis(20);

/// A listener that has its address before the roster is known.
#[derive(Debug)]
pub(crate) struct Bound {
    listener: TcpListener,
    address: SocketAddr,
}

impl Bound {
    /// Listens on a port of the system's choice.
    pub(crate) fn new(address: std::net::IpAddr) -> Result<Self> {
        let refused = |e: std::io::Error| {
            Error::Configuration(format!(
                "the data plane cannot listen on {address}: {e}; set process_group.tcp.bind or \
                 process_group.tcp.interface to an address of this host"
            ))
        };
        let listener = TcpListener::bind((address, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Accepts links for as long as it lives.
#[derive(Debug)]
pub(crate) struct DataPlane {
    epoch: Epoch,
    me: Rank,
    secret: Secret,
    handshake: Duration,
    socket_buffer: Option<usize>,
    cross_memory: bool,
    arrivals: Arc<Arrivals>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default, Debug)]
struct Arrivals {
    links: Mutex<HashMap<LinkId, Connection>>,
    arrived: Condvar,
}

/// A way to a peer.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    /// The peer's process, if its memory can be read from here.
    pub(crate) readable: Option<u32>,
}

/// How links are made.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) handshake: Duration,
    pub(crate) socket_buffer: Option<usize>,
    /// Let ranks of this host read this process's memory, and read theirs.
    pub(crate) cross_memory: bool,
}

impl DataPlane {
    pub(crate) fn start(
        bound: Bound,
        epoch: Epoch,
        me: Rank,
        secret: Secret,
        settings: &Settings,
    ) -> Result<Self> {
        let arrivals = Arc::new(Arrivals::default());
        let (stop, stopped) = oneshot::channel();
        let acceptor = Acceptor {
            epoch,
            me,
            secret: secret.clone(),
            handshake: settings.handshake,
            cross_memory: settings.cross_memory,
            arrivals: Arc::clone(&arrivals),
        };
        let failed = |e: std::io::Error| Error::Transport(format!("cannot start accepting links: {e}"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(failed)?;
        let thread = std::thread::Builder::new()
            .name("ryz-accept".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = acceptor.accept(bound.listener) => {}
                        _ = stopped => {}
                    }
                });
            })
            .map_err(failed)?;
        Ok(Self {
            epoch,
            me,
            secret,
            handshake: settings.handshake,
            socket_buffer: settings.socket_buffer,
            cross_memory: settings.cross_memory,
            arrivals,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Connects this rank with all other members of a group. All members call this; the higher global rank dials.
    ///
    /// Element `i` is the connection to member `i`, `None` for this rank.
    pub(crate) fn connect(
        &self,
        group: &str,
        members: &[&Member],
        deadline: Instant,
    ) -> Result<Vec<Option<Connection>>> {
        let started = Instant::now();
        let mut streams = Vec::with_capacity(members.len());
        let mut missing = Vec::new();
        let mut refusal = None;
        for member in members {
            let dial = member.rank < self.me;
            streams.push(if member.rank == self.me {
                None
            } else if dial {
                match self.dial(group, member, deadline) {
                    Ok(stream) => Some(stream),
                    Err(reason) => {
                        missing.push(member.rank);
                        refusal.get_or_insert(reason);
                        None
                    }
                }
            } else {
                None
            });
        }
        for (index, member) in members.iter().enumerate().filter(|(_, m)| m.rank > self.me) {
            let id = LinkId::new(self.epoch, group, member.rank, self.me);
            match self.await_link(&id, deadline) {
                Some(stream) => streams[index] = Some(stream),
                None => missing.push(member.rank),
            }
        }
        if missing.is_empty() {
            let my_host = members.iter().find(|m| m.rank == self.me).map(|m| &m.host);
            for (connection, member) in streams.iter().zip(members) {
                if let Some(Connection { stream, .. }) = connection {
                    self.tune(stream, my_host == Some(&member.host))?;
                }
            }
            return Ok(streams);
        }
        let why = refusal.map(|r| format!(" ({r})")).unwrap_or_default();
        Err(Error::Timeout {
            what: format!("connecting group `{group}`{why}"),
            waited: started.elapsed(),
            missing,
        })
    }

    fn tune(&self, stream: &TcpStream, same_host: bool) -> Result<()> {
        let tune = || {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            if let Some(bytes) = self.socket_buffer.or(same_host.then_some(LOCAL_BUFFER)) {
                let socket = socket2::SockRef::from(stream);
                socket.set_send_buffer_size(bytes)?;
                socket.set_recv_buffer_size(bytes)?;
            }
            Ok(())
        };
        tune().map_err(|e: std::io::Error| Error::Transport(format!("setting up a link: {e}")))
    }

    fn dial(&self, group: &str, member: &Member, deadline: Instant) -> Result<Connection, String> {
        let Some(address) = member.data_address else {
            return Err(format!("rank {} has no data plane", member.rank));
        };
        let id = LinkId::new(self.epoch, group, self.me, member.rank);
        let mut last = String::from("no time left");
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(last);
            }
            match TcpStream::connect_timeout(&address, left).and_then(|s| self.greet(s, &id, left)) {
                Ok(connection) => return Ok(connection),
                Err(e) => last = format!("rank {} at {address}: {e}", member.rank),
            }
            std::thread::sleep(RETRY.min(left));
        }
    }

    fn greet(&self, mut stream: TcpStream, id: &LinkId, left: Duration) -> std::io::Result<Connection> {
        let refused = |why: &str| std::io::Error::new(std::io::ErrorKind::PermissionDenied, why);
        let limit = Some(left.min(self.handshake).max(Duration::from_millis(1)));
        stream.set_read_timeout(limit)?;
        stream.set_write_timeout(limit)?;
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge)?;
        let accepting = hello::read_challenge(&challenge)
            .ok_or_else(|| refused("what answers there is no rank of this version"))?;
        // While the acceptor waits for the hello, its nonce is where it says.
        let readable = self.cross_memory.then(|| probe(&accepting)).flatten();
        let beacon = beacon(self.cross_memory);
        let dialling = beacon.end();
        stream.write_all(&hello::hello(&self.secret, &accepting, &dialling, id))?;
        let mut welcome = [0; WELCOME];
        stream.read_exact(&mut welcome).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => {
                refused("it refused this rank: another secret or another epoch")
            }
            _ => e,
        })?;
        if !hello::check_welcome(&self.secret, &accepting, &dialling, id, &welcome) {
            return Err(refused("it does not know the job's secret"));
        }
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok(Connection { stream, readable })
    }

    fn await_link(&self, id: &LinkId, deadline: Instant) -> Option<Connection> {
        let mut links = self.arrivals.links.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(connection) = links.remove(id) {
                return Some(connection);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            links = self.arrivals.arrived.wait_timeout(links, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn beacon(shown: bool) -> Beacon {
    Beacon::new(*Secret::random().expose(), shown)
}

struct Acceptor {
    epoch: Epoch,
    me: Rank,
    secret: Secret,
    handshake: Duration,
    cross_memory: bool,
    arrivals: Arc<Arrivals>,
}

impl Acceptor {
    async fn accept(self, listener: TcpListener) {
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
        stream.read_exact(&mut bytes).await.map_err(io)?;
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
        links.insert(id, Connection { stream, readable });
        self.arrivals.arrived.notify_all();
        Ok(())
    }
}
