//! Messages of this call: the next message of a peer, and the destination of its bytes.

use super::Run;
use crate::cpu::compiled::{Receive, Target};
use crate::cpu::link::Moved;
use crate::error::Result;
use crate::link::mesh::Peer;
use crate::link::wire::frame::Header;
use crate::schedule::program::Region;
use crate::types::operation::Operation;

/// Minimum length of a payload that a socket delivers together with its header directly to its destination. A shorter one comes
/// with the bytes that are read ahead, and is copied.
const SCATTERED_FROM: usize = 4 << 10;

impl Run<'_> {
    pub(super) fn pull(&mut self, peer: Peer) -> Result<bool> {
        let compiled = self.compiled;
        let mut moved = false;
        while let Some(next) = compiled.receives[peer].get(self.progress.peers[peer].received) {
            if !self.progress.peers[peer].open {
                if self.take_unexpected(peer, next)? {
                    moved = true;
                    continue;
                }
                let is_open = match self.open_expected(peer, next) {
                    Some(Moved::Bytes(_)) => true,
                    Some(Moved::WouldBlock | Moved::Closed) => break,
                    None => self.open(peer, next.node)?,
                };
                if !is_open {
                    // During the search for a header, the rest of an early message may have been read.
                    if self.take_unexpected(peer, next)? {
                        moved = true;
                        continue;
                    }
                    break;
                }
                moved = true;
            }
            let more = match next.into {
                Target::Region(region) => self.receive(peer, next.node, region)?,
                Target::Reduction(index) => self.reduce(peer, &compiled.reductions[index])?,
            };
            moved |= more;
            if !more {
                break;
            }
        }
        Ok(moved)
    }

    /// Reads the header of the expected message and the available part of its payload with one system call. Returns `None` if
    /// another message comes first, if the payload is short, or if hazards do not allow enough of it to be written yet.
    fn open_expected(&mut self, peer: Peer, next: &Receive) -> Option<Moved> {
        let Receive { node, into: Target::Region(region) } = *next else { return None };
        let (allowed, length) = (self.allowed(node), self.length(node));
        if allowed < SCATTERED_FROM
            || self.links[peer].is_shared()
            || self.fingerprint.operation.is_point_to_point()
        {
            return None;
        }
        let expected = Header { rank: self.name(peer), ..self.header(length) };
        let link = &mut self.links[peer];
        let target = self.spaces.write(region, self.fingerprint.dtype.size(), 0, allowed);
        let moved = link.read_message(&expected.encode(), target)?;
        if let Moved::Bytes(bytes) = moved {
            link.seen = link.seen.max(Some(self.sequence));
            self.progress.done[node] = bytes;
            self.progress.peers[peer].open = true;
        }
        Some(moved)
    }

    /// Reads the header of the next expected message, and checks that it is the expected one.
    fn open(&mut self, peer: Peer, node: usize) -> Result<bool> {
        let Some(header) = self.next_header(peer)? else { return Ok(false) };
        let is_message = self.fingerprint.operation.is_point_to_point();
        let link = &mut self.links[peer];
        if is_message && !link.unexpected.is_empty() {
            return Ok(false);
        }
        let from_peer = matches!(header.fingerprint.operation, Operation::Send { .. });
        if from_peer && !is_message {
            // A message that a later call will receive comes before the one that this call needs.
            link.header = None;
            if !link.begin_unexpected(header) {
                link.header = Some(header);
                return Ok(false);
            }
            link.continue_unexpected();
            return Ok(false);
        }
        if !is_message && header.sequence > self.sequence {
            return Err(self.error_of_peer_ahead(peer, &header));
        }
        self.check(peer, &header)?;
        self.check_length(peer, &header, node)?;
        self.links[peer].header = None;
        self.progress.peers[peer].open = true;
        Ok(true)
    }

    fn check_length(&self, peer: Peer, header: &Header, node: usize) -> Result<()> {
        let (sent, expected) = (header.length, self.length(node));
        if sent == expected {
            return Ok(());
        }
        Err(self.corrupt(peer, &format!("a payload of {sent} bytes instead of {expected}")))
    }

    /// Completes a receive from a message that arrived early.
    fn take_unexpected(&mut self, peer: Peer, next: &Receive) -> Result<bool> {
        let Receive { node, into: Target::Region(region) } = *next else { return Ok(false) };
        let link = &mut self.links[peer];
        if !self.fingerprint.operation.is_point_to_point() || !link.continue_unexpected() {
            return Ok(false);
        }
        let Some(message) = link.unexpected.pop_front() else { return Ok(false) };
        self.check(peer, &message.header)?;
        self.check_length(peer, &message.header, node)?;
        let size = self.size();
        self.spaces.write(region, size, 0, message.bytes.len()).copy_from_slice(&message.bytes);
        self.progress.done[node] = message.bytes.len();
        self.progress.peers[peer].received += 1;
        self.finish();
        Ok(true)
    }

    fn receive(&mut self, peer: Peer, node: usize, region: Region) -> Result<bool> {
        let (done, allowed, size) = (self.progress.done[node], self.allowed(node), self.size());
        let target = self.spaces.write(region, size, done, allowed);
        let bytes = match self.links[peer].receive(target) {
            Moved::Bytes(bytes) => bytes,
            Moved::WouldBlock => return Ok(false),
            Moved::Closed => return Err(self.lost(peer)),
        };
        self.progress.done[node] = done + bytes;
        if done + bytes == self.length(node) {
            self.close_message(peer);
            self.finish();
            return Ok(true);
        }
        Ok(bytes > 0)
    }

    /// Ends a message that has been received completely.
    pub(super) fn close_message(&mut self, peer: Peer) {
        let progress = &mut self.progress.peers[peer];
        progress.open = false;
        progress.received += 1;
    }
}
