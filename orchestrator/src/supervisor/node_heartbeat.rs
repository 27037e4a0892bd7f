//! Whether the launchers of a job's nodes hear each other.
//!
//! The launcher of every node but the first counts up a key of the rendezvous, which the first node's looks at. When the count
//! stands still, or is not answered, the node or the network between them is down. Then each side ends its own ranks, which
//! would wait for the others until the deadline of their call. A rendezvous that has ended is no such case: the ranks of this
//! node may have some work left.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use ryzanstein_config::{Config, HostPort};
use ryzanstein_process_group::Secret;
use ryzanstein_process_group::security::Security;

use super::job::LaunchError;
use crate::rendezvous::{Client, Identity, Server};

/// Time between two beats.
const BEAT: Duration = Duration::from_secs(1);
/// A node is cut off when nothing has come from it for so long: a launcher that is busy starting ranks beats on.
pub(super) const SILENCE: Duration = Duration::from_secs(5);
/// A launcher that has not looked for so long was stopped itself.
const SLEEP: Duration = Duration::from_secs(3);
/// What leads the count below zero: the node has left in good order.
const GOODBYE: i64 = i64::MIN / 2;
/// How long the goodbye may take.
const LEAVING: Duration = Duration::from_secs(1);

fn key(node: u32) -> String {
    format!("launcher/{node}")
}

/// What the first node's launcher knows of the others.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    /// The newest count of each, and when it was first seen.
    counts: BTreeMap<u32, (i64, Duration)>,
    looked: Duration,
}

impl Nodes {
    /// Looks at the counts, and returns a node that is cut off. A node that has not counted yet is waited for by its ranks.
    pub(super) fn look(
        &mut self,
        now: Duration,
        counts: impl IntoIterator<Item = (u32, i64)>,
    ) -> Option<u32> {
        // This process was stopped itself: what came meanwhile may not have been read yet.
        let has_slept = now.saturating_sub(std::mem::replace(&mut self.looked, now)) >= SLEEP;
        if has_slept {
            self.counts.values_mut().for_each(|(_, since)| *since = now);
        }
        for (node, count) in counts {
            if self.counts.get(&node).is_none_or(|(known, _)| *known != count) {
                self.counts.insert(node, (count, now));
            }
        }
        let silent = |(count, since): &(i64, Duration)| *count > 0 && now.saturating_sub(*since) >= SILENCE;
        self.counts.iter().find(|(_, count)| silent(count)).map(|(node, _)| *node)
    }
}

/// The counts of all nodes but the first.
pub(super) fn counts(server: &Server, nodes: u32) -> impl Iterator<Item = (u32, i64)> {
    (1..nodes).map(|node| (node, server.counter(&key(node))))
}

/// The thread of a node other than the first that counts.
#[derive(Debug)]
pub(super) struct NodeHeartbeat {
    lost: tokio::sync::mpsc::Receiver<()>,
    stop: Option<mpsc::Sender<()>>,
    ended: mpsc::Receiver<()>,
}

impl NodeHeartbeat {
    /// Begins to count.
    ///
    /// # Errors
    /// When the settings of encryption are wrong, or the operating system gives no thread.
    pub(super) fn start(
        config: &Config,
        world_size: u32,
        address: HostPort,
        secret: Secret,
    ) -> Result<Self, LaunchError> {
        let (lose, lost) = tokio::sync::mpsc::channel(1);
        let (stop, is_stopped) = mpsc::channel::<()>();
        let (end, ended) = mpsc::channel();
        let (node, timeout) = (config.launch.node_rank, config.rendezvous.timeout.get());
        let identity =
            Identity { rank: None, local_rank: None, node_rank: Some(node), world_size, epoch: None };
        let security =
            Security::new(&config.security).map_err(|error| LaunchError::Configuration(error.to_string()))?;
        let beats = move || {
            let deadline = Instant::now() + timeout;
            // The ranks say why, if nobody is there.
            if let Ok(client) = Client::connect(address, secret, security, identity, deadline)
                && beat(&client, &key(node), &is_stopped)
            {
                let _ = lose.blocking_send(());
            }
            drop(end);
        };
        std::thread::Builder::new()
            .name("ryz-node-heartbeat".into())
            .spawn(beats)
            .map_err(LaunchError::system("no thread for the heartbeat"))?;
        Ok(Self { lost, stop: Some(stop), ended })
    }

    /// Resolves when nothing has answered for too long.
    pub(super) async fn cut_off(&mut self) {
        if self.lost.recv().await.is_none() {
            // The thread has ended because the rendezvous has.
            std::future::pending::<()>().await;
        }
    }
}

/// Counts until told to stop. Whether nothing has answered for too long.
fn beat(client: &Client, key: &str, is_stopped: &mpsc::Receiver<()>) -> bool {
    let mut answered = Instant::now();
    loop {
        let asked = Instant::now();
        match client.count(key, 1, SILENCE) {
            Ok(_) => answered = Instant::now(),
            // A connection may break and be made again.
            Err(_) if answered.elapsed() >= SILENCE => {
                // An answer at once, of whatever kind, comes from a node that is there: its rendezvous has ended.
                return asked.elapsed() >= BEAT;
            }
            Err(_) => {}
        }
        if is_stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Disconnected) {
            let _ = client.count(key, GOODBYE, LEAVING);
            return false;
        }
    }
}

impl Drop for NodeHeartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.ended.recv_timeout(LEAVING);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_cut_off_when_its_count_stands_still_and_not_before_it_counts_or_after_it_has_left() {
        let mut nodes = Nodes::default();
        let at = Duration::from_secs;
        assert_eq!(nodes.look(at(59), [(1, 0), (2, 0)]), None);
        assert_eq!(nodes.look(at(60), [(1, 0), (2, 0)]), None, "nobody has come yet");
        for second in 61..66 {
            assert_eq!(nodes.look(at(second), [(1, second as i64), (2, 1)]), None, "at {second}");
        }
        assert_eq!(nodes.look(at(66), [(1, 66), (2, 1)]), Some(2));
        for second in 67..71 {
            assert_eq!(nodes.look(at(second), [(1, 66), (2, 1 + GOODBYE)]), None, "at {second}");
        }
        // The launcher itself was stopped.
        assert_eq!(nodes.look(at(80), [(1, 66), (2, 1 + GOODBYE)]), None);
        for second in 81..85 {
            assert_eq!(nodes.look(at(second), [(1, 66), (2, 1 + GOODBYE)]), None, "at {second}");
        }
        assert_eq!(nodes.look(at(85), [(1, 66), (2, 1 + GOODBYE)]), Some(1));
    }
}
