//! What a call that cannot go on says, and who is named.

use std::time::{Duration, Instant};

use super::Run;
use crate::error::Error;
use crate::operation::Operation;
use crate::rank::Rank;

/// How long a rank whose deadline has passed listens for where the others are.
const GRACE: Duration = Duration::from_millis(300);

impl Run<'_> {
    pub(super) fn lost(&self, peer: usize) -> Error {
        let link = self.links[peer].as_ref().expect("only links are lost");
        let detail = if link.goodbye {
            "it has left the group in good order".to_owned()
        } else {
            link.closed.clone().unwrap_or_else(|| "its end of the connection was closed".into())
        };
        Error::PeerLost {
            rank: link.rank(),
            host: link.peer.host.clone(),
            pid: link.peer.pid,
            during: self.signature.to_string(),
            detail,
        }
    }

    pub(super) fn corrupt(&self, peer: usize, what: &str) -> Error {
        Error::Transport(format!(
            "rank {} sent {what} in {}; both ends must run the same version",
            self.name(peer),
            self.signature
        ))
    }

    /// Global rank of a peer.
    pub(super) fn name(&self, peer: usize) -> Rank {
        self.links[peer].as_ref().expect("only links are named").rank()
    }

    /// The deadline has passed: asks everybody where they are, and names those who do not say.
    pub(super) fn give_up(&mut self, started: Instant) -> Error {
        if let Operation::Send { to: peer } | Operation::Recv { from: peer } = self.signature.operation {
            return self.timeout(started, vec![self.name(peer.index())]);
        }
        self.ask();
        let until = Instant::now() + GRACE;
        while self.absent().next().is_some() && self.wait(until).unwrap_or(false) {
            for peer in 0..self.links.len() {
                let Some(link) = self.links[peer].as_mut() else { continue };
                link.flush_control();
                let closed = link.closed.is_some();
                if !self.in_payload(peer) && !closed {
                    // Whoever gives up has been there; only its silence would tell otherwise.
                    if let Err(Error::PeerAborted { .. }) = self.next_header(peer) {
                        self.links[peer].as_mut().expect("looked at above").answered = true;
                    }
                } else if self.in_payload(peer) {
                    self.links[peer].as_mut().expect("looked at above").fill();
                }
            }
        }
        self.timeout(started, self.absent().collect())
    }

    pub(super) fn timeout(&self, started: Instant, missing: Vec<Rank>) -> Error {
        Error::Timeout {
            what: format!("{} in group `{}` (call {})", self.signature, self.context.group, self.sequence),
            waited: started.elapsed(),
            missing,
        }
    }

    /// Peers of which nothing shows that they have come to this call.
    pub(super) fn absent(&self) -> impl Iterator<Item = Rank> {
        self.links.iter().enumerate().filter_map(|(peer, link)| {
            let link = link.as_ref()?;
            let here = link.answered || link.seen >= Some(self.sequence) || self.progress.open[peer];
            (!here).then_some(link.rank())
        })
    }
}
