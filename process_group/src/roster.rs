//! Who is in: what rendezvous hands over, and how all ranks come to one backend.

use std::fmt;
use std::net::SocketAddr;

use ryzanstein_config::BackendChoice;
use serde::{Deserialize, Serialize};

use crate::rank::{self, Epoch, LocalRank, Rank};

/// An implementation of the collectives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    /// NVIDIA's library, for GPUs.
    Nccl,
    /// Ranks as threads of one process.
    Loopback,
    /// Our own collectives over TCP, for CPUs.
    Tcp,
}

impl BackendKind {
    /// All kinds; `auto` takes the first that every rank can use.
    pub const BY_PREFERENCE: [Self; 3] = [Self::Nccl, Self::Loopback, Self::Tcp];

    /// The name used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Loopback => "loopback",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether one backend can be used by one rank, and why not.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Capability {
    /// Which backend.
    pub backend: BackendKind,
    /// `None` when it can be used, else the reason.
    pub obstacle: Option<String>,
}

/// What a rank says of itself when it joins.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Name of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Where its data plane listens, if it has one.
    pub data_address: Option<SocketAddr>,
    /// The backend it was told to use.
    pub wanted: BackendChoice,
    /// What it could use.
    pub capabilities: Vec<Capability>,
}

/// One rank of the roster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Its global rank.
    pub rank: Rank,
    /// Its position on its host.
    pub local_rank: LocalRank,
    /// Its host's position.
    pub node_rank: u32,
    /// Its host's name.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Where its data plane listens.
    pub data_address: Option<SocketAddr>,
}

/// Everybody, in rank order, in one epoch. Building one by hand is enough to start a group without a launcher.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Roster {
    /// The generation.
    pub epoch: Epoch,
    /// Member `i` has rank `i`.
    pub members: Vec<Member>,
}

impl Roster {
    /// Number of ranks in the job.
    pub fn world_size(&self) -> usize {
        self.members.len()
    }

    /// How many ranks share the host of `rank`, itself included.
    pub fn local_world_size(&self, rank: Rank) -> usize {
        let host = &self.members[rank.index()].host;
        self.members.iter().filter(|m| m.host == *host).count()
    }
}

/// The per-job secret that every connection proves to know. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A fresh secret from the operating system's random numbers.
    ///
    /// # Panics
    /// When the operating system has none to give, as no program can go on safely then.
    pub fn random() -> Self {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        Self(bytes)
    }

    /// Takes 32 random bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, for a MAC or for handing down to a child.
    pub const fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The one backend for all ranks, and why it was taken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Agreement {
    /// What everybody uses.
    pub backend: BackendKind,
    /// Why this one, and why not the ones before it.
    pub reason: String,
}

/// Picks the backend that all candidates (in rank order) use. Pure: every rendezvous calls this.
///
/// # Errors
/// A sentence that names the ranks which want different backends, or cannot use the one demanded, and why.
pub fn agree(candidates: &[Candidate]) -> Result<Agreement, String> {
    let Some(first) = candidates.first() else { return Err("there are no ranks".into()) };
    let others = ranks_where(candidates, |c| c.wanted != first.wanted);
    if let Some(&other) = others.first() {
        return Err(format!(
            "ranks were told to use different backends: rank 0 wants `{}`, rank {other} wants `{}`; \
             give every rank the same process_group.backend",
            first.wanted,
            candidates[other.index()].wanted
        ));
    }
    let kinds: Vec<BackendKind> = match first.wanted {
        BackendChoice::Auto => BackendKind::BY_PREFERENCE.to_vec(),
        BackendChoice::Nccl => vec![BackendKind::Nccl],
        BackendChoice::Tcp => vec![BackendKind::Tcp],
        BackendChoice::Loopback => vec![BackendKind::Loopback],
        other => return Err(format!("`{other}` is no backend of this version")),
    };
    let mut refused = Vec::new();
    for kind in kinds {
        let cannot = ranks_where(candidates, |c| obstacle(c, kind).is_some());
        let Some(&one) = cannot.first() else {
            let mut reason = match first.wanted {
                BackendChoice::Auto => format!("`{kind}` is the best that every rank can use"),
                _ => format!("`{kind}` was asked for"),
            };
            for r in &refused {
                reason = format!("{reason}; {r}");
            }
            return Ok(Agreement { backend: kind, reason });
        };
        let why = obstacle(&candidates[one.index()], kind).unwrap_or_default();
        let who = match cannot.len() {
            n if n == candidates.len() => "no rank can use it".into(),
            1 => format!("rank {one} cannot use it"),
            _ => format!("ranks {} cannot use it", rank::list(&cannot)),
        };
        refused.push(format!("not `{kind}`: {who}: {why}"));
    }
    Err(refused.join("; "))
}

fn ranks_where(candidates: &[Candidate], test: impl Fn(&Candidate) -> bool) -> Vec<Rank> {
    Rank::all(candidates.len()).zip(candidates).filter(|(_, c)| test(c)).map(|(r, _)| r).collect()
}

fn obstacle(candidate: &Candidate, kind: BackendKind) -> Option<String> {
    match candidate.capabilities.iter().find(|c| c.backend == kind) {
        Some(capability) => capability.obstacle.clone(),
        None => Some("it does not say that it can".into()),
    }
}
