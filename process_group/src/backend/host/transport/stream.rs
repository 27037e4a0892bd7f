//! Payloads stream through the links, behind their headers.

use std::convert::Infallible;

use super::{Outgoing, Sent, Transport};
use crate::backend::host::link::{Link, Moved};
use crate::mesh::Peer;
use crate::wire::frame::{HEADER, Header};

/// Below this, what is left of a payload comes from a socket through the link's buffer, together with what is behind it.
const DIRECT_READ: usize = 16 << 10;

/// The state of a stream is its link's.
#[derive(Debug)]
pub(in crate::backend::host) struct Stream;

impl Transport for Stream {
    type Error = Infallible;
    const IN_BAND: bool = true;
    const ZERO_COPY: bool = false;

    fn send(&mut self, _: Peer, link: &mut Link, message: &Outgoing<'_>) -> Sent {
        if !link.mid_frame && !link.flush_control() {
            return Sent::Full(0);
        }
        let header = message.header.encode();
        let begun = link.header_sent;
        let bytes = match link.send(&header[begun..], message.payload) {
            Moved::Bytes(bytes) => bytes,
            Moved::WouldBlock => return Sent::Full(0),
            Moved::Closed => return Sent::Closed,
        };
        let of_header = bytes.min(HEADER - begun);
        let of_payload = bytes - of_header;
        link.header_sent += of_header;
        link.mid_frame = link.header_sent < HEADER || of_payload < message.left;
        if !link.mid_frame {
            link.header_sent = 0;
            return Sent::Complete;
        }
        let all = bytes == HEADER - begun + message.payload.len();
        if all { Sent::Part(of_payload) } else { Sent::Full(of_payload) }
    }

    fn open(&mut self, _: Peer, _: &Header) {}

    fn receive(&mut self, _: Peer, link: &mut Link, _: usize, into: &mut [u8]) -> Result<Moved, Infallible> {
        if link.buffered().is_empty() && !into.is_empty() {
            if into.len() >= DIRECT_READ || link.is_shared() {
                return Ok(link.read_into(into));
            }
            match link.fill(into.len()) {
                Moved::Bytes(_) => {}
                nothing => return Ok(nothing),
            }
        }
        let taken = into.len().min(link.buffered().len());
        into[..taken].copy_from_slice(&link.buffered()[..taken]);
        link.consume(taken);
        Ok(Moved::Bytes(taken))
    }

    fn read_ahead(&mut self, _: Peer, link: &mut Link, wanted: usize) -> Moved {
        if link.buffered().len() < wanted { link.fill(wanted) } else { Moved::Bytes(0) }
    }

    fn stage(&mut self, _: Peer, link: &mut Link, _: usize, most: usize) -> Result<usize, Infallible> {
        Ok(most.min(link.buffered().len()))
    }

    fn staged<'a>(&'a self, _: Peer, link: &'a Link) -> &'a [u8] {
        link.buffered()
    }

    fn consume(&mut self, _: Peer, link: &mut Link, bytes: usize) {
        link.consume(bytes);
    }
}
