//! Links between the ranks of a group: one listener per process, and a mutual proof of the job's secret on every link.
//!
//! On CPUs the links carry the data of collectives; with GPUs they carry control messages.

mod accept;
#[cfg(test)]
mod attacks;
mod dial;
mod liveness;
mod peers;
mod prove;
mod unix;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::link::security::{Channel, Handshake, Protocol, Security};
use crate::membership::half_open::HalfOpen;
use crate::membership::roster::{Member, Secret};
use crate::types::rank::{Epoch, Rank};
use crate::types::runtime_thread::RuntimeThread;
use crate::types::sync::lock;
use accept::{Acceptor, Arrivals};
use dial::{Dialler, Unreached};
pub(crate) use liveness::{Liveness, Pulse};
pub(crate) use peers::{Peer, Peers};
use prove::{LinkId, Prover};

/// Size of the socket buffers between ranks of one host. The same processor copies bytes in and out: bytes that do not fit its
/// cache in between come from memory again.
const LOCAL_BUFFER: usize = 256 << 10;
/// Time between two attempts to reach a rank that does not answer yet.
const RETRY: Duration = Duration::from_millis(20);

/// A listener whose address is fixed before the roster is known.
#[derive(Debug)]
pub(crate) struct Bound {
    tcp: TcpListener,
    /// The listener for ranks of this host.
    unix: Option<UnixListener>,
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
        let tcp = TcpListener::bind((address, 0)).map_err(refused)?;
        tcp.set_nonblocking(true).map_err(refused)?;
        let address = tcp.local_addr().map_err(refused)?;
        let unix = unix::listen(address)
            .inspect_err(
                |error| tracing::debug!(%error, "no Unix socket: links to ranks of this host go through TCP"),
            )
            .ok();
        Ok(Self { tcp, unix, address })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// One rank's end of all meshes. Accepts links until it is dropped.
#[derive(Debug)]
pub(crate) struct Mesh {
    epoch: Epoch,
    me: Rank,
    dialler: Dialler,
    arrivals: Arc<Arrivals>,
    /// The thread that accepts and dials links.
    runtime: RuntimeThread,
}

/// The process of a member has ended.
struct Lost;

/// A group that could not be connected, and its connections so far.
#[derive(Debug)]
pub(crate) struct Unconnected {
    pub(crate) error: Error,
    pub(crate) connections: Vec<Option<Channel>>,
}

impl From<Box<Unconnected>> for Error {
    fn from(unconnected: Box<Unconnected>) -> Self {
        unconnected.error
    }
}

/// Settings for making links.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) handshake: Duration,
    /// Protection of the links.
    pub(crate) security: Security,
}

impl Mesh {
    pub(crate) fn start(
        bound: Bound,
        epoch: Epoch,
        me: Rank,
        secret: Secret,
        settings: &Settings,
    ) -> Result<Self> {
        let arrivals = Arc::new(Arrivals::default());
        let Settings { handshake: limit, security } = settings.clone();
        let handshake = Handshake { protocol: Protocol::Data, secret, security };
        let prover = Arc::new(Prover { handshake, limit });
        let acceptor = Acceptor { epoch, me, prover: Arc::clone(&prover), arrivals: Arc::clone(&arrivals) };
        let runtime =
            RuntimeThread::start("ryz-accept").map_err(Error::system("cannot start accepting links"))?;
        runtime.handle().spawn(acceptor.accept(bound, HalfOpen::default()));
        Ok(Self { epoch, me, dialler: Dialler(prover), arrivals, runtime })
    }

    /// Returns a check of whether the processes of other ranks respond.
    pub(crate) fn liveness(&self) -> Liveness {
        Liveness(self.runtime.handle().clone())
    }

    /// Connects this rank with all other members of a group. All members call this; the higher global rank dials.
    ///
    /// # Errors
    /// [`Error::PeerLost`] for a member whose process has ended, [`Error::Timeout`] naming the members that were not reached
    /// or did not dial, with the connections made so far.
    pub(crate) fn connect(
        &self,
        group: &str,
        members: &[&Member],
        deadline: Instant,
    ) -> Result<Peers<Channel>, Box<Unconnected>> {
        let started = Instant::now();
        let mut connections: Vec<Option<Channel>> = members.iter().map(|_| None).collect();
        let refusals = self.dial_all(group, members, deadline, &mut connections);
        if let Some(why) = refusals.values().find(|why| matches!(why, Unreached::Refused { .. })) {
            let error = Error::Configuration(format!("connecting group `{group}`: {why}"));
            return Err(Box::new(Unconnected { error, connections }));
        }
        let is_gone = |unreached: &Unreached| matches!(unreached, Unreached::Gone);
        let mut gone = refusals.iter().find(|(_, why)| is_gone(why)).map(|(index, _)| *index);
        for (index, member) in members.iter().enumerate().filter(|(_, m)| m.rank > self.me) {
            if gone.is_some() {
                break;
            }
            let id = LinkId::new(self.epoch, group, member.rank, self.me);
            match self.await_link(&id, member, deadline) {
                Ok(connection) => connections[index] = connection,
                Err(Lost) => gone = Some(index),
            }
        }
        if let Some(index) = gone {
            let member = members[index];
            let error = Error::PeerLost {
                rank: member.rank,
                host: member.host.clone(),
                pid: member.pid,
                during: format!("connecting group `{group}`"),
                detail: Unreached::Gone.to_string(),
            };
            return Err(Box::new(Unconnected { error, connections }));
        }
        let own =
            members.iter().position(|member| member.rank == self.me).expect("members connect their group");
        let connections = Peers::complete(own, connections).map_err(|connections| {
            let slots = members.iter().zip(&connections);
            let missing = slots.filter(|(member, slot)| slot.is_none() && member.rank != self.me);
            let missing = missing.map(|(member, _)| member.rank).collect();
            let why = refusals.into_values().next().map(|why| format!(" ({why})")).unwrap_or_default();
            let what = format!("connecting group `{group}`{why}");
            let error = Error::Timeout { what, waited: started.elapsed(), missing };
            Box::new(Unconnected { error, connections })
        })?;
        match self.tune_all(members, &connections) {
            Ok(()) => Ok(connections),
            Err(error) => Err(Box::new(Unconnected { error, connections: connections.into_slots() })),
        }
    }

    /// Dials all members that this rank has to dial, at the same time: an unreachable one delays no other. Returns by position the
    /// reasons why some were not reached.
    fn dial_all(
        &self,
        group: &str,
        members: &[&Member],
        deadline: Instant,
        connections: &mut [Option<Channel>],
    ) -> BTreeMap<usize, Unreached> {
        let mut refusals = BTreeMap::new();
        let (sender, dialled) = mpsc::channel();
        let my_host = self.host(members);
        for (index, member) in members.iter().enumerate().filter(|(_, m)| m.rank < self.me) {
            let Some(address) = member.data_address else {
                refusals.insert(index, Unreached::NoAddress(member.rank));
                continue;
            };
            let id = LinkId::new(self.epoch, group, self.me, member.rank);
            let (dialler, sender) = (self.dialler.clone(), sender.clone());
            let same_host = my_host == Some(&member.host);
            self.runtime.handle().spawn(async move {
                let _ = sender.send((index, dialler.dial(address, same_host, &id, deadline).await));
            });
        }
        drop(sender);
        for (index, outcome) in dialled {
            match outcome {
                Ok(connection) => connections[index] = Some(connection),
                Err(why) => drop(refusals.insert(index, why)),
            }
        }
        refusals
    }

    /// Sets the buffers of links within this host. The kernel tunes those between hosts.
    fn tune_all(&self, members: &[&Member], connections: &Peers<Channel>) -> Result<()> {
        let my_host = self.host(members);
        for (peer, connection) in connections.pairs() {
            if my_host == Some(&members[connections.rank(peer).index()].host) {
                let socket = socket2::SockRef::from(connection.socket());
                let tuned = socket.set_send_buffer_size(LOCAL_BUFFER);
                tuned
                    .and_then(|()| socket.set_recv_buffer_size(LOCAL_BUFFER))
                    .map_err(Error::system("cannot set up a link"))?;
            }
        }
        Ok(())
    }

    /// Returns the host of this rank, which is a member.
    fn host<'a>(&self, members: &[&'a Member]) -> Option<&'a String> {
        members.iter().find(|member| member.rank == self.me).map(|member| &member.host)
    }

    /// Waits for a member to dial, until the deadline, or until it is clear that it never will.
    fn await_link(&self, id: &LinkId, member: &Member, deadline: Instant) -> Result<Option<Channel>, Lost> {
        let gone = Arc::new(AtomicBool::new(false));
        let look = member.data_address.map(|address| {
            let (gone, arrivals) = (Arc::clone(&gone), Arc::clone(&self.arrivals));
            self.runtime.handle().spawn(async move {
                Dialler::until_gone(address).await;
                gone.store(true, Ordering::Release);
                let _links = lock(&arrivals.links);
                arrivals.arrived.notify_all();
            })
        });
        let is_gone = || gone.load(Ordering::Acquire);
        let Arrivals { links, arrived } = &*self.arrivals;
        let patience = deadline.saturating_duration_since(Instant::now());
        let connection = arrived
            .wait_timeout_while(lock(links), patience, |links| !links.contains_key(id) && !is_gone())
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .remove(id);
        if let Some(look) = look {
            look.abort();
        }
        if connection.is_none() && is_gone() { Err(Lost) } else { Ok(connection) }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::AddressFamily;
    use ryzanstein_config::{EncryptionChoice, SecurityConfig};

    use super::*;
    use crate::testing::{self, LATE};

    const HERE: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn member(rank: u32, address: SocketAddr) -> Member {
        Member { data_address: Some(address), ..testing::member(Rank(rank)) }
    }

    fn start(bound: Bound, rank: u32) -> Mesh {
        start_with(bound, rank, EncryptionChoice::Auto)
    }

    fn start_with(bound: Bound, rank: u32, encryption: EncryptionChoice) -> Mesh {
        let security = Security::new(&SecurityConfig { encryption }).unwrap();
        let settings = Settings { handshake: Duration::from_secs(20), security };
        Mesh::start(bound, Epoch(1), Rank(rank), Secret::new([7; 32]), &settings).unwrap()
    }

    #[test]
    fn only_the_rank_that_cannot_be_reached_is_named() {
        // Its kernel accepts connections, and no process ever sends a byte on them.
        let silent = TcpListener::bind((HERE, 0)).unwrap();
        let bound: Vec<Bound> = (1..3).map(|_| Bound::new(HERE).unwrap()).collect();
        let members = [
            member(0, silent.local_addr().unwrap()),
            member(1, bound[0].address()),
            member(2, bound[1].address()),
        ];
        let members: Vec<&Member> = members.iter().collect();
        let meshes: Vec<Mesh> = bound.into_iter().zip(1..).map(|(b, rank)| start(b, rank)).collect();
        let deadline = Instant::now() + Duration::from_secs(1);
        let Unconnected { error, connections } = *meshes[1].connect("g", &members, deadline).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(0)]), "{error}");
        assert!(error.to_string().contains("rank 0 at 127.0.0.1"), "{error}");
        assert!(connections[1].is_some());
    }

    #[test]
    fn ranks_of_one_host_meet_through_unix_sockets_and_others_through_tcp() {
        for (hosts, bare, family) in [
            (["here", "here"], false, AddressFamily::UNIX),
            (["here", "there"], false, AddressFamily::INET),
            // A listener whose name is taken, or that cannot have one.
            (["here", "here"], true, AddressFamily::INET),
        ] {
            let mut bound = [Bound::new(HERE).unwrap(), Bound::new(HERE).unwrap()];
            if bare {
                bound[0].unix = None;
            }
            let members = [0, 1].map(|rank| Member {
                host: hosts[rank].into(),
                ..member(rank as u32, bound[rank].address())
            });
            let meshes: Vec<Mesh> = bound.into_iter().zip(0..).map(|(b, rank)| start(b, rank)).collect();
            let deadline = Instant::now() + LATE;
            std::thread::scope(|scope| {
                for mesh in &meshes {
                    scope.spawn(|| {
                        let links = mesh.connect("g", &[&members[0], &members[1]], deadline).unwrap();
                        for (_, link) in links.pairs() {
                            let address = rustix::net::getsockname(link.socket()).unwrap();
                            assert_eq!(address.address_family(), family, "{hosts:?}, {bare}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn ranks_of_which_one_encrypts_do_not_wait_for_the_deadline_to_say_so() {
        let [accepting, dialling] = [EncryptionChoice::Off, EncryptionChoice::On];
        let bound = [Bound::new(HERE).unwrap(), Bound::new(HERE).unwrap()];
        let members = [member(0, bound[0].address()), member(1, bound[1].address())];
        let members: Vec<&Member> = members.iter().collect();
        let [first, second] = bound;
        let _accepts = start_with(first, 0, accepting);
        let dials = start_with(second, 1, dialling);
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = Error::from(dials.connect("g", &members, deadline).unwrap_err());
        assert!(matches!(error, Error::Configuration(_)), "{error}");
        let words = [
            "rank 0 at 127.0.0.1",
            "this end encrypts",
            "the other end does not encrypt",
            "security.encryption",
        ];
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
        assert!(Instant::now() < deadline);
    }

    #[test]
    fn a_rank_that_has_ended_is_lost_whoever_was_to_dial() {
        // Two of the three listeners have ended.
        let ended = [0, 2].map(|rank| member(rank, Bound::new(HERE).unwrap().address()));
        let bound = Bound::new(HERE).unwrap();
        let mine = member(1, bound.address());
        let mesh = start(bound, 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        for other in &ended {
            let error = Error::from(mesh.connect("g", &[other, &mine], deadline).unwrap_err());
            assert!(matches!(&error, Error::PeerLost { rank, .. } if *rank == other.rank), "{error}");
            assert!(error.to_string().contains("connecting group `g`"), "{error}");
        }
        assert!(Instant::now() < deadline, "it was not clear before the deadline");
    }
}
