//! Selects one backend for all ranks. Pure: every rendezvous calls this.

use std::collections::HashMap;

use ryzanstein_config::BackendChoice;
use serde::{Deserialize, Serialize};

use crate::membership::capability::{Capability, ComponentVersion, Exclusive};
use crate::membership::roster::Candidate;
use crate::types::backend_kind::BackendKind;
use crate::types::rank::{self, Rank};

/// Maximum number of reasons in a message about an unusable backend.
const MAX_REASONS: usize = 4;

/// The one backend for all ranks, and the reason for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackendSelection {
    /// The backend of all ranks.
    pub backend: BackendKind,
    /// The reason for this backend, and those against the preferred ones.
    pub reason: String,
}

/// Selects the backend that all candidates (in rank order) use.
///
/// # Errors
/// Names the ranks which want different backends, or cannot use the one demanded, and why.
pub fn select_backend(candidates: &[Candidate]) -> Result<BackendSelection, String> {
    let first = candidates.first().ok_or("there are no ranks")?;
    let differs = |(_, other): &(Rank, &Candidate)| other.wanted != first.wanted;
    if let Some((rank, other)) = Rank::all(candidates.len()).zip(candidates).find(differs) {
        let (first, other) = (first.wanted, other.wanted);
        return Err(format!(
            "ranks were told to use different backends: rank 0 wants `{first}`, rank {rank} wants `{other}`; give every rank \
             the same process_group.backend"
        ));
    }
    let mut refused = Vec::new();
    for &kind in BackendKind::allowed_by(first.wanted) {
        let reasons = obstacles(candidates, kind);
        let why = if reasons.is_empty() {
            conflict(candidates, kind)
        } else {
            Some(describe(&reasons, candidates.len()))
        };
        if let Some(why) = why {
            refused.push(format!("not `{kind}`: {why}"));
            continue;
        }
        let reason = match first.wanted {
            BackendChoice::Auto => format!("`{kind}` is the best that every rank can use"),
            _ => format!("`{kind}` was asked for"),
        };
        let reason = refused.iter().fold(reason, |reason, refused| format!("{reason}; {refused}"));
        return Ok(BackendSelection { backend: kind, reason });
    }
    Err(refused.join("; "))
}

fn capability(candidate: &Candidate, kind: BackendKind) -> Option<&Capability> {
    candidate.capabilities.iter().find(|capability| capability.backend == kind)
}

/// Returns the reason why ranks cannot use a backend together that each of them can use alone.
fn conflict(candidates: &[Candidate], kind: BackendKind) -> Option<String> {
    let all = || Rank::all(candidates.len()).zip(candidates);
    let mut seen: HashMap<&str, Rank> = HashMap::new();
    for (rank, candidate) in all() {
        let Some(exclusive) = capability(candidate, kind).and_then(|c| c.exclusive.as_ref()) else {
            continue;
        };
        if let Some(first) = seen.insert(&exclusive.id, rank) {
            let Exclusive { name, rule, .. } = exclusive;
            let host = &candidate.host;
            return Some(format!("ranks {first} and {rank} on host {host} would share {name}: {rule}"));
        }
    }
    let mut versions = all().filter_map(|(rank, c)| Some((rank, capability(c, kind)?.version.as_ref()?)));
    let (first, mine) = versions.next()?;
    let (other, theirs) = versions.find(|(_, theirs)| theirs.version != mine.version)?;
    let ComponentVersion { component, version, rule } = mine;
    Some(format!("rank {first} has {component} {version} and rank {other} has {}: {rule}", theirs.version))
}

fn obstacle(candidate: &Candidate, kind: BackendKind) -> Option<String> {
    match capability(candidate, kind) {
        Some(capability) => capability.obstacle.clone(),
        None => Some("it does not say that it can".into()),
    }
}

/// Returns the reasons why a backend cannot be used, each with the ranks that have it.
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

/// Describes the reasons in words. If every rank has a reason of its own, the first few stand for all.
fn describe(reasons: &[(String, Vec<Rank>)], world_size: usize) -> String {
    let who = |ranks: &[Rank]| match ranks {
        all if all.len() == world_size => "no rank can use it".into(),
        [one] => format!("rank {one} cannot use it"),
        some => format!("ranks {} cannot use it", rank::list(some)),
    };
    let (told, rest) = reasons.split_at(reasons.len().min(MAX_REASONS));
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
    use crate::membership::roster::Cpus;

    fn with_gpus(wanted: BackendChoice, gpus: &[(&str, &str)]) -> Vec<Candidate> {
        gpus.iter()
            .map(|(uuid, version)| {
                let exclusive = Exclusive {
                    id: (*uuid).into(),
                    name: format!("one GPU, {uuid}"),
                    rule: "one each".into(),
                };
                let version = ComponentVersion {
                    component: "NCCL".into(),
                    version: (*version).into(),
                    rule: "install one everywhere".into(),
                };
                let nccl = Capability {
                    exclusive: Some(exclusive),
                    version: Some(version),
                    ..Capability::usable(BackendKind::Nccl)
                };
                Candidate {
                    host: "h".into(),
                    pid: 1,
                    cpus: Cpus::default(),
                    data_address: None,
                    wanted,
                    capabilities: vec![nccl, Capability::usable(BackendKind::Tcp)],
                }
            })
            .collect()
    }

    fn refusal(candidates: &[Candidate]) -> String {
        select_backend(candidates).unwrap_err()
    }

    #[test]
    fn auto_takes_nccl_when_every_rank_has_a_gpu_of_its_own_and_one_version() {
        let ranks = with_gpus(BackendChoice::Auto, &[("GPU-a", "2.28.3"), ("GPU-b", "2.28.3")]);
        assert_eq!(select_backend(&ranks).unwrap().backend, BackendKind::Nccl);
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_and_take_tcp_or_nothing() {
        let gpus = [("GPU-a", "2.28.3"), ("GPU-b", "2.28.3"), ("GPU-a", "2.28.3")];
        let selected = select_backend(&with_gpus(BackendChoice::Auto, &gpus)).unwrap();
        assert_eq!(selected.backend, BackendKind::Tcp);
        let why = "not `nccl`: ranks 0 and 2 on host h would share one GPU, GPU-a: one each";
        assert!(selected.reason.contains(why), "{}", selected.reason);
        assert_eq!(refusal(&with_gpus(BackendChoice::Nccl, &gpus)), why);
    }

    #[test]
    fn versions_that_differ_only_in_the_patch_are_named_too() {
        for other in ["2.27.5", "2.28.7"] {
            let gpus = [("GPU-a", "2.28.3"), ("GPU-b", other)];
            let refused = refusal(&with_gpus(BackendChoice::Nccl, &gpus));
            let named = format!("rank 0 has NCCL 2.28.3 and rank 1 has {other}: install one everywhere");
            assert!(refused.contains(&named), "{refused}");
        }
    }

    #[test]
    fn ranks_that_want_different_backends_are_named() {
        let mut ranks = with_gpus(BackendChoice::Auto, &[("GPU-a", "2.28.3"), ("GPU-b", "2.28.3")]);
        ranks[1].wanted = BackendChoice::Tcp;
        let refused = refusal(&ranks);
        assert!(refused.contains("rank 0 wants `auto`, rank 1 wants `tcp`"), "{refused}");
        assert_eq!(refusal(&[]), "there are no ranks");
    }

    #[test]
    fn a_rank_that_cannot_is_named_with_its_reason() {
        let mut ranks = with_gpus(BackendChoice::Auto, &[("GPU-a", "2.28.3"), ("GPU-b", "2.28.3")]);
        ranks[1].capabilities[0] =
            Capability::unusable(BackendKind::Nccl, "fewer GPUs than ranks", "local rank 1 needs GPU 1");
        let selected = select_backend(&ranks).unwrap();
        let why = "not `nccl`: rank 1 cannot use it: local rank 1 needs GPU 1";
        assert!(selected.reason.contains(why), "{}", selected.reason);
    }

    #[test]
    fn ranks_with_different_reasons_are_told_each_with_its_own() {
        let gpus: Vec<String> = (0..4).map(|gpu| format!("GPU-{gpu}")).collect();
        let gpus: Vec<_> = gpus.iter().map(|uuid| (uuid.as_str(), "2.28.3")).collect();
        let mut ranks = with_gpus(BackendChoice::Nccl, &gpus);
        let mut refusal_for = |reasons: [&str; 4]| {
            for (rank, reason) in ranks.iter_mut().zip(reasons) {
                rank.capabilities[0].obstacle = Some(reason.into());
            }
            refusal(&ranks)
        };
        assert_eq!(refusal_for(["no driver"; 4]), "not `nccl`: no rank can use it: no driver");
        assert_eq!(
            refusal_for(["no driver", "no NCCL", "no driver", "no driver"]),
            "not `nccl`: ranks 0, 2 and 3 cannot use it: no driver; rank 1 cannot use it: no NCCL"
        );
    }

    #[test]
    fn of_very_many_reasons_some_are_told_and_all_ranks() {
        let reasons: Vec<_> = Rank::all(7).map(|rank| (format!("reason {rank}"), vec![rank])).collect();
        let told = describe(&reasons, 7);
        assert!(told.contains("rank 3 cannot use it: reason 3"), "{told}");
        assert!(told.ends_with("; ranks 4, 5 and 6 cannot use it either"), "{told}");
    }
}
