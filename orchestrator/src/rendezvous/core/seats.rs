//! Who sits where: ranks that were told their number, and ranks that are given one.

use std::collections::{BTreeMap, HashMap};

use ryzanstein_process_group::{Candidate, Epoch, LocalRank, Member, Rank, Roster};

use super::event::{Joiner, Refusal, Ticket};

/// All seats of an epoch.
#[derive(Debug)]
pub(super) struct Seats {
    world_size: u32,
    numbered: BTreeMap<Rank, (Ticket, Joiner)>,
    /// In order of arrival.
    unnumbered: Vec<(Ticket, Joiner)>,
}

impl Seats {
    pub(super) const fn new(world_size: u32) -> Self {
        Self { world_size, numbered: BTreeMap::new(), unnumbered: Vec::new() }
    }

    pub(super) fn full(&self) -> bool {
        self.taken() == self.world_size as usize
    }

    fn taken(&self) -> usize {
        self.numbered.len() + self.unnumbered.len()
    }

    pub(super) fn holds(&self, rank: Rank) -> bool {
        self.numbered.contains_key(&rank)
    }

    pub(super) fn candidate(&self, rank: Rank) -> Option<&Candidate> {
        self.numbered.get(&rank).map(|(_, joiner)| &joiner.candidate)
    }

    pub(super) fn take(&mut self, ticket: Ticket, joiner: Joiner) -> Result<(), Refusal> {
        let who = joiner.describe();
        if let Some(rank) = joiner.rank {
            if rank.0 >= self.world_size {
                return Err(Refusal::Configuration(format!(
                    "{who} is out of range: this job has ranks 0 to {}",
                    self.world_size - 1
                )));
            }
            if let Some((_, holder)) = self.numbered.get(&rank) {
                let Candidate { host, pid, .. } = &holder.candidate;
                return Err(Refusal::Refused(format!(
                    "{who} comes second: rank {rank} has been taken by pid {pid} on host {host}; each rank joins once \
                     an epoch"
                )));
            }
        }
        if self.full() {
            return Err(Refusal::Refused(format!("{who} finds all {} ranks taken", self.world_size)));
        }
        match joiner.rank {
            Some(rank) => drop(self.numbered.insert(rank, (ticket, joiner))),
            None => self.unnumbered.push((ticket, joiner)),
        }
        Ok(())
    }

    pub(super) fn free(&mut self, ticket: Ticket) {
        self.numbered.retain(|_, (t, _)| *t != ticket);
        self.unnumbered.retain(|(t, _)| *t != ticket);
    }

    /// The ranks that are not there. Those who will be given a number are counted to the lowest free ones.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let free = Rank::all(self.world_size as usize).filter(|rank| !self.holds(*rank));
        free.skip(self.unnumbered.len()).collect()
    }

    pub(super) fn tickets(&self) -> Vec<Ticket> {
        self.numbered.values().chain(&self.unnumbered).map(|(ticket, _)| *ticket).collect()
    }

    /// Seats those without a number, neighbours on a host beside each other, and returns everybody in rank order.
    pub(super) fn settle(&mut self, epoch: Epoch) -> (Vec<Ticket>, Roster, Vec<Candidate>) {
        let mut arrival: HashMap<String, usize> = HashMap::new();
        for (_, joiner) in &self.unnumbered {
            let next = arrival.len();
            arrival.entry(joiner.candidate.host.clone()).or_insert(next);
        }
        let mut unnumbered = std::mem::take(&mut self.unnumbered);
        unnumbered.sort_by_key(|(_, joiner)| arrival[&joiner.candidate.host]);
        let mut unnumbered = unnumbered.into_iter();
        for rank in Rank::all(self.world_size as usize) {
            if !self.holds(rank)
                && let Some(entry) = unnumbered.next()
            {
                self.numbered.insert(rank, entry);
            }
        }

        let mut nodes: HashMap<&str, (u32, u32)> = HashMap::new();
        let mut members = Vec::with_capacity(self.numbered.len());
        for (rank, (_, joiner)) in &self.numbered {
            let candidate = &joiner.candidate;
            let next = nodes.len() as u32;
            let (node, on_it) = nodes.entry(&candidate.host).or_insert((next, 0));
            members.push(Member {
                rank: *rank,
                local_rank: joiner.local_rank.unwrap_or(LocalRank(*on_it)),
                node_rank: joiner.node_rank.unwrap_or(*node),
                host: candidate.host.clone(),
                pid: candidate.pid,
                cpus: candidate.cpus,
                data_address: candidate.data_address,
            });
            *on_it += 1;
        }
        let tickets = self.numbered.values().map(|(ticket, _)| *ticket).collect();
        let candidates = self.numbered.values().map(|(_, joiner)| joiner.candidate.clone()).collect();
        (tickets, Roster { epoch, members }, candidates)
    }
}
