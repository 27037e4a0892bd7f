//! The rendezvous of ranks: the trait, and the implementation for ranks that share a process.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::membership::roster::{Candidate, Member, Roster, Secret};
use crate::membership::select::{BackendSelection, select_backend};
use crate::membership::store::{MemoryStore, Store};
use crate::types::rank::{Epoch, LocalRank, Rank};
use crate::types::sync::lock;

/// The result of joining, for one rank.
pub struct Membership {
    /// This rank.
    pub rank: Rank,
    /// All members of the job.
    pub roster: Roster,
    /// The one backend for all ranks, and the reason for it.
    pub selection: BackendSelection,
    /// The job's shared store.
    pub store: Arc<dyn Store>,
    /// The secret that proves membership on data connections.
    pub secret: Secret,
}

impl Membership {
    /// Rejects a membership that cannot be. `announced` is the number of ranks that the rendezvous knew before.
    pub(crate) fn check(&self, announced: Option<usize>) -> Result<()> {
        let (rank, members) = (self.rank, &self.roster.members);
        let n = members.len();
        let wrong = if n == 0 {
            "no members".to_owned()
        } else if let Some(announced) = announced.filter(|announced| *announced != n) {
            format!("{n} members, and the rendezvous has announced {announced}")
        } else if let Some((member, place)) =
            members.iter().zip(Rank::all(n)).find(|(m, place)| m.rank != *place)
        {
            format!("rank {} as member {place} of {n}", member.rank)
        } else if rank.index() >= n {
            format!("rank {rank} for this process, and only {n} members")
        } else {
            return Ok(());
        };
        Err(Error::Rendezvous(format!(
            "`join` returned {wrong}; correct this implementation of `Rendezvous`: it must return every rank from 0 once, in order, \
             and this process's own"
        )))
    }
}

/// The meeting point of ranks.
#[diagnostic::on_unimplemented(
    message = "ranks cannot meet through `{Self}`",
    note = "use `MemoryRendezvous` for threads, what `ryzanstein_orchestrator::rendezvous::connect` returns for processes, or implement \
            `Rendezvous`"
)]
pub trait Rendezvous: Send + Sync {
    /// Returns the local address at which the other ranks can reach this one, for the data plane to listen on.
    fn local_address(&self) -> Result<IpAddr>;

    /// Returns this rank's position on its host, which determines its GPU, if it is known before joining.
    fn local_rank(&self) -> Option<LocalRank> {
        None
    }

    /// Returns the number of ranks, if it is known before joining. A rank alone listens nowhere.
    fn world_size(&self) -> Option<usize> {
        None
    }

    /// Waits for all ranks and returns their agreement.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the ranks that did not join, or the reason why no backend suits all.
    fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership>;
}

/// The rendezvous of ranks that are threads of one process: one handle per rank.
#[derive(Clone)]
pub struct MemoryRendezvous {
    rank: Rank,
    shared: Arc<Shared>,
}

struct Shared {
    meeting: Mutex<Meeting>,
    joined: Condvar,
    store: Arc<MemoryStore>,
    secret: Secret,
}

/// The ranks that wait for each other.
struct Meeting {
    candidates: Vec<Option<Candidate>>,
    /// Number of earlier meetings that a deadline ended, and the ranks that were not there at the last one.
    failed: u64,
    missing: Vec<Rank>,
}

impl std::fmt::Debug for MemoryRendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRendezvous").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl MemoryRendezvous {
    /// Creates handles for ranks `0..world_size`. Give each thread its own.
    pub fn new(world_size: usize) -> Vec<Self> {
        let shared = Arc::new(Shared {
            meeting: Mutex::new(Meeting {
                candidates: vec![None; world_size],
                failed: 0,
                missing: Vec::new(),
            }),
            joined: Condvar::new(),
            store: Arc::new(MemoryStore::new()),
            secret: Secret::random(),
        });
        Rank::all(world_size).map(|rank| Self { rank, shared: Arc::clone(&shared) }).collect()
    }
}

impl Rendezvous for MemoryRendezvous {
    fn local_address(&self) -> Result<IpAddr> {
        Ok(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }

    fn local_rank(&self) -> Option<LocalRank> {
        Some(LocalRank(self.rank.0))
    }

    fn world_size(&self) -> Option<usize> {
        Some(lock(&self.shared.meeting).candidates.len())
    }

    fn join(&self, candidate: Candidate, deadline: Instant) -> Result<Membership> {
        let started = Instant::now();
        let shared = &*self.shared;
        let mut meeting = lock(&shared.meeting);
        let own = &mut meeting.candidates[self.rank.index()];
        if own.is_some() {
            return Err(Error::Rendezvous(format!(
                "rank {} has joined already; each rank joins once, with a handle of its own",
                self.rank
            )));
        }
        *own = Some(candidate);
        shared.joined.notify_all();
        let (earlier, patience) = (meeting.failed, deadline.saturating_duration_since(started));
        let goes_on = |meeting: &mut Meeting| meeting.failed == earlier && meeting.candidates.contains(&None);
        let waited = shared.joined.wait_timeout_while(meeting, patience, goes_on);
        let mut meeting = waited.unwrap_or_else(PoisonError::into_inner).0;
        if goes_on(&mut meeting) {
            // The first deadline ends the meeting for all, so that they name the same ranks, and later ones meet anew.
            let Meeting { candidates, failed, missing } = &mut *meeting;
            let ranks = Rank::all(candidates.len()).zip(candidates.iter());
            *missing = ranks.filter(|(_, candidate)| candidate.is_none()).map(|(rank, _)| rank).collect();
            candidates.fill(None);
            *failed += 1;
            shared.joined.notify_all();
        }
        if meeting.failed != earlier {
            let missing = meeting.missing.clone();
            return Err(Error::Timeout { what: "joining".into(), waited: started.elapsed(), missing });
        }
        let candidates = &meeting.candidates;
        let all: Vec<Candidate> = candidates.iter().flatten().cloned().collect();
        drop(meeting);
        let selection = select_backend(&all).map_err(Error::Configuration)?;
        let members = Rank::all(all.len())
            .zip(all)
            .map(|(rank, c)| Member {
                rank,
                local_rank: LocalRank(rank.0),
                node_rank: 0,
                host: c.host,
                pid: c.pid,
                cpus: c.cpus,
                data_address: c.data_address,
            })
            .collect();
        Ok(Membership {
            rank: self.rank,
            roster: Roster { epoch: Epoch(1), members },
            selection,
            store: Arc::clone(&shared.store) as Arc<dyn Store>,
            secret: shared.secret.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::capability::Capability;
    use crate::membership::roster::Cpus;
    use crate::testing::{self, LATE, in_time};
    use crate::types::backend_kind::BackendKind;
    use ryzanstein_config::BackendChoice;

    #[test]
    fn a_membership_that_cannot_be_is_refused_with_the_reason() {
        let cases: [(u32, &[u32], Option<usize>, &str); 5] = [
            (0, &[], None, "no members"),
            (0, &[0], Some(2), "1 members, and the rendezvous has announced 2"),
            (0, &[1, 0], Some(2), "rank 1 as member 0 of 2"),
            (0, &[0, 0], None, "rank 0 as member 1 of 2"),
            (2, &[0, 1], None, "rank 2 for this process, and only 2 members"),
        ];
        for (rank, ranks, announced, wrong) in cases {
            let members = ranks.iter().map(|rank| testing::member(Rank(*rank))).collect();
            let membership = Membership {
                rank: Rank(rank),
                roster: Roster { epoch: Epoch(1), members },
                selection: BackendSelection { backend: BackendKind::Tcp, reason: String::new() },
                store: Arc::new(MemoryStore::new()),
                secret: Secret::random(),
            };
            let error = membership.check(announced).unwrap_err().to_string();
            assert!(error.contains(&format!("returned {wrong};")), "{error}");
        }
    }

    fn candidate(pid: u32) -> Candidate {
        Candidate {
            host: "here".into(),
            pid,
            cpus: Cpus::default(),
            data_address: None,
            wanted: BackendChoice::Tcp,
            capabilities: vec![Capability::usable(BackendKind::Tcp)],
        }
    }

    #[test]
    fn a_second_join_of_a_rank_is_refused_and_the_first_goes_on() {
        in_time(|| {
            let [zero, one] = <[MemoryRendezvous; 2]>::try_from(MemoryRendezvous::new(2)).unwrap();
            let deadline = Instant::now() + LATE;
            let again = zero.clone();
            let first = std::thread::spawn(move || zero.join(candidate(1), deadline));
            while lock(&again.shared.meeting).candidates[0].is_none() {
                std::thread::yield_now();
            }
            let error = again.join(candidate(2), deadline).map(drop).unwrap_err();
            assert!(error.to_string().contains("rank 0 has joined already"), "{error}");
            let pids = |of: Membership| of.roster.members.iter().map(|member| member.pid).collect::<Vec<_>>();
            assert_eq!(one.join(candidate(3), deadline).map(pids).unwrap(), [1, 3]);
            assert_eq!(first.join().unwrap().map(pids).unwrap(), [1, 3]);
        });
    }

    #[test]
    fn a_rank_that_comes_when_the_other_has_given_up_does_not_count_it() {
        let ranks = MemoryRendezvous::new(2);
        for (rank, absent) in [(0, 1), (1, 0), (0, 1)] {
            let error = ranks[rank].join(candidate(1), Instant::now()).map(drop).unwrap_err();
            assert!(
                matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(absent)]),
                "{error}"
            );
        }
    }
}
