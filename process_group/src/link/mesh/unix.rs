//! Unix sockets between ranks of one host: a message takes a fifth of its time through the network stack.
//!
//! A rank listens under an abstract name that contains the address of its data plane. Such a name belongs to one network namespace,
//! like the address, and disappears with the process. If no process listens under it, ranks connect through TCP.

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

/// Connects with the process whose data plane is at this address. Returns `None` if that is impossible here, or if another user
/// than `user` listens under the name.
///
/// # Errors
/// `EAGAIN` while more connections wait to be accepted than the system allows.
pub(super) fn dial(address: SocketAddr, user: Uid) -> io::Result<Option<UnixStream>> {
    let socket = match connected(address) {
        Ok(socket) => socket,
        Err(Errno::AGAIN) => return Err(Errno::AGAIN.into()),
        Err(error) => {
            tracing::debug!(%address, %error, "no Unix socket leads there: the link goes through TCP");
            return Ok(None);
        }
    };
    let stream = UnixStream::from_std(socket.into())?;
    let is_theirs = stream.peer_cred()?.uid() != user.as_raw();
    Ok((!is_theirs).then_some(stream))
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
        assert!(dial(address, mine).unwrap().is_none());
        let listener = listen(address).unwrap();
        assert!(dial(address, mine).unwrap().is_some());
        assert!(dial(address, others).unwrap().is_none());
        assert_eq!(listen(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(dial(address, mine).unwrap().is_none());
    }
}
