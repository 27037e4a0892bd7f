//! A connection of a thread that never blocks on it: in clear, or sealed by TLS.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;

use super::sealed::Sealed;
use super::secured::{Kind, Secured};
use super::socket::{Connecting, Socket};

/// A connection with non-blocking reads and writes. In clear, both use the socket directly.
///
/// A sealed one buffers bytes in both directions: [`has_unread`](Self::has_unread) shows bytes that a poll of the socket does not,
/// and [`flush`](Self::flush) sends bytes that a full socket has not accepted.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: Socket,
    sealed: Option<Box<Sealed>>,
}

impl Channel {
    /// Wraps a connection whose ends have proved themselves.
    pub(crate) fn new<S: Connecting>(secured: Secured<S>) -> io::Result<Self> {
        Ok(match secured.kind {
            Kind::Clear(stream) => Self { socket: stream.into_socket()?, sealed: None },
            Kind::Tls(stream) => {
                let (stream, sealed) = Sealed::take(*stream);
                Self { socket: stream.into_socket()?, sealed: Some(Box::new(sealed)) }
            }
        })
    }

    /// Wraps a connected socket in clear.
    pub(crate) fn clear(stream: impl Into<OwnedFd>) -> io::Result<Self> {
        Ok(Self { socket: Socket::new(stream)?, sealed: None })
    }

    /// Returns the socket, to poll and to tune.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Returns true if bytes that were read from the socket are still buffered.
    pub(crate) fn has_unread(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.has_unread())
    }

    /// Returns true if sent bytes have not reached the socket.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sealed.as_ref().is_some_and(|sealed| sealed.has_unsent())
    }

    /// Reads the available bytes. Returns 0 when the other end has closed.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.sealed {
            None => self.socket.read(into),
            Some(sealed) => sealed.read(&self.socket, into),
        }
    }

    /// Reads the available bytes, the first piece first.
    pub(crate) fn read_pair(&mut self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        match &mut self.sealed {
            None => self.socket.read_pair(first, second),
            Some(sealed) => sealed.read_pair(&self.socket, first, second),
        }
    }

    /// Sends two pieces in order, as far as the socket accepts them now.
    pub(crate) fn send(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        match &mut self.sealed {
            // Most messages are without a payload, and this system call is shorter.
            None if second.is_empty() => self.socket.send(first),
            None => self.socket.send_pieces(&[IoSlice::new(first), IoSlice::new(second)]),
            Some(sealed) => sealed.send(&self.socket, first, second),
        }
    }

    /// Passes on sent bytes that have not reached the socket. Returns `false` while some are left.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        self.sealed.as_mut().map_or(Ok(true), |sealed| sealed.flush(&self.socket))
    }

    /// Closes the connection in one direction or both.
    pub(crate) fn shutdown(&self, how: Shutdown) {
        self.socket.shutdown(how);
    }

    /// Returns true if the other end sends no more bytes.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}
