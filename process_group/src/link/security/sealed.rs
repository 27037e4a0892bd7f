//! TLS on a non-blocking socket.
//!
//! Bytes that were accepted for sending are encrypted at once. If the socket does not accept all of them, the rest waits here, and
//! no more are accepted until the rest has been sent. No alert ends a connection in good order: frames have lengths, and an
//! explicit goodbye, so a premature end is noticed.

use std::io::{self, IoSlice, Read, Write};

use rustls::Connection;
use tokio_rustls::TlsStream;

use super::socket::Socket;

/// Number of encrypted bytes that one read takes from the socket.
const READ: usize = 128 << 10;

#[derive(Debug)]
pub(super) struct Sealed {
    connection: Connection,
    /// Encrypted bytes that have been read but not decrypted: those from `start` to `end`.
    incoming: Box<[u8]>,
    start: usize,
    end: usize,
    /// Number of decrypted bytes that have not been read.
    plain: usize,
}

impl Sealed {
    /// Takes over a connection after its handshake.
    pub(super) fn take<S>(stream: TlsStream<S>) -> (S, Self) {
        let (stream, connection) = match stream {
            TlsStream::Client(stream) => {
                let (stream, connection) = stream.into_inner();
                (stream, Connection::Client(connection))
            }
            TlsStream::Server(stream) => {
                let (stream, connection) = stream.into_inner();
                (stream, Connection::Server(connection))
            }
        };
        let incoming = vec![0; READ].into_boxed_slice();
        let mut sealed = Self { connection, incoming, start: 0, end: 0, plain: 0 };
        // The bytes after the handshake. An error comes again with the first read.
        sealed.plain =
            sealed.connection.process_new_packets().map_or(0, |state| state.plaintext_bytes_to_read());
        (stream, sealed)
    }

    pub(super) fn has_unread(&self) -> bool {
        self.plain > 0 || self.start < self.end
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    pub(super) fn read(&mut self, socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
        while self.plain == 0 {
            if self.start == self.end {
                self.end = socket.read(&mut self.incoming)?;
                self.start = 0;
                if self.end == 0 {
                    return Ok(0);
                }
            }
            if !self.decrypt(socket)? {
                return Ok(0);
            }
        }
        let read = self.connection.reader().read(into)?;
        self.plain -= read;
        Ok(read)
    }

    pub(super) fn read_pair(
        &mut self,
        socket: &Socket,
        first: &mut [u8],
        second: &mut [u8],
    ) -> io::Result<usize> {
        let mut read = self.read(socket, first)?;
        // Decrypted bytes come first: a record may contain the end of a payload and the next header.
        while self.plain > 0 {
            let rest =
                if read < first.len() { &mut first[read..] } else { &mut second[read - first.len()..] };
            if rest.is_empty() {
                break;
            }
            read += self.read(socket, rest)?;
        }
        Ok(read)
    }

    /// Decrypts some of the read bytes. Returns `false` when the other end has ended the connection.
    fn decrypt(&mut self, socket: &Socket) -> io::Result<bool> {
        let mut rest = &self.incoming[self.start..self.end];
        let taken = self.connection.read_tls(&mut rest)?;
        self.start = self.end - rest.len();
        let state = self.connection.process_new_packets().map_err(|error| {
            // Tells the other end, if the socket accepts it.
            let _ = self.connection.write_tls(&mut Writer(socket));
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("received data that does not decrypt: {error}"),
            )
        })?;
        self.plain = state.plaintext_bytes_to_read();
        Ok(taken > 0 && (self.plain > 0 || !state.peer_has_closed()))
    }

    pub(super) fn send(&mut self, socket: &Socket, first: &[u8], second: &[u8]) -> io::Result<usize> {
        if !self.flush(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let (mut sent, all) = (0, first.len() + second.len());
        while sent < all {
            // Both together, so that a header shares a record with its payload.
            let of_first = sent.min(first.len());
            let rest = [IoSlice::new(&first[of_first..]), IoSlice::new(&second[sent - of_first..])];
            sent += self.connection.writer().write_vectored(&rest)?;
            if !self.flush(socket)? {
                break;
            }
        }
        Ok(sent)
    }

    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Writer(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// A socket as a writer for rustls.
struct Writer<'a>(&'a Socket);

impl Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send_pieces(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
