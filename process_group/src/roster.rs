//! Who is in: what rendezvous hands over, and how all ranks come to one backend.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;

use ryzanstein_config::BackendChoice;
use serde::{Deserialize, Serialize};

use crate::rank::{self, Epoch, LocalRank, Rank};

/// Most reasons told of why a backend cannot be used.
const MOST_REASONS: usize = 4;

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

/// The GPU that a rank would use, and the library it would use it with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Gpu {
    /// Its identity, `GPU-…`.
    pub uuid: String,
    /// Its name, such as `NVIDIA H200`.
    pub name: String,
    /// NCCL's version as NCCL numbers it: 22803 is 2.28.3.
    pub nccl: u32,
}

/// What a rank says of itself when it joins.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Name of its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Processors that its host lends it.
    pub cpus: u32,
    /// Where its data plane listens, if it has one.
    pub data_address: Option<SocketAddr>,
    /// The backend it was told to use.
    pub wanted: BackendChoice,
    /// What it could use.
    pub capabilities: Vec<Capability>,
    /// The GPU it would use for NCCL, where it can.
    pub gpu: Option<Gpu>,
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
    /// Processors that its host lends it.
    pub cpus: u32,
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
    if let Some(other) = candidates.iter().position(|c| c.wanted != first.wanted) {
        return Err(format!(
            "ranks were told to use different backends: rank 0 wants `{}`, rank {other} wants `{}`; \
             give every rank the same process_group.backend",
            first.wanted, candidates[other].wanted
        ));
    }
    let kinds: Vec<BackendKind> = match first.wanted {
        BackendChoice::Auto => BackendKind::BY_PREFERENCE.to_vec(),
        BackendChoice::Nccl => vec![BackendKind::Nccl],
        BackendChoice::Tcp => vec![BackendKind::Tcp],
        BackendChoice::Loopback => vec![BackendKind::Loopback],
    };
    let mut refused = Vec::new();
    for kind in kinds {
        let reasons = obstacles(candidates, kind);
        if !reasons.is_empty() {
            refused.push(format!("not `{kind}`: {}", tell(&reasons, candidates.len())));
            continue;
        }
        if kind == BackendKind::Nccl
            && let Some(conflict) = conflict(candidates)
        {
            refused.push(format!("not `{kind}`: {conflict}"));
            continue;
        }
        let mut reason = match first.wanted {
            BackendChoice::Auto => format!("`{kind}` is the best that every rank can use"),
            _ => format!("`{kind}` was asked for"),
        };
        for r in &refused {
            reason = format!("{reason}; {r}");
        }
        return Ok(Agreement { backend: kind, reason });
    }
    Err(refused.join("; "))
}

/// What keeps ranks from using NCCL together that can each use it alone.
fn conflict(candidates: &[Candidate]) -> Option<String> {
    let ranks: Vec<(Rank, &Candidate, &Gpu)> = Rank::all(candidates.len())
        .zip(candidates)
        .filter_map(|(r, c)| Some((r, c, c.gpu.as_ref()?)))
        .collect();
    let mut seen: HashMap<&str, Rank> = HashMap::new();
    for (rank, candidate, gpu) in &ranks {
        if let Some(first) = seen.insert(&gpu.uuid, *rank) {
            return Some(format!(
                "ranks {first} and {rank} on host {} would share one GPU, the {} {}: NCCL needs one for each rank; \
                 start at most as many ranks as there are GPUs, each with its own LOCAL_RANK",
                candidate.host, gpu.name, gpu.uuid
            ));
        }
    }
    let (first, _, gpu) = ranks.first()?;
    let version = |g: &Gpu| format!("{}.{}.{}", g.nccl / 10_000, g.nccl % 10_000 / 100, g.nccl % 100);
    let (other, _, different) = ranks.iter().find(|(_, _, g)| g.nccl != gpu.nccl)?;
    Some(format!(
        "rank {first} has NCCL {} and rank {other} has {}: NCCL lets only ranks of exactly the same version together; \
         install one everywhere, or set device.nccl",
        version(gpu),
        version(different)
    ))
}

fn obstacle(candidate: &Candidate, kind: BackendKind) -> Option<String> {
    match candidate.capabilities.iter().find(|c| c.backend == kind) {
        Some(capability) => capability.obstacle.clone(),
        None => Some("it does not say that it can".into()),
    }
}

/// Why a backend cannot be used, each reason with the ranks that have it.
fn obstacles(candidates: &[Candidate], kind: BackendKind) -> Vec<(String, Vec<Rank>)> {
    let mut reasons: Vec<(String, Vec<Rank>)> = Vec::new();
    for (rank, candidate) in Rank::all(candidates.len()).zip(candidates) {
        let Some(why) = obstacle(candidate, kind) else { continue };
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, ranks)) => ranks.push(rank),
            None => reasons.push((why, vec![rank])),
        }
    }
    reasons
}

/// Puts them into words. Where every rank has a reason of its own, the first few stand for all.
fn tell(reasons: &[(String, Vec<Rank>)], world_size: usize) -> String {
    let who = |ranks: &[Rank]| match ranks {
        all if all.len() == world_size => "no rank can use it".into(),
        [one] => format!("rank {one} cannot use it"),
        some => format!("ranks {} cannot use it", rank::list(some)),
    };
    let (told, rest) = reasons.split_at(reasons.len().min(MOST_REASONS));
    let mut words: Vec<_> = told.iter().map(|(why, ranks)| format!("{}: {why}", who(ranks))).collect();
    let mut rest: Vec<Rank> = rest.iter().flat_map(|(_, ranks)| ranks).copied().collect();
    rest.sort_unstable();
    if !rest.is_empty() {
        words.push(format!("{} either", who(&rest)));
    }
    words.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_gpus(wanted: BackendChoice, gpus: &[(&str, u32)]) -> Vec<Candidate> {
        let can = |backend| Capability { backend, obstacle: None };
        gpus.iter()
            .map(|(uuid, nccl)| Candidate {
                host: "h".into(),
                pid: 1,
                cpus: 1,
                data_address: None,
                wanted,
                capabilities: vec![can(BackendKind::Nccl), can(BackendKind::Tcp)],
                gpu: Some(Gpu { uuid: (*uuid).into(), name: "NVIDIA H200".into(), nccl: *nccl }),
            })
            .collect()
    }

    #[test]
    fn auto_takes_nccl_when_every_rank_has_a_gpu_of_its_own_and_one_version() {
        let ranks = with_gpus(BackendChoice::Auto, &[("GPU-a", 22_803), ("GPU-b", 22_803)]);
        assert_eq!(agree(&ranks).unwrap().backend, BackendKind::Nccl);
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_and_take_tcp_or_nothing() {
        let gpus = [("GPU-a", 22_803), ("GPU-b", 22_803), ("GPU-a", 22_803)];
        let agreed = agree(&with_gpus(BackendChoice::Auto, &gpus)).unwrap();
        assert_eq!(agreed.backend, BackendKind::Tcp);
        assert!(agreed.reason.contains("ranks 0 and 2 on host h would share one GPU"), "{}", agreed.reason);
        let refused = agree(&with_gpus(BackendChoice::Nccl, &gpus)).unwrap_err();
        assert!(refused.contains("not `nccl`: ranks 0 and 2") && refused.contains("GPU-a"), "{refused}");
    }

    #[test]
    fn versions_of_nccl_that_differ_only_in_the_patch_are_named_too() {
        for (other, words) in [(22_705, "2.27.5"), (22_807, "2.28.7")] {
            let gpus = [("GPU-a", 22_803), ("GPU-b", other)];
            let refused = agree(&with_gpus(BackendChoice::Nccl, &gpus)).unwrap_err();
            let named = format!("rank 0 has NCCL 2.28.3 and rank 1 has {words}");
            assert!(refused.contains(&named), "{refused}");
        }
    }

    #[test]
    fn a_rank_that_cannot_is_named_with_its_reason() {
        let mut ranks = with_gpus(BackendChoice::Auto, &[("GPU-a", 22_803), ("GPU-b", 22_803)]);
        ranks[1].capabilities[0].obstacle = Some("local rank 1 needs GPU 1".into());
        ranks[1].gpu = None;
        let agreed = agree(&ranks).unwrap();
        assert!(
            agreed.reason.contains("not `nccl`: rank 1 cannot use it: local rank 1 needs GPU 1"),
            "{}",
            agreed.reason
        );
    }
    #[test]
    fn ranks_with_different_reasons_are_told_each_with_its_own() {
        let gpus: Vec<(String, u32)> = (0..4).map(|gpu| (format!("GPU-{gpu}"), 22_803)).collect();
        let gpus: Vec<_> = gpus.iter().map(|(uuid, nccl)| (uuid.as_str(), *nccl)).collect();
        let mut ranks = with_gpus(BackendChoice::Nccl, &gpus);
        let mut refusal = |reasons: [&str; 4]| {
            for (rank, reason) in ranks.iter_mut().zip(reasons) {
                rank.capabilities[0].obstacle = Some(reason.into());
            }
            agree(&ranks).unwrap_err()
        };
        assert_eq!(refusal(["no driver"; 4]), "not `nccl`: no rank can use it: no driver");
        assert_eq!(
            refusal(["no driver", "no NCCL", "no driver", "no driver"]),
            "not `nccl`: ranks 0, 2 and 3 cannot use it: no driver; rank 1 cannot use it: no NCCL"
        );
    }

    #[test]
    fn of_very_many_reasons_some_are_told_and_all_ranks() {
        let reasons: Vec<_> = Rank::all(7).map(|rank| (format!("reason {rank}"), vec![rank])).collect();
        let told = tell(&reasons, 7);
        assert!(told.contains("rank 3 cannot use it: reason 3"), "{told}");
        assert!(told.ends_with("; ranks 4, 5 and 6 cannot use it either"), "{told}");
    }
}
