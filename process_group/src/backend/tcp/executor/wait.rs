//! Sleeping until a link has news.

use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Run;
use crate::error::{Error, Result};
use crate::schedule::program::Node;
use crate::wire::frame::Kind;

impl Run<'_> {
    /// Sleeps until a link has news. `false` once `until` has passed.
    pub(super) fn wait(&mut self, until: Instant) -> Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut fds = Vec::with_capacity(self.links.len());
        for (peer, link) in self.links.iter().enumerate() {
            let Some(link) = link else { continue };
            let mut flags = PollFlags::empty();
            // A message that waits for its turn keeps what is behind it in the socket; of any other frame the rest is wanted.
            let is_held = link.header.is_some_and(|header| header.kind == Kind::Data);
            if link.closed.is_none() && (self.in_payload(peer) || !is_held) && self.can_take(peer) {
                flags |= PollFlags::IN;
            }
            if self.progress.full[peer] || link.has_control() && !link.mid_frame {
                flags |= PollFlags::OUT;
            }
            // Without flags, poll would still report a peer that has gone, again and again.
            if !flags.is_empty() {
                fds.push(PollFd::new(link.stream(), flags));
            }
        }
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::Transport(format!("waiting for links: {e}"))),
        }
        self.progress.full.fill(false);
        Ok(true)
    }

    /// Whether bytes of this peer could be taken now: not while a hazard or another operand holds its message up.
    fn can_take(&self, peer: usize) -> bool {
        if !self.in_payload(peer) {
            return true;
        }
        let Some(&node) = self.compiled.receives[peer].get(self.progress.received[peer]) else { return true };
        let done = self.progress.done[node];
        match &self.compiled.nodes[node] {
            Node::Fold { .. } => {
                let link = self.links[peer].as_ref().expect("only links are asked");
                link.buffered().len() < (self.length(node) - done).min(self.context.segment)
            }
            _ => self.allowed(node) > done,
        }
    }
}
