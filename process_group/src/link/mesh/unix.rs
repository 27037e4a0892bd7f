//! Unix sockets between ranks of one host: messages bypass the TCP/IP stack.
//!
//! A rank listens under an abstract name that contains the address of its data plane. Such a name belongs to one network namespace,
//! like the address, and disappears with the process. Any user of the host may take it first, or fill its backlog: if it leads
//! to no process of this user at once, ranks connect through TCP.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Uid;
use tokio::net::UnixStream;

fn name(address: SocketAddr) -> String {
    format!("ryzanstein/{address}")
}

/// Listens under the name for the data plane at this address.
pub(super) fn listen(address: SocketAddr) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name(address))?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects with the process whose data plane is at this address. Returns `None` if that is impossible here and now, or if
/// another user than `user` listens under the name.
pub(super) fn dial(address: SocketAddr, user: Uid) -> Option<UnixStream> {
    let connected = || {
        let stream = UnixStream::from_std(connected(address)?.into())?;
        let owner = stream.peer_cred()?.uid();
        if owner != user.as_raw() {
            tracing::warn!(%address, owner, "another user listens under the name of a rank's Unix socket: the link goes through TCP");
            return Ok(None);
        }
        Ok::<_, io::Error>(Some(stream))
    };
    connected().unwrap_or_else(|error| {
        tracing::debug!(%address, %error, "no Unix socket leads there: the link goes through TCP");
        None
    })
}

fn connected(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name(address).as_bytes())?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rustix::process::geteuid;

    use super::*;

    #[tokio::test]
    async fn a_name_that_nobody_or_another_user_has_leads_nowhere() {
        // The test keeps the port: no other process takes its name.
        let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = port.local_addr().unwrap();
        let (mine, others) = (geteuid(), Uid::from_raw(geteuid().as_raw() + 1));
        assert!(dial(address, mine).is_none());
        let listener = listen(address).unwrap();
        assert!(dial(address, mine).is_some());
        assert!(dial(address, others).is_none());
        assert_eq!(listen(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(dial(address, mine).is_none());
    }

    #[tokio::test]
    async fn a_name_whose_backlog_is_full_leads_nowhere() {
        let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = port.local_addr().unwrap();
        let listener = listen(address).unwrap();
        // Nobody accepts.
        rustix::net::listen(&listener, 0).unwrap();
        let waiting = connected(address).unwrap();
        assert_eq!(connected(address).unwrap_err(), Errno::AGAIN);
        assert!(dial(address, geteuid()).is_none());
        drop(waiting);
    }
}
