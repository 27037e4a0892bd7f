//! Binds the address that the user named, never a wider one, and explains failures.

use std::io;
use std::net::{SocketAddr, TcpListener};

use ryzanstein_config::HostPort;
use socket2::{Domain, Protocol, Socket, Type};

/// Length of the accept queue: all ranks of a job connect at once.
const BACKLOG: i32 = 4096;

/// Binds and listens.
///
/// # Errors
/// Returns the operating system's error; see [`explain`].
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Allows a port in TIME_WAIT from a job that just ended, but not one that another process listens on.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Explains why an address could not be bound, with a remedy. `setting` is the place where the user set it.
pub fn explain(server: &HostPort, error: &io::Error, setting: &str) -> String {
    let port = server.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot serve the rendezvous at {server}: the port is taken by another process, which `ss -ltnp 'sport = \
             :{port}'` names; end that process, or give another port with {setting}"
        ),
        io::ErrorKind::AddrNotAvailable => format!(
            "cannot serve the rendezvous at {server}: this host does not have that address (`ip address` lists \
             those it has); the first node serves the rendezvous, so start it there or correct {setting}"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "cannot serve the rendezvous at {server}: this user may not listen on port {port}; give one above 1023 with \
             {setting}"
        ),
        _ => format!("cannot serve the rendezvous at {server} ({setting}): {error}"),
    }
}
