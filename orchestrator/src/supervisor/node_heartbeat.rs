//! Heartbeats between the launchers of a job's nodes.
//!
//! The launcher of every node but the first increments a key of the rendezvous, which the launcher of the first node reads.
//! When the count stands still, or is not answered, the node or the network between them is down. Then each side ends its own
//! ranks, which would wait for the others until the deadline of their call. A node that does not come until `rendezvous.timeout`
//! ends the job as well, also for programs that wait for other ranks without a deadline of their own.
//!
//! A node that fails leaves the reason in the rendezvous, where every other node reads it and ends too. The first node leaves
//! last, so a rendezvous that has ended is a failure.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use ryzanstein_config::{Config, HostPort};
use ryzanstein_process_group::security::Security;
use ryzanstein_process_group::store::{RESERVED, Store as _};
use ryzanstein_process_group::{Rank, Secret};

use super::job::LaunchError;
use crate::plural;
use crate::rendezvous::{Client, Identity, Server};

/// Time between two beats.
const BEAT: Duration = Duration::from_secs(1);
/// Silence after which a node is cut off: a launcher that is busy starting ranks still sends heartbeats.
pub(super) const SILENCE: Duration = Duration::from_secs(5);
/// Time without an examination after which a launcher was stopped itself.
const SLEEP: Duration = Duration::from_secs(3);
/// Amount that makes the count negative, also if it is added several times: the node has left.
const GOODBYE: i64 = -(1 << 48);
/// Timeout of a message that is not repeated.
const LEAVING: Duration = Duration::from_secs(1);

fn key(node: u32) -> String {
    format!("{RESERVED}launcher/{node}")
}

/// Returns the key of the reason why a node has ended the job.
fn failure_key(node: u32) -> String {
    format!("{}/failure", key(node))
}

/// What stands between the size of a job and its number.
const SEPARATOR: char = '#';

/// Returns the key of the size of the job.
fn size_key() -> String {
    format!("{RESERVED}size")
}

/// A launcher's observation of other nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NodeNotice {
    /// It waits for other nodes. Told once.
    Waits(String),
    /// It is cut off from another node, or another node has failed, for this reason, and its ranks must end.
    CutOff(String),
    /// It has told the first node all that there was to tell, or cannot.
    Left,
}

/// The heartbeats of the other nodes, in the launcher of the first node.
#[derive(Debug)]
pub(super) struct Nodes {
    address: HostPort,
    /// Time within which all nodes must come.
    timeout: Duration,
    /// The newest count of each, and the time at which it was first seen.
    counts: BTreeMap<u32, (i64, Duration)>,
    looked: Duration,
    is_wait_told: bool,
}

impl Nodes {
    pub(super) fn new(address: HostPort, timeout: Duration) -> Self {
        Self { address, timeout, counts: BTreeMap::new(), looked: Duration::ZERO, is_wait_told: false }
    }

    /// Examines the counts at this time since the job began.
    pub(super) fn look(
        &mut self,
        now: Duration,
        counts: impl IntoIterator<Item = (u32, i64)>,
    ) -> Option<NodeNotice> {
        // This process was stopped itself: counts that arrived meanwhile may not have been read yet.
        let has_slept = now.saturating_sub(std::mem::replace(&mut self.looked, now)) >= SLEEP;
        if has_slept {
            self.counts.values_mut().for_each(|(_, since)| *since = now);
        }
        for (node, count) in counts {
            if self.counts.get(&node).is_none_or(|(known, _)| *known != count) {
                self.counts.insert(node, (count, now));
            }
        }
        if let Some((node, _)) = self.counts.iter().find(|(_, seen)| is_silent(**seen, now)) {
            return Some(NodeNotice::CutOff(silence(&format!("node {node}"))));
        }
        let absent: Vec<String> = self
            .counts
            .iter()
            .filter(|(_, (count, _))| *count == 0)
            .map(|(node, _)| node.to_string())
            .collect();
        if absent.is_empty() {
            return None;
        }
        let (launchers, have) = match absent.as_slice() {
            [node] => (format!("the launcher of node {node}"), "has"),
            nodes => (format!("the launchers of nodes {}", nodes.join(", ")), "have"),
        };
        if now >= self.timeout {
            return Some(NodeNotice::CutOff(format!(
                "{launchers} {have} not connected to {} within {} s (rendezvous.timeout): not started, unable to reach that \
                 address, or refused, which their output says",
                self.address,
                self.timeout.as_secs()
            )));
        }
        if now < SILENCE || std::mem::replace(&mut self.is_wait_told, true) {
            return None;
        }
        Some(NodeNotice::Waits(format!(
            "waiting for {launchers} to connect to {}, until rendezvous.timeout ({} s)",
            self.address,
            self.timeout.as_secs()
        )))
    }

    /// Returns true if every other node has left, or is silent.
    pub(super) fn have_left(&self, now: Duration) -> bool {
        let has_left = |seen: &(i64, Duration)| seen.0 < 0 || is_silent(*seen, now);
        !self.counts.is_empty() && self.counts.values().all(has_left)
    }
}

/// Examines a count and the time at which it was first seen.
fn is_silent((count, since): (i64, Duration), now: Duration) -> bool {
    count > 0 && now.saturating_sub(since) >= SILENCE
}

fn silence(node: &str) -> String {
    format!(
        "no heartbeat from the launcher of {node} for {} s: the launcher, its host or the network is down",
        SILENCE.as_secs()
    )
}

/// Returns the counts of all nodes but the first.
pub(super) fn counts(server: &Server, nodes: u32) -> impl Iterator<Item = (u32, i64)> {
    (1..nodes).map(|node| (node, server.counter(&key(node))))
}

/// Returns the failure of a node other than the first, if one has told it. Read the counts before: a node that fails tells it
/// before it leaves.
pub(super) fn failure(server: &Server, nodes: u32) -> Option<NodeNotice> {
    let why = (1..nodes).find_map(|node| server.value(&failure_key(node)))?;
    Some(NodeNotice::CutOff(String::from_utf8_lossy(&why).into_owned()))
}

/// Tells the other nodes, from the first, why they must end.
pub(super) fn tell_failure(server: &Server, why: String) {
    server.put(&failure_key(0), why);
}

/// Tells the other nodes, from the first, what job it runs: the size, and a number that no other job has.
pub(super) fn tell_size(server: &Server, config: &Config, world_size: u32) {
    let started = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    server.put(&size_key(), format!("{}{SEPARATOR}{started}", size(config, world_size)));
}

fn size(config: &Config, world_size: u32) -> String {
    let nodes = config.launch.nnodes.get();
    format!("{} on {}", plural(world_size as usize, "rank"), plural(nodes as usize, "node"))
}

/// What a launcher tells the first node.
#[derive(Debug)]
enum Message {
    /// A rank has ended well, and is not silent.
    RankLeft(Rank),
    /// All ranks have ended well, or the node ends the job for this reason.
    Left(Result<(), String>),
}

/// The thread of a node other than the first that counts.
#[derive(Debug)]
pub(super) struct NodeHeartbeat {
    notices: tokio::sync::mpsc::Receiver<NodeNotice>,
    messages: mpsc::Sender<Message>,
}

impl NodeHeartbeat {
    /// Begins to count.
    ///
    /// # Errors
    /// Fails when the settings of encryption are wrong, or the operating system gives no thread.
    pub(super) fn start(
        config: &Config,
        world_size: u32,
        address: HostPort,
        secret: Secret,
    ) -> Result<Self, LaunchError> {
        let (notify, notices) = tokio::sync::mpsc::channel(2);
        let (messages, told) = mpsc::channel();
        let (node, timeout) = (config.launch.node_rank, config.rendezvous.timeout.get());
        let size = size(config, world_size);
        let identity =
            Identity { rank: None, local_rank: None, node_rank: Some(node), world_size, epoch: None };
        let security =
            Security::new(&config.security).map_err(|error| LaunchError::Configuration(error.to_string()))?;
        let beats = move || {
            let started = Instant::now();
            let deadline = started + timeout;
            let tell = |notice| drop(notify.blocking_send(notice));
            let connect = |until: Instant| {
                let (secret, security, identity) = (secret.clone(), security.clone(), identity.clone());
                Client::connect(address.clone(), secret, security, identity, until)
            };
            let client = connect(deadline.min(started + SILENCE)).or_else(|error| {
                // An error at once, such as another secret, does not go away.
                if started.elapsed() < SILENCE / 2 {
                    return Err(error);
                }
                tell(NodeNotice::Waits(format!(
                    "waiting for the launcher of the first node at {address}, until rendezvous.timeout ({} s)",
                    timeout.as_secs()
                )));
                connect(deadline)
            });
            let cut_off = match client {
                Ok(client) => {
                    let first = format!("the first node ({address})");
                    beat(&client, node, &first, &size, &told)
                }
                Err(error) => Some(error.to_string()),
            };
            if let Some(why) = cut_off {
                tell(NodeNotice::CutOff(why));
            }
            tell(NodeNotice::Left);
        };
        std::thread::Builder::new()
            .name("ryz-node-heartbeat".into())
            .spawn(beats)
            .map_err(LaunchError::system("no thread for the heartbeat"))?;
        Ok(Self { notices, messages })
    }

    /// Reports to the first node that a rank of this node has ended well, and is not silent.
    pub(super) fn rank_left(&self, rank: Rank) {
        let _ = self.messages.send(Message::RankLeft(rank));
    }

    /// Reports to the first node that all ranks of this node have ended well, or the reason why it ends the job. Only the first
    /// report counts.
    pub(super) fn leave(&self, how: Result<(), String>) {
        let _ = self.messages.send(Message::Left(how));
    }

    /// Resolves when there is something to notice.
    pub(super) async fn notice(&mut self) -> NodeNotice {
        match self.notices.recv().await {
            Some(notice) => notice,
            // The thread has ended: this node has left.
            None => std::future::pending().await,
        }
    }
}

/// Returns the reason why this launcher does not belong to the job that the first node runs.
fn disagreement(client: &Client, node: u32, first: &str, size: &str, job: &[u8]) -> Option<String> {
    let job = String::from_utf8_lossy(job);
    let known = job.split(SEPARATOR).next().unwrap_or_default();
    if known != size {
        return Some(format!(
            "this launcher was started for {size}, but that of {first} for {known}; give every launcher the same numbers of ranks and \
             nodes"
        ));
    }
    let launchers = client.count(&format!("{}/launchers", key(node)), 1, SILENCE);
    launchers.is_ok_and(|launchers| launchers > 1).then(|| {
        format!(
            "{first} has had another launcher of node {node} in this job; give every launcher its own --node-rank, and start all of \
             them again when one has failed"
        )
    })
}

/// Counts until this node leaves, and passes on what it tells. Returns the reason if this node is cut off, or another has failed.
fn beat(
    client: &Client,
    node: u32,
    first: &str,
    size: &str,
    told: &mpsc::Receiver<Message>,
) -> Option<String> {
    let (key, mut answered, mut job) = (key(node), Instant::now(), None);
    loop {
        // The client reconnects after a break, and may reach the launcher of a later job.
        let asked = Instant::now();
        let now = client.get(&size_key(), asked + SILENCE / 2);
        if let Ok(now) = &now {
            let foreign = match &job {
                None => disagreement(client, node, first, size, now),
                Some(job) if job == now => None,
                Some(_) => {
                    Some(format!("the launcher of {first} was started again; start those of all nodes again"))
                }
            };
            if foreign.is_some() {
                return foreign;
            }
            job.get_or_insert_with(|| now.clone());
        }
        match now.and_then(|_| client.count(&key, 1, SILENCE)) {
            Ok(_) => {
                answered = Instant::now();
                if let Ok(why) = client.get(&failure_key(0), answered) {
                    let _ = client.count(&key, GOODBYE, LEAVING);
                    return Some(String::from_utf8_lossy(&why).into_owned());
                }
            }
            // A connection may break and be made again.
            Err(_) if answered.elapsed() >= SILENCE => {
                // An immediate answer, of whatever kind, comes from a host that is running.
                let has_ended = asked.elapsed() < BEAT;
                return Some(if has_ended {
                    format!(
                        "the launcher of {first} has ended before this node has left; its output says more"
                    )
                } else {
                    silence(first)
                });
            }
            Err(_) => {}
        }
        match told.recv_timeout(BEAT) {
            Ok(Message::RankLeft(rank)) => {
                // A program that has never joined is refused, and its heartbeat is not expected.
                if !runs_later_job(client, job.as_deref()) {
                    let _ = client.report_exit(rank, LEAVING);
                }
            }
            Ok(Message::Left(how)) => {
                leave(client, node, job.as_deref(), &how);
                return None;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Returns true if the launcher of the first node answers for another job than this one.
fn runs_later_job(client: &Client, job: Option<&[u8]>) -> bool {
    let now = client.get(&size_key(), Instant::now() + LEAVING);
    matches!((job, now), (Some(job), Ok(now)) if job != now)
}

/// Tells the first node how this one has ended, unless its launcher already runs a later job. A connection may break and be made again.
fn leave(client: &Client, node: u32, job: Option<&[u8]>, how: &Result<(), String>) {
    let tell = || {
        if runs_later_job(client, job) {
            return Ok(0);
        }
        if let Err(why) = how {
            client.put(&failure_key(node), why.as_bytes(), SILENCE)?;
        }
        client.count(&key(node), GOODBYE, SILENCE)
    };
    let begun = Instant::now();
    while tell().is_err() && begun.elapsed() < SILENCE {
        std::thread::sleep(BEAT);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::num::NonZeroU32;

    use ryzanstein_config::{BackendChoice, RendezvousConfig};
    use ryzanstein_process_group::{BackendKind, Candidate, Capability, Cpus, Epoch, Rendezvous as _};

    use super::*;
    use crate::rendezvous::listen;
    use crate::status::wire::Report;

    /// The rendezvous of a job of one rank on two nodes, and the settings of the second.
    struct Job {
        server: Server,
        secret: Secret,
        config: Config,
    }

    impl Job {
        fn new() -> Self {
            let (secret, mut config) = (Secret::random(), Config::default());
            config.launch.nnodes = NonZeroU32::new(2).unwrap();
            config.launch.node_rank = 1;
            let security = Security::new(&config.security).unwrap();
            let listener = listen::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            let limits = RendezvousConfig::default();
            let server = Server::start(listener, secret.clone(), security, 1, Epoch(1), &limits).unwrap();
            tell_size(&server, &config, 1);
            Self { server, secret, config }
        }

        fn address(&self) -> HostPort {
            HostPort::new("127.0.0.1", self.server.address().port()).unwrap()
        }

        fn second_node(&self) -> NodeHeartbeat {
            NodeHeartbeat::start(&self.config, 1, self.address(), self.secret.clone()).unwrap()
        }

        fn has_second_left(&self) -> bool {
            counts(&self.server, 2).all(|(_, count)| count < 0)
        }
    }

    fn wait_for_second(server: &Server) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while counts(server, 2).any(|(_, count)| count == 0) {
            assert!(Instant::now() < deadline, "the second node does not count");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_launcher_does_not_take_part_in_a_later_job_at_the_same_address() {
        let job = Job::new();
        let mut node = job.second_node();
        wait_for_second(&job.server);
        tell_size(&job.server, &job.config, 1);
        let Some(NodeNotice::CutOff(why)) = node.notices.blocking_recv() else { panic!("it goes on") };
        assert!(why.contains("was started again"), "{why}");
        assert_eq!(node.notices.blocking_recv(), Some(NodeNotice::Left));
        assert!(!job.has_second_left());
    }

    #[test]
    fn a_launcher_does_not_report_to_a_later_job_at_the_same_address() {
        let job = Job::new();
        let identity =
            Identity { rank: None, local_rank: None, node_rank: Some(1), world_size: 1, epoch: None };
        let (security, deadline) =
            (Security::new(&job.config.security).unwrap(), Instant::now() + Duration::from_secs(60));
        let client =
            Client::connect(job.address(), job.secret.clone(), security, identity, deadline).unwrap();
        leave(&client, 1, Some(b"an earlier job"), &Err("of an earlier job".into()));
        assert_eq!(failure(&job.server, 2), None);
        assert!(!job.has_second_left());
    }

    #[test]
    fn a_rank_of_another_node_that_has_ended_well_is_told_to_have_left() {
        let job = Job::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        let identity = Identity {
            rank: Some(Rank(0)),
            local_rank: None,
            node_rank: Some(1),
            world_size: 1,
            epoch: Some(Epoch(1)),
        };
        let security = Security::new(&job.config.security).unwrap();
        let rank = Client::connect(job.address(), job.secret.clone(), security, identity, deadline).unwrap();
        let candidate = Candidate {
            host: "there".into(),
            pid: 1,
            cpus: Cpus::default(),
            data_address: None,
            wanted: BackendChoice::Auto,
            capabilities: vec![Capability::usable(BackendKind::Tcp)],
        };
        rank.join(candidate, deadline).unwrap();
        rank.beat(&Report::default()).unwrap();
        let has_left = || job.server.beats()[&Rank(0)].report.leaving;
        assert!(!has_left());

        let node = job.second_node();
        node.rank_left(Rank(0));
        while !has_left() {
            assert!(Instant::now() < deadline, "nobody says that it has left");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_node_that_leaves_tells_the_first_how_it_has_ended() {
        for (how, told) in [(Ok(()), None), (Err("node 1: rank 3".to_owned()), Some("node 1: rank 3"))] {
            let (job, told) = (Job::new(), told.map(|why| NodeNotice::CutOff(why.into())));
            let mut node = job.second_node();
            assert!(!job.has_second_left());
            node.leave(how);
            assert_eq!(node.notices.blocking_recv(), Some(NodeNotice::Left));
            assert_eq!(failure(&job.server, 2), told);
            assert!(job.has_second_left());
        }
    }

    #[test]
    fn a_failure_of_the_first_node_ends_the_others() {
        let job = Job::new();
        let mut node = job.second_node();
        tell_failure(&job.server, "node 0: rank 0".into());
        assert_eq!(node.notices.blocking_recv(), Some(NodeNotice::CutOff("node 0: rank 0".into())));
        assert_eq!(node.notices.blocking_recv(), Some(NodeNotice::Left));
        assert!(job.has_second_left(), "the first node knows that it has been heard");
    }

    #[test]
    fn a_first_node_that_ends_without_a_word_has_failed() {
        let Job { server, secret, config } = Job::new();
        let address = HostPort::new("127.0.0.1", server.address().port()).unwrap();
        let mut node = NodeHeartbeat::start(&config, 1, address, secret).unwrap();
        wait_for_second(&server);
        drop(server);
        let Some(NodeNotice::CutOff(why)) = node.notices.blocking_recv() else { panic!("it goes on") };
        assert!(why.contains("the launcher of the first node (127.0.0.1:"), "{why}");
    }

    #[test]
    fn a_launcher_that_does_not_belong_to_the_job_is_refused_and_does_not_disturb_it() {
        type Change = fn(&mut Config);
        let cases: [(Change, &str); 2] = [
            (|_| {}, "has had another launcher of node 1 in this job"),
            (
                |config| config.launch.nnodes = NonZeroU32::new(3).unwrap(),
                "was started for 1 rank on 3 nodes, but that of the first node",
            ),
        ];
        for (change, expected) in cases {
            let mut job = Job::new();
            let node = job.second_node();
            wait_for_second(&job.server);
            change(&mut job.config);
            let mut other = job.second_node();
            let Some(NodeNotice::CutOff(why)) = other.notices.blocking_recv() else { panic!("it joins") };
            assert!(why.contains(expected), "{why}");
            other.leave(Err("it has no say".into()));
            assert_eq!(other.notices.blocking_recv(), Some(NodeNotice::Left));
            assert_eq!(failure(&job.server, 2), None);
            assert!(!job.has_second_left());
            drop(node);
        }
    }

    #[test]
    fn a_node_that_does_not_come_is_told_and_ends_the_job_at_the_timeout() {
        let at = Duration::from_secs;
        let mut nodes = Nodes::new("node0:29500".parse().unwrap(), at(8));
        let counts = |second| [(1, second), (2, 0), (3, 0)];
        let mut told = Vec::new();
        for second in 0..=8 {
            told.extend(nodes.look(at(second), counts(second as i64)).map(|notice| (second, notice)));
        }
        let [(5, NodeNotice::Waits(waits)), (8, NodeNotice::CutOff(end))] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(
            waits,
            "waiting for the launchers of nodes 2, 3 to connect to node0:29500, until rendezvous.timeout (8 s)"
        );
        assert!(
            end.starts_with("the launchers of nodes 2, 3 have not connected to node0:29500 within 8 s"),
            "{end}"
        );
    }

    #[test]
    fn a_node_is_cut_off_when_its_count_stands_still_and_not_before_it_counts_or_after_it_has_left() {
        let at = Duration::from_secs;
        let mut nodes = Nodes::new("node0:29500".parse().unwrap(), at(600));
        let cut_off = |node| Some(NodeNotice::CutOff(silence(&format!("node {node}"))));
        assert_eq!(nodes.look(at(2), [(1, 0), (2, 0)]), None);
        assert_eq!(nodes.look(at(4), [(1, 0), (2, 0)]), None, "nobody has come yet");
        for second in 61..66 {
            assert_eq!(nodes.look(at(second), [(1, second as i64), (2, 1)]), None, "at {second}");
        }
        assert_eq!(nodes.look(at(66), [(1, 66), (2, 1)]), cut_off(2));
        for second in 67..71 {
            assert_eq!(nodes.look(at(second), [(1, 66), (2, 1 + GOODBYE)]), None, "at {second}");
            assert!(!nodes.have_left(at(second)), "node 1 at {second}");
        }
        // The launcher itself was stopped.
        assert_eq!(nodes.look(at(80), [(1, 66), (2, 1 + GOODBYE)]), None);
        for second in 81..85 {
            assert_eq!(nodes.look(at(second), [(1, 66), (2, 1 + GOODBYE)]), None, "at {second}");
        }
        assert_eq!(nodes.look(at(85), [(1, 66), (2, 1 + GOODBYE)]), cut_off(1));
        assert!(nodes.have_left(at(85)), "one has left, and nothing can be told to the other");
    }
}
