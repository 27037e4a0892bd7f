//! A connection with the required protection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

/// A secret that only the two ends of an encrypted connection know: the keying material that RFC 9266 exports. Zeros in clear.
pub(super) type Binding = [u8; 32];

/// A protected connection.
#[derive(Debug)]
pub struct Secured<S> {
    pub(super) kind: Kind<S>,
    binding: Binding,
}

#[derive(Debug)]
pub(super) enum Kind<S> {
    Clear(S),
    Tls(Box<TlsStream<S>>),
}

impl<S> Secured<S> {
    pub(super) fn clear(stream: S) -> Self {
        Self { kind: Kind::Clear(stream), binding: [0; 32] }
    }

    pub(super) fn tls(stream: TlsStream<S>, binding: Binding) -> Self {
        Self { kind: Kind::Tls(Box::new(stream)), binding }
    }

    /// Returns the binding, which a proof of the secret must include, so that it is valid for this connection only.
    pub(super) fn binding(&self) -> &Binding {
        &self.binding
    }

    /// Returns the connection beneath.
    pub fn get_ref(&self) -> &S {
        match &self.kind {
            Kind::Clear(stream) => stream,
            Kind::Tls(stream) => stream.get_ref().0,
        }
    }
}

/// Calls a method of the actual stream.
macro_rules! delegate {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().kind {
            Kind::Clear(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Kind::Tls(stream) => {
                let $stream = Pin::new(&mut **stream);
                $call
            }
        }
    };
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Secured<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_read(cx, buf))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Secured<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        delegate!(self, stream => stream.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, stream => stream.poll_shutdown(cx))
    }
}
