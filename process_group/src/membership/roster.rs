//! The members of a job: the information that a rank provides, and the roster that the rendezvous returns.

use std::fmt;
use std::net::SocketAddr;

use ryzanstein_config::BackendChoice;
use serde::{Deserialize, Serialize};

use crate::membership::capability::Capability;
use crate::types::rank::{Epoch, LocalRank, Rank};

/// The CPUs that a rank may use.
///
/// Launchers such as `mpirun` and `srun` bind each rank to CPUs of its own; without binding, all ranks of a host have the same list
/// and share them. Lists that differ but overlap count as separate; so does a cgroup limit that ranks with different lists share.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Cpus {
    /// Number of CPUs that it may keep busy: those of the list, or fewer if a cgroup limits it.
    pub count: u32,
    /// List of the CPUs in the format of Linux: `0-3,8`. Empty if unknown.
    pub list: String,
}

impl Cpus {
    /// Returns the CPUs of the calling thread.
    pub fn current() -> Self {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        let list =
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { count: count as u32, list: list.trim().to_owned() }
    }
}

/// The information that a rank provides when it joins. The order of the fields of this, and of what it contains, is that of the wire.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Name of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The CPUs it may use.
    pub cpus: Cpus,
    /// The address at which its data plane listens, if it has one.
    pub data_address: Option<SocketAddr>,
    /// The configured backend.
    #[serde(with = "as_text")]
    pub wanted: BackendChoice,
    /// The backends that it could use.
    pub capabilities: Vec<Capability>,
}

/// Serializes the backend as the text of its setting.
mod as_text {
    use ryzanstein_config::BackendChoice;
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields so")]
    pub(super) fn serialize<S: Serializer>(value: &BackendChoice, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BackendChoice, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// One rank of the roster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Its global rank.
    pub rank: Rank,
    /// Its position on its host.
    pub local_rank: LocalRank,
    /// Position of its host.
    pub node_rank: u32,
    /// Its host's name.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// The CPUs it may use.
    pub cpus: Cpus,
    /// The address at which its data plane listens.
    pub data_address: Option<SocketAddr>,
}

impl Member {
    /// Returns its host and its list of CPUs: members that agree in both share their CPUs.
    pub(crate) fn cpus_shared(&self) -> (&str, &str) {
        (&self.host, &self.cpus.list)
    }
}

/// All members, in rank order, in one epoch. A roster built by hand is enough to start a group without a launcher. The order of the
/// fields of this, and of what it contains, is that of the wire.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Roster {
    /// The epoch.
    pub epoch: Epoch,
    /// The members; member `i` has rank `i`.
    pub members: Vec<Member>,
}

impl Roster {
    /// Returns the number of ranks in the job.
    pub fn world_size(&self) -> usize {
        self.members.len()
    }

    /// Returns the number of ranks that share the host of `rank`, including `rank`.
    pub fn local_world_size(&self, rank: Rank) -> usize {
        let host = &self.members[rank.index()].host;
        self.members.iter().filter(|m| m.host == *host).count()
    }

    /// Returns how many of `ranks` share the CPUs of `rank`, including `rank`.
    pub(crate) fn sharing_cpus(&self, ranks: impl Iterator<Item = Rank>, rank: Rank) -> usize {
        let of = |rank: Rank| self.members[rank.index()].cpus_shared();
        ranks.filter(|other| of(*other) == of(rank)).count()
    }

    /// Returns true if more ranks share the CPUs of `rank` than there are CPUs.
    pub(crate) fn cpus_are_short(&self, rank: Rank) -> bool {
        self.sharing_cpus(Rank::all(self.world_size()), rank) > self.members[rank.index()].cpus.count as usize
    }
}

/// The per-job secret, whose knowledge every connection proves. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Creates a new secret from the operating system's random numbers.
    ///
    /// # Panics
    /// When the operating system has none, as no program can continue safely then.
    pub fn random() -> Self {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        Self(bytes)
    }

    /// Creates a secret from 32 random bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes, for a MAC or for passing to a child process.
    pub const fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::testing;

    /// Creates one member per entry. An entry is a host, a number of CPUs and their list.
    pub(crate) fn members(on: &[(&str, u32, &str)]) -> Vec<Member> {
        let member = |(rank, (host, count, list)): (usize, &(&str, u32, &str))| Member {
            host: (*host).into(),
            cpus: Cpus { count: *count, list: (*list).into() },
            ..testing::member(Rank(rank as u32))
        };
        on.iter().enumerate().map(member).collect()
    }

    #[test]
    fn ranks_share_cpus_if_host_and_list_are_the_same() {
        let ranks = [
            ("a", 2, "0-1"),
            ("a", 2, "0-1"),
            ("b", 2, "0-1"),
            ("a", 1, "2"),
            ("a", 1, "2"),
            ("b", 2, "0-1"),
        ];
        let roster = Roster { epoch: Epoch(1), members: members(&ranks) };
        let sharing = |rank| roster.sharing_cpus(Rank::all(ranks.len()), Rank(rank));
        assert_eq!([0, 1, 2, 3, 4, 5].map(sharing), [2; 6]);
        assert_eq!(roster.sharing_cpus([Rank(0), Rank(2), Rank(3)].into_iter(), Rank(0)), 1, "of some ranks");
        assert_eq!([0, 2, 3].map(|rank| roster.cpus_are_short(Rank(rank))), [false, false, true]);
    }
}
