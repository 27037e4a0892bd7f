//! Assigns ranks to processes: the rank that a process was started with, or one that is chosen here.

use std::collections::{BTreeMap, HashMap};

use ryzanstein_process_group::{Candidate, Epoch, LocalRank, Member, Rank, Roster};

use super::event::{Participant, Refusal, RequestId};

/// The processes that have joined an epoch so far.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Admission {
    world_size: u32,
    numbered: BTreeMap<Rank, (RequestId, Participant)>,
    /// The processes without a rank, in order of arrival.
    unnumbered: Vec<(RequestId, Participant)>,
}

impl Admission {
    pub(super) const fn new(world_size: u32) -> Self {
        Self { world_size, numbered: BTreeMap::new(), unnumbered: Vec::new() }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.len() == self.world_size as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn len(&self) -> usize {
        self.numbered.len() + self.unnumbered.len()
    }

    pub(super) fn contains(&self, rank: Rank) -> bool {
        self.numbered.contains_key(&rank)
    }

    pub(super) fn admit(&mut self, request: RequestId, participant: Participant) -> Result<(), Refusal> {
        if let Some(rank) = participant.rank {
            if rank.0 >= self.world_size {
                let who = participant.describe();
                return Err(Refusal::Configuration(format!(
                    "{who} is out of range: this job has ranks 0 to {}",
                    self.world_size - 1
                )));
            }
            if let Some((_, holder)) = self.numbered.get(&rank) {
                let Candidate { host, pid, .. } = &holder.candidate;
                return Err(taken(&participant, rank, host, *pid));
            }
        }
        if self.is_complete() {
            return Err(all_taken(&participant, self.world_size));
        }
        match participant.rank {
            Some(rank) => drop(self.numbered.insert(rank, (request, participant))),
            None => self.unnumbered.push((request, participant)),
        }
        Ok(())
    }

    pub(super) fn withdraw(&mut self, request: RequestId) {
        self.numbered.retain(|_, (id, _)| *id != request);
        self.unnumbered.retain(|(id, _)| *id != request);
    }

    /// Returns the ranks that have not joined. Processes without a rank count as the lowest free ones.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let free = Rank::all(self.world_size as usize).filter(|rank| !self.contains(*rank));
        free.skip(self.unnumbered.len()).collect()
    }

    pub(super) fn requests(&self) -> Vec<RequestId> {
        self.numbered.values().chain(&self.unnumbered).map(|(request, _)| *request).collect()
    }

    /// Gives ranks to the processes without one, consecutive ones on each host where possible. Returns everything in rank
    /// order.
    pub(super) fn assign_ranks(mut self, epoch: Epoch) -> (Vec<RequestId>, Roster, Vec<Candidate>) {
        let mut arrival: HashMap<String, usize> = HashMap::new();
        for (_, participant) in &self.unnumbered {
            let next = arrival.len();
            arrival.entry(participant.candidate.host.clone()).or_insert(next);
        }
        let mut unnumbered = std::mem::take(&mut self.unnumbered);
        unnumbered.sort_by_key(|(_, participant)| arrival[&participant.candidate.host]);
        let mut unnumbered = unnumbered.into_iter();
        for rank in Rank::all(self.world_size as usize) {
            if !self.contains(rank)
                && let Some(entry) = unnumbered.next()
            {
                self.numbered.insert(rank, entry);
            }
        }

        let mut nodes: HashMap<&str, (u32, u32)> = HashMap::new();
        let mut members = Vec::with_capacity(self.numbered.len());
        for (rank, (_, participant)) in &self.numbered {
            let candidate = &participant.candidate;
            let next = nodes.len() as u32;
            let (node, on_it) = nodes.entry(&candidate.host).or_insert((next, 0));
            members.push(Member {
                rank: *rank,
                local_rank: participant.local_rank.unwrap_or(LocalRank(*on_it)),
                node_rank: participant.node_rank.unwrap_or(*node),
                host: candidate.host.clone(),
                pid: candidate.pid,
                cpus: candidate.cpus.clone(),
                data_address: candidate.data_address,
            });
            *on_it += 1;
        }
        let requests = self.numbered.values().map(|(request, _)| *request).collect();
        let candidates =
            self.numbered.values().map(|(_, participant)| participant.candidate.clone()).collect();
        (requests, Roster { epoch, members }, candidates)
    }
}

/// Returns the refusal of a process whose rank another process has.
pub(super) fn taken(participant: &Participant, rank: Rank, host: &str, pid: u32) -> Refusal {
    let who = participant.describe();
    Refusal::Refused(format!("{who} cannot join: rank {rank} has been taken by pid {pid} on host {host}"))
}

/// Returns the refusal of a process that joins a complete job.
pub(super) fn all_taken(participant: &Participant, world_size: u32) -> Refusal {
    Refusal::Refused(format!("{} cannot join: all {world_size} ranks are taken", participant.describe()))
}
