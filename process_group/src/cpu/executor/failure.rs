//! The reasons for which a call cannot go on, and the ranks that caused them.

use std::time::{Duration, Instant};

use super::Run;
use crate::error::Error;
use crate::link::mesh::Peer;
use crate::types::rank::Rank;

/// Time for which a rank whose deadline has passed waits for the other ranks to report their position.
const ANSWERS: Duration = Duration::from_millis(300);

impl Run<'_> {
    pub(super) fn lost(&self, peer: Peer) -> Error {
        let link = &self.links[peer];
        let detail = if link.goodbye {
            "it has left the group in good order".to_owned()
        } else {
            link.closed.clone().unwrap_or_else(|| "its end of the connection was closed".into())
        };
        Error::PeerLost {
            rank: link.rank(),
            host: link.peer.host.clone(),
            pid: link.peer.pid,
            during: self.fingerprint.to_string(),
            detail,
        }
    }

    pub(super) fn corrupt(&self, peer: Peer, what: &str) -> Error {
        Error::Transport(format!(
            "rank {} sent {what} in {}; both ends must run the same version",
            self.name(peer),
            self.fingerprint
        ))
    }

    /// Returns the global rank of a peer.
    pub(super) fn name(&self, peer: Peer) -> Rank {
        self.links[peer].rank()
    }

    /// Called after the deadline: asks all peers for their position. Returns those that do not answer.
    pub(super) fn missing(&mut self) -> Vec<Rank> {
        if let Some(peer) = self.fingerprint.operation.peer() {
            let peer = Peer::new(peer.index(), self.context.rank.index());
            return peer.map(|peer| self.name(peer)).into_iter().collect();
        }
        self.ask();
        let until = Instant::now() + ANSWERS;
        while self.absent().next().is_some() && self.wait(until).unwrap_or(false) {
            for peer in self.links.ids() {
                self.links[peer].flush_control();
                if self.in_payload(peer) {
                    self.links[peer].fill(usize::MAX);
                } else if self.links[peer].closed.is_none()
                    && let Err(Error::PeerAborted { .. }) = self.next_header(peer)
                {
                    // A rank that gives up has been in the call; only silence would indicate otherwise.
                    self.links[peer].answered = true;
                }
            }
        }
        self.absent().collect()
    }

    /// Returns the peers of which nothing shows that they have entered this call.
    pub(super) fn absent(&self) -> impl Iterator<Item = Rank> {
        self.links.pairs().filter_map(|(peer, link)| {
            let here = link.answered || link.seen >= Some(self.sequence) || self.progress.peers[peer].open;
            (!here).then_some(link.rank())
        })
    }
}
