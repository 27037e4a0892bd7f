//! Sleeps until a link has something to read, or room.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::Run;
use crate::cpu::SEGMENT;
use crate::cpu::compiled::{Receive, Target};
use crate::cpu::link::Link;
use crate::cpu::poll::poll_for;
use crate::cpu::shared::Doorbell;
use crate::error::{Error, Result};
use crate::link::mesh::Peer;
use crate::link::wire::frame::Kind;

impl Run<'_> {
    /// Sleeps until a link has something to read, or room. Returns `false` once `until` has passed.
    pub(super) fn wait(&mut self, until: Instant) -> Result<bool> {
        let now = Instant::now();
        let left = until.saturating_duration_since(now);
        if left.is_zero() {
            self.look_at_channels(now);
            return Ok(false);
        }
        self.sleep_until_news(left)?;
        self.look_at_channels(Instant::now());
        self.progress.peers.iter_mut().for_each(|peer| peer.full = false);
        Ok(true)
    }

    /// Returns true if the next bytes of a peer wait for other ranks. A message that waits for its turn blocks all bytes after it; of any
    /// other frame the rest is wanted.
    pub(super) fn is_blocked(&self, peer: Peer, link: &Link) -> bool {
        let is_held = link.header.is_some_and(|header| header.kind == Kind::Data);
        link.closed.is_none() && (is_held && !self.in_payload(peer) || !self.can_take(peer))
    }

    /// Returns whether bytes from a peer are wanted now, and whether there are bytes for it.
    fn wants(&self, peer: Peer, link: &Link) -> (bool, bool) {
        let to_read = link.closed.is_none() && !self.is_blocked(peer, link);
        let to_write =
            link.has_unsent() || self.progress.peers[peer].full || link.has_control() && !link.mid_frame;
        (to_read, to_write)
    }

    fn sleep_until_news(&self, left: Duration) -> Result<()> {
        let mut fds = Vec::new();
        for (peer, link) in self.links.pairs().filter(|(_, link)| !link.is_shared()) {
            let (to_read, to_write) = self.wants(peer, link);
            if to_read && link.has_unread() {
                return Ok(());
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, to_read);
            flags.set(PollFlags::OUT, to_write);
            // Without flags, poll would report a lost peer again and again.
            if !flags.is_empty() {
                fds.push(PollFd::new(link.socket(), flags));
            }
        }
        let slept = match self.context.doorbell {
            Some(doorbell) => doorbell.sleep(left.min(Doorbell::NAP), fds, || self.has_news_in_memory()),
            None => poll_for(&mut fds, left),
        };
        slept.map_err(Error::system("waiting for links"))
    }

    fn has_news_in_memory(&self) -> bool {
        self.links.pairs().filter(|(_, link)| link.is_shared()).any(|(peer, link)| {
            let (to_read, to_write) = self.wants(peer, link);
            link.has_news(to_read, to_write)
        })
    }

    /// Checks regularly whether peers have closed their sockets, which no doorbell announces.
    pub(super) fn look_at_channels(&mut self, now: Instant) {
        if self.context.doorbell.is_some() && now.duration_since(self.progress.looked) >= Doorbell::NAP {
            self.links.iter_mut().for_each(Link::look_at_channel);
            self.progress.looked = now;
        }
    }

    /// Returns true if bytes of this peer could be read now: not while a hazard or another operand blocks its message.
    fn can_take(&self, peer: Peer) -> bool {
        if !self.in_payload(peer) {
            return true;
        }
        let next = self.compiled.receives[peer].get(self.progress.peers[peer].received);
        let Some(&Receive { node, ref into }) = next else { return true };
        let done = self.progress.done[node];
        match into {
            Target::Region(_) => self.allowed(node) > done,
            Target::Reduction(_) => {
                let wanted = (self.length(node) - done).min(SEGMENT);
                self.links[peer].buffered().len() < wanted
            }
        }
    }
}
