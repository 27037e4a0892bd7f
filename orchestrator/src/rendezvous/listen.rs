//! Binds the address that was named, never a wider one, and explains it when that fails.

use std::io;
use std::net::{SocketAddr, TcpListener};

use ryzanstein_config::HostPort;
use socket2::{Domain, Protocol, Socket, Type};

/// Connections that the operating system holds until they are accepted: a whole job comes at once.
const BACKLOG: i32 = 4096;

/// Binds and listens.
///
/// # Errors
/// What the operating system says; see [`explain`].
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A port left by a job that just ended may be taken at once. One that is being listened on may not.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Why an address could not be bound, whom to ask, and what to do. `setting` is where the user said it.
pub fn explain(server: &HostPort, error: &io::Error, setting: &str) -> String {
    let port = server.port();
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot serve the rendezvous at {server}: the port is taken by another process, which `ss -ltnp 'sport = \
             :{port}'` names; end that process, or give another port with {setting}"
        ),
        io::ErrorKind::AddrNotAvailable => format!(
            "cannot serve the rendezvous at {server}: that address is not one of this host's, which `ip address` \
             lists; the first node is the one to serve, so start it there or correct {setting}"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "cannot serve the rendezvous at {server}: this user may not listen on port {port}; give one above 1023 with \
             {setting}"
        ),
        _ => format!("cannot serve the rendezvous at {server} ({setting}): {error}"),
    }
}
