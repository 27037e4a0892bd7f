//! The one system call that sends.

use std::io::{self, IoSlice};
use std::net::TcpStream;

use rustix::net::{SendAncillaryBuffer, SendFlags};

/// Sends without blocking, and without a signal when the peer has gone: the error says it.
pub(super) fn send(stream: &TcpStream, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(stream, slices, &mut SendAncillaryBuffer::default(), flags)?)
}
