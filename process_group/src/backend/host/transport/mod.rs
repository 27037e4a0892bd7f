//! How the bytes of a message get from one rank to another.
//!
//! Headers always travel on the links, and the executor reads and compares them. A transport moves the payloads. It sees
//! messages, not programs. A new transport is a new file or folder here, a [`Path`] that takes it, and in the backend
//! (`backend/host/mod.rs`) a field that holds it, what the ranks must agree on first, and the dispatch of its path.

mod cross_memory;
mod stream;
#[cfg(test)]
mod tests;

pub(super) use cross_memory::CrossMemory;
pub(super) use stream::Stream;

use super::link::{Link, Moved};
use std::time::Duration;

use crate::mesh::Peer;
use crate::wire::frame::Header;

/// The part of a message that its sender can send now.
pub(super) struct Outgoing<'a> {
    /// The header for a payload in band; a transport that moves payloads elsewhere changes its kind.
    pub(super) header: Header,
    /// What may go now, from where the last piece ended.
    pub(super) payload: &'a [u8],
    /// Bytes of the payload from there on, those that may not go yet included.
    pub(super) left: usize,
}

/// What became of an attempt to send.
pub(super) enum Sent {
    /// The message has left: its memory may be written again.
    Complete,
    /// The peer has been told where the message is, and acknowledges it when it has read it.
    Announced,
    /// So many bytes of the payload have left, and more may follow at once.
    Part(usize),
    /// So many have left, and the link takes no more just now.
    Full(usize),
    /// The link has ended.
    Closed,
}

/// How payloads move. One call at a time; `peer` and `link` always belong together.
pub(super) trait Transport {
    /// Why a payload that was announced cannot be read.
    type Error: std::error::Error;

    /// Whether payloads follow their headers on the link. The executor may then read the beginning of a payload with its header.
    /// Otherwise the transport queues a [`Kind::ReadyToSend`] header for each message, and the executor sends all queued control frames
    /// before the call returns.
    const IN_BAND: bool;

    /// Whether a payload stays in its sender's memory until its receiver has read it there. A message is then announced once
    /// all of it is final, and its send is complete when the receiver has acknowledged it.
    const ZERO_COPY: bool;

    /// How long a rank may sleep without looking, where payloads can come or leave without any bytes on the link.
    const NAP: Option<Duration> = None;

    /// Sends more of a message.
    fn send(&mut self, peer: Peer, link: &mut Link, message: &Outgoing<'_>) -> Sent;

    /// The message that comes next from `peer` is the one with this header.
    fn open(&mut self, peer: Peer, header: &Header);

    /// Reads bytes of the open message, from `done` on, to where they belong. `into` may be shorter than what is left.
    ///
    /// # Errors
    /// When the payload has become unreachable.
    fn receive(
        &mut self,
        peer: Peer,
        link: &mut Link,
        done: usize,
        into: &mut [u8],
    ) -> Result<Moved, Self::Error>;

    /// Takes in up to `wanted` bytes of the open message that are to be reduced, while other operands may still be missing.
    fn read_ahead(&mut self, peer: Peer, link: &mut Link, wanted: usize) -> Moved;

    /// Makes up to `most` bytes of the open message, from `done` on, [`staged`](Self::staged). Says how many are.
    ///
    /// # Errors
    /// When the payload has become unreachable.
    fn stage(&mut self, peer: Peer, link: &mut Link, done: usize, most: usize) -> Result<usize, Self::Error>;

    /// Bytes that can be reduced.
    fn staged<'a>(&'a self, peer: Peer, link: &'a Link) -> &'a [u8];

    /// So many staged bytes have been reduced.
    fn consume(&mut self, peer: Peer, link: &mut Link, bytes: usize);
}
