//! A long wait: the peers that a rank waits for, and whether their processes respond.

use std::time::Duration;

use super::Run;
use crate::error::Error;
use crate::link::mesh::{Liveness, Peer, Pulse};
use crate::membership::roster::Member;
use crate::types::blame;
use crate::types::rank::Rank;

/// Time that a rank waits in a call before it checks whether its peers respond.
pub(super) const LOOK_AFTER: Duration = Duration::from_secs(1);
/// Interval at which it then asks for the results.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The maximum number of peers that a rank checks.
const MOST: usize = 32;

/// The peers that a call checks.
#[derive(Default)]
pub(super) struct LivenessCheck(Vec<Watched>);

struct Watched {
    peer: Peer,
    pulse: Pulse,
    /// It has been reported that this peer does not respond.
    told: bool,
}

impl LivenessCheck {
    /// Returns the peers whose processes do not respond.
    fn silent(&self) -> impl Iterator<Item = Peer> {
        self.0.iter().filter(|watched| watched.pulse.is_silent()).map(|watched| watched.peer)
    }
}

impl Run<'_> {
    /// Checks the peers, and reports when one stops responding, or responds again.
    pub(super) fn look_after_peers(&self, liveness_check: &mut LivenessCheck, liveness: &Liveness) {
        if liveness_check.0.is_empty() {
            liveness_check.0 = self.watched(liveness);
        }
        for Watched { peer, pulse, told } in &mut liveness_check.0 {
            if pulse.is_silent() == *told {
                continue;
            }
            *told = !*told;
            let member = &self.links[*peer].peer;
            let (rank, host, pid) = (member.rank, &member.host, member.pid);
            let (call, group, sequence) = (&self.fingerprint, self.context.group, self.sequence);
            if *told {
                tracing::warn!(
                    %rank, host, pid, %call, group, sequence,
                    "rank {rank} (host {host}, pid {pid}) is unresponsive: its process is stopped, or its host or network is \
                     down. {call} waits for it until the deadline"
                );
            } else {
                tracing::warn!(%rank, host, pid, "rank {rank} responds again");
            }
        }
    }

    /// Returns the peers, those that this rank waits for first.
    fn watched(&self, liveness: &Liveness) -> Vec<Watched> {
        let mut peers: Vec<Peer> = match self.fingerprint.operation.peer() {
            Some(peer) => Peer::new(peer.index(), self.context.rank.index()).into_iter().collect(),
            None => self.links.ids().collect(),
        };
        peers.sort_by_key(|peer| !self.waits_for(*peer));
        let watched = peers.into_iter().filter_map(|peer| {
            let pulse = liveness.watch(self.links[peer].peer.data_address?);
            Some(Watched { peer, pulse, told: false })
        });
        watched.take(MOST).collect()
    }

    fn waits_for(&self, peer: Peer) -> bool {
        self.expects(peer) || self.progress.peers[peer].full
    }

    /// Returns the error at the deadline: names a peer whose process does not respond, if that explains which rank is missing.
    pub(super) fn timeout(
        &self,
        liveness_check: &LivenessCheck,
        waited: Duration,
        missing: Vec<Rank>,
    ) -> Error {
        let what = format!("{} in group `{}` (call {})", self.fingerprint, self.context.group, self.sequence);
        let silent = blame::unresponsive(liveness_check.silent().map(|peer| self.name(peer)), &missing);
        match self.links.pairs().find(|(_, link)| Some(link.rank()) == silent) {
            Some((_, link)) => {
                let Member { rank, host, pid, .. } = link.peer.clone();
                Error::PeerUnresponsive { rank, host, pid, during: what, waited }
            }
            None => Error::Timeout { what, waited, missing },
        }
    }
}
