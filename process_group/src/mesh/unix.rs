//! Unix sockets between ranks of one host: a message takes a fifth of the time that it takes through the network stack.
//!
//! A rank listens under an abstract name made of the address of its data plane. Such a name belongs to one network namespace, as the
//! address does, and goes with the process. Where nobody listens under it, ranks connect through TCP.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::UnixStream;

fn name(address: SocketAddr) -> String {
    format!("ryzanstein/{address}")
}

/// Listens next to the data plane at this address.
pub(super) fn listen(address: SocketAddr) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name(address))?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects with the process whose data plane is at this address. `None` where it has no Unix socket here, or where a process of
/// another user has taken the name.
///
/// # Errors
/// `EAGAIN` while more connections wait to be accepted than the system allows.
pub(super) fn dial(address: SocketAddr) -> io::Result<Option<UnixStream>> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new_abstract_name(name(address).as_bytes())?) {
        Ok(()) => {}
        Err(rustix::io::Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let stream = UnixStream::from_std(std::os::unix::net::UnixStream::from(socket))?;
    let is_mine = stream.peer_cred()?.uid() == rustix::process::geteuid().as_raw();
    Ok(is_mine.then_some(stream))
}
