//! Payloads that do not go through the links: offered where they lie, fetched by their receivers, and taken back.
//!
//! A message is an offer (its header, with an address), one or more reads of the sender's memory, and a word that it has
//! been taken. Only then is its send done, so hazards hold back whatever would overwrite it, and the call does not return.
//!
//! A sender that gives up tells everybody *before* its caller gets the memory back (see
//! [`abort`](crate::backend::Backend::abort)). A receiver therefore looks at the link after its last read: if nothing is
//! there, what it read was the message.

use super::Run;
use crate::backend::tcp::compiled::peer;
use crate::backend::tcp::cross_memory;
use crate::error::Result;
use crate::schedule::program::{Node, Region};
use crate::wire::frame::{Header, Kind};

impl Run<'_> {
    /// Offers whatever is complete.
    pub(super) fn offer(&mut self, peer: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(&node) = self.compiled.sends[peer].get(self.progress.sent[peer]) {
            let length = self.length(node);
            if self.allowed(node) < length {
                break;
            }
            let Node::Send { region, .. } = self.compiled.nodes[node] else { unreachable!() };
            let address = cross_memory::address(self.spaces.read(region, self.size(), 0, length));
            let header = Header { kind: Kind::Offer, address, ..self.header(length) };
            self.links[peer].as_mut().expect("only links are pushed").queue_control(&header, &[]);
            self.progress.sent[peer] += 1;
            moved = true;
        }
        // News that a message was taken come without anything else being expected from the peer.
        if self.progress.taken[peer] < self.progress.sent[peer] {
            let before = self.progress.taken[peer];
            let heard = self.next_header(peer);
            moved |= self.progress.taken[peer] > before;
            // Behind its last word of this call the peer may have left, as it may when it is done.
            let is_done = self.progress.taken[peer] == self.progress.sent[peer] && !self.expects(peer);
            if heard.is_err() && !(is_done && self.said_goodbye(peer)) {
                heard?;
            }
        }
        self.links[peer].as_mut().expect("only links are pushed").flush_control();
        Ok(moved)
    }

    /// The peer has taken the oldest message that it had not.
    pub(super) fn taken(&mut self, peer: usize, header: &Header) -> Result<()> {
        let at = self.progress.taken[peer];
        if header.sequence != self.sequence || at >= self.progress.sent[peer] || !self.by_reference {
            return Err(self.corrupt(peer, "word that it has taken what was not offered"));
        }
        let node = self.compiled.sends[peer][at];
        self.progress.done[node] = self.length(node);
        self.progress.taken[peer] = at + 1;
        self.finish();
        Ok(())
    }

    /// Whether a peer still has to be told something before this rank may leave the call.
    pub(super) fn has_more_to_say(&mut self) -> bool {
        self.by_reference && self.links.iter_mut().flatten().any(|link| !link.flush_control())
    }

    /// Copies as much of a message as hazards allow to where it belongs.
    pub(super) fn fetch(&mut self, peer: usize, node: usize, region: Region) -> Result<bool> {
        let (done, allowed, size) = (self.progress.done[node], self.allowed(node), self.size());
        let link = self.links[peer].as_ref().expect("only links are pulled");
        let from = self.progress.remote[peer] + done as u64;
        let fetched = link.fetch(from, self.spaces.write(region, size, done, allowed));
        fetched.map_err(|why| self.unreadable(peer, why))?;
        self.progress.done[node] = allowed;
        if allowed == self.length(node) {
            self.take(peer)?;
            self.finish();
            return Ok(true);
        }
        Ok(allowed > done)
    }

    /// Folds one segment, read from all its peers, if each has offered it.
    pub(super) fn fold_fetched(&mut self, node: usize) -> Result<bool> {
        let compiled = self.compiled;
        let Node::Fold { into, sources, last } = &compiled.nodes[node] else { unreachable!() };
        let peers = || sources.iter().filter_map(peer);
        let is_open = |other: usize| {
            self.progress.open[other]
                && compiled.receives[other].get(self.progress.received[other]) == Some(&node)
        };
        if !peers().all(is_open) {
            return Ok(false);
        }
        let (done, size) = (self.progress.done[node], self.size());
        let segment = self.context.segment - self.context.segment % size;
        let ready = (self.allowed(node) - done).min(segment);
        for other in peers() {
            let from = self.progress.remote[other] + done as u64;
            let link = self.links[other].as_mut().expect("sources are links");
            link.stage(from, ready).map_err(|why| self.unreadable(other, why))?;
        }
        if ready > 0 {
            self.fold_ready(*into, sources, *last, done, ready);
            self.progress.done[node] += ready;
        }
        if self.progress.done[node] == self.length(node) {
            for other in peers() {
                self.take(other)?;
            }
            self.finish();
            return Ok(true);
        }
        Ok(ready > 0)
    }

    /// The message has been read: makes sure that it was still the message, and lets its sender go on.
    fn take(&mut self, peer: usize) -> Result<()> {
        self.next_header(peer)?;
        let header = Header { kind: Kind::Taken, ..self.header(0) };
        let link = self.links[peer].as_mut().expect("only links are pulled");
        link.queue_control(&header, &[]);
        link.flush_control();
        self.close_message(peer);
        Ok(())
    }

    /// A peer's memory goes away with the peer: its link says more of that than the system call.
    fn unreadable(&mut self, peer: usize, why: String) -> crate::Error {
        if let Err(error) = self.next_header(peer) {
            return error;
        }
        let link = self.links[peer].as_mut().expect("only links are pulled");
        link.closed.get_or_insert(why);
        self.lost(peer)
    }
}
