//! Hosts the rendezvous of a job: the launcher of the first node serves it, the others point their ranks to it.

use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ryzanstein_config::HostPort;
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::{Epoch, Secret};
use socket2::{Domain, Socket, Type};

use super::job::{Job, LaunchError};
use crate::rendezvous::{Server, listen, secret};

/// The rendezvous in the launcher of one node.
pub(super) struct RendezvousHost {
    /// The server; `None` on nodes other than the first.
    pub(super) server: Option<Server>,
    /// The address that ranks are given.
    pub(super) address: HostPort,
    /// Descriptor of the secret that ranks inherit.
    pub(super) secret: Arc<OwnedFd>,
    /// The same secret, for the launcher itself.
    pub(super) key: Secret,
    /// Value of `MASTER_PORT`, for programs that know only torchrun's variables.
    pub(super) master_port: u16,
    _reserved: Option<Socket>,
}

impl RendezvousHost {
    pub(super) fn new(job: &Job) -> Result<Self, LaunchError> {
        let config = &job.config;
        let nodes = config.launch.nnodes.get();
        let named = config.rendezvous.address.clone();
        let several = |what: &str| {
            LaunchError::Configuration(format!("a job of {nodes} nodes needs {what}, the same on every node"))
        };
        if nodes > 1 {
            if named.as_ref().is_none_or(|address| address.port() == 0) {
                return Err(several(
                    "--rendezvous HOST:PORT, an address of the first node with a port that is free there",
                ));
            }
            if job.secret_file.is_none() {
                return Err(several(
                    "RYZ_SECRET_FILE: a file with mode 0600 that holds 32 random bytes, made with (umask 077; head -c 32 \
                     /dev/urandom > FILE)",
                ));
            }
            if config.launch.max_restarts > 0 {
                return Err(LaunchError::Configuration(
                    "launchers do not restart a job on several nodes; omit --max-restarts, and let the program that \
                     starts the launchers (such as srun) restart them"
                        .into(),
                ));
            }
        }
        let key = match &job.secret_file {
            Some(path) => secret::from_file(path).map_err(LaunchError::Configuration)?,
            None => Secret::random(),
        };
        let inherited = secret::to_descriptor(&key).map_err(LaunchError::system("cannot keep the secret"))?;

        if config.launch.node_rank > 0 {
            let address = named.unwrap_or_else(|| unreachable!("checked above"));
            let master_port = next_to(address.port());
            return Ok(Self {
                server: None,
                address,
                secret: Arc::new(inherited),
                key,
                master_port,
                _reserved: None,
            });
        }
        let (server, address) = serve(job, named, key.clone())?;
        let (master_port, reserved) = if nodes > 1 { (next_to(address.port()), None) } else { reserve()? };
        Ok(Self {
            server: Some(server),
            address,
            secret: Arc::new(inherited),
            key,
            master_port,
            _reserved: reserved,
        })
    }
}

/// Returns the port that every node can derive from that of the rendezvous, for programs that listen themselves.
const fn next_to(port: u16) -> u16 {
    if port == u16::MAX { port - 1 } else { port + 1 }
}

/// Binds once, and serves on the bound listener.
fn serve(job: &Job, named: Option<HostPort>, key: Secret) -> Result<(Server, HostPort), LaunchError> {
    let config = &job.config.rendezvous;
    let loopback = HostPort::new("127.0.0.1", 0).unwrap_or_else(|error| unreachable!("{error}"));
    let named = named.unwrap_or(loopback);
    let mut bind: SocketAddr = (named.host(), named.port())
        .to_socket_addrs()
        .map_err(|error| {
            LaunchError::Configuration(format!("--rendezvous: `{}` has no address: {error}", named.host()))
        })?
        .next()
        .ok_or_else(|| {
            LaunchError::Configuration(format!("--rendezvous: `{}` has no address", named.host()))
        })?;
    if let Some(ip) = config.bind {
        bind.set_ip(ip);
    }
    let listener = listen::bind(bind).map_err(|source| LaunchError::Listen {
        message: listen::explain(&named, &source, "--rendezvous"),
        source,
    })?;
    let port = listener.local_addr().map_err(LaunchError::system("the rendezvous"))?.port();
    let address = HostPort::new(named.host(), port)
        .map_err(|error| LaunchError::Configuration(format!("--rendezvous: {error}")))?;
    let security =
        Security::new(&job.config.security).map_err(|error| LaunchError::Configuration(error.to_string()))?;
    let server = Server::start(listener, key, security, job.world_size()?, Epoch(1), config)
        .map_err(LaunchError::system("cannot serve the rendezvous"))?;
    Ok((server, address))
}

/// Reserves a port for programs that listen at MASTER_PORT themselves. The socket keeps the kernel from giving the port to
/// others, but does not listen, so that a program which sets SO_REUSEADDR, as all such do, can bind it.
fn reserve() -> Result<(u16, Option<Socket>), LaunchError> {
    let held = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
        Ok((port, Some(socket)))
    };
    held().map_err(LaunchError::system::<std::io::Error>("no port for MASTER_PORT"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_port_has_a_neighbour_too() {
        assert_eq!((next_to(29500), next_to(u16::MAX)), (29501, 65534));
    }
}
