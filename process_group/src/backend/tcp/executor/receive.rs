//! Messages of this call: which is next on a link, and where its bytes go.

use super::Run;
use crate::backend::tcp::link::Moved;
use crate::error::Result;
use crate::operation::Operation;
use crate::schedule::program::{Node, Region};

/// Below this, a payload goes through the read-ahead buffer, which saves a system call for its header.
const DIRECT_READ: usize = 16 << 10;

impl Run<'_> {
    pub(super) fn pull(&mut self, peer: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(&node) = self.compiled.receives[peer].get(self.progress.received[peer]) {
            if !self.progress.open[peer] {
                if self.take_letter(peer, node)? {
                    moved = true;
                    continue;
                }
                if !self.open(peer, node)? {
                    // While a header was looked for, the rest of a message that came early may have been read.
                    if self.take_letter(peer, node)? {
                        moved = true;
                        continue;
                    }
                    break;
                }
                moved = true;
            }
            let more = match (&self.compiled.nodes[node], self.by_reference) {
                (Node::Receive { region, .. }, false) => self.receive(peer, node, *region)?,
                (Node::Receive { region, .. }, true) => self.fetch(peer, node, *region)?,
                (_, false) => self.fold(peer, node)?,
                (_, true) => self.fold_fetched(node)?,
            };
            moved |= more;
            if !more {
                break;
            }
        }
        Ok(moved)
    }

    /// Gets the header of the next expected message, and checks that it is the one expected.
    fn open(&mut self, peer: usize, node: usize) -> Result<bool> {
        let Some(header) = self.next_header(peer)? else { return Ok(false) };
        let length = self.length(node);
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if self.signature.operation.is_point_to_point() && !link.inbox.is_empty() {
            return Ok(false);
        }
        let from_peer = matches!(header.signature.operation, Operation::Send { .. });
        if from_peer && !self.signature.operation.is_point_to_point() {
            // A message that will be asked for later stands before the one we need.
            link.header = None;
            if !link.begin_letter(header) {
                link.header = Some(header);
                return Ok(false);
            }
            link.continue_letter();
            return Ok(false);
        }
        let is_ahead = !self.signature.operation.is_point_to_point() && header.sequence > self.sequence;
        if is_ahead {
            return Err(self.overtaken(peer, &header));
        }
        self.check(peer, &header)?;
        if header.length != length {
            return Err(
                self.corrupt(peer, &format!("a payload of {} bytes instead of {length}", header.length))
            );
        }
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if self.by_reference {
            link.offers.pop_front();
            self.progress.remote[peer] = header.address;
        } else {
            link.header = None;
        }
        self.progress.open[peer] = true;
        Ok(true)
    }

    /// A message that came early satisfies a receive at once.
    fn take_letter(&mut self, peer: usize, node: usize) -> Result<bool> {
        let is_message = self.signature.operation.is_point_to_point();
        let link = self.links[peer].as_mut().expect("only links are pulled");
        if !is_message || link.partial.is_some() && !link.continue_letter() {
            return Ok(false);
        }
        let Some(letter) = link.inbox.pop_front() else { return Ok(false) };
        self.check(peer, &letter.header)?;
        let size = self.size();
        let region = self.compiled.nodes[node].region();
        self.spaces.write(region, size, 0, letter.bytes.len()).copy_from_slice(&letter.bytes);
        self.progress.done[node] = letter.bytes.len();
        self.progress.received[peer] += 1;
        self.finish();
        Ok(true)
    }

    fn receive(&mut self, peer: usize, node: usize, region: Region) -> Result<bool> {
        let (length, allowed) = (self.length(node), self.allowed(node));
        let done = self.progress.done[node];
        let size = self.size();
        let link = self.links[peer].as_mut().expect("only links are pulled");
        let room = allowed - done;
        let mut taken = room.min(link.buffered().len());
        if taken > 0 {
            let target = self.spaces.write(region, size, done, done + taken);
            target.copy_from_slice(&link.buffered()[..taken]);
            link.consume(taken);
        } else if room > 0 {
            let target = self.spaces.write(region, size, done, allowed);
            let moved = if target.len() >= DIRECT_READ { link.read_into(target) } else { link.fill() };
            match moved {
                Moved::Bytes(bytes) if room >= DIRECT_READ => taken = bytes,
                Moved::Bytes(_) => return Ok(true),
                Moved::WouldBlock => return Ok(false),
                Moved::Closed => return Err(self.lost(peer)),
            }
        }
        self.progress.done[node] = done + taken;
        if self.progress.done[node] == length {
            self.close_message(peer);
            self.finish();
            return Ok(true);
        }
        Ok(taken > 0)
    }

    pub(super) fn close_message(&mut self, peer: usize) {
        self.progress.open[peer] = false;
        self.progress.received[peer] += 1;
    }
}
