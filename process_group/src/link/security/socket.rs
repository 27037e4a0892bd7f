//! A connected stream socket, TCP or Unix.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use tokio::io::{AsyncRead, AsyncWrite};

/// A socket of a thread that never blocks on it.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    /// Takes a connected socket. Its calls never block from now on.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub(super) fn new(stream: impl Into<OwnedFd>) -> io::Result<Self> {
        let socket = stream.into();
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self(socket))
    }

    /// Reads the available bytes. Returns 0 when the other end has closed.
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(&self.0, into, RecvFlags::empty())?.0)
    }

    /// Reads the available bytes, the first piece first.
    pub(super) fn read_pair(&self, first: &mut [u8], second: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::readv(&self.0, &mut [IoSliceMut::new(first), IoSliceMut::new(second)])?)
    }

    /// Sends as many bytes as the socket accepts. A lost peer raises no signal: the error reports it.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    /// Sends several pieces in order, in the same way.
    pub(super) fn send_pieces(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut nothing = SendAncillaryBuffer::default();
        Ok(rustix::net::sendmsg(&self.0, slices, &mut nothing, SendFlags::NOSIGNAL)?)
    }

    /// Closes the connection in one direction or both.
    pub(super) fn shutdown(&self, how: Shutdown) {
        // A connection that has ended need not be closed.
        let _ = rustix::net::shutdown(&self.0, how);
    }
}

/// A connection of the runtime, until its ends have proved themselves.
pub(crate) trait Connecting: AsyncRead + AsyncWrite + Unpin {
    /// Takes it from the runtime.
    fn into_socket(self) -> io::Result<Socket>;
}

impl Connecting for tokio::net::TcpStream {
    fn into_socket(self) -> io::Result<Socket> {
        Socket::new(self.into_std()?)
    }
}

impl Connecting for tokio::net::UnixStream {
    fn into_socket(self) -> io::Result<Socket> {
        Socket::new(self.into_std()?)
    }
}
