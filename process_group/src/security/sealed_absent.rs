//! No connection is sealed in a build without TLS.

use std::convert::Infallible;
use std::io;

use super::socket::Socket;

/// There is none.
#[derive(Debug)]
pub(super) struct Sealed(Infallible);

impl Sealed {
    pub(super) fn has_unread(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn has_unsent(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn read(&mut self, _: &Socket, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn read_pair(&mut self, _: &Socket, _: &mut [u8], _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn send(&mut self, _: &Socket, _: &[u8], _: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(super) fn flush(&mut self, _: &Socket) -> io::Result<bool> {
        match self.0 {}
    }
}
