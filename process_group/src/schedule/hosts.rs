//! Which ranks of a group share a host.

use std::collections::HashMap;
use std::hash::Hash;

/// The ranks of a group by host. The same on every rank, since it comes from the roster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts {
    /// By host, in order of its first rank: its ranks, ascending.
    ranks: Vec<Vec<usize>>,
    /// By rank: its host, and its place among the ranks there.
    places: Vec<(usize, usize)>,
}

impl Hosts {
    /// All ranks on one host.
    pub fn one(world_size: usize) -> Self {
        Self::of(std::iter::repeat_n((), world_size))
    }

    /// From the host of each rank, in rank order.
    pub fn of<T: Eq + Hash>(hosts: impl IntoIterator<Item = T>) -> Self {
        let mut known: HashMap<T, usize> = HashMap::new();
        let (mut ranks, mut places): (Vec<Vec<usize>>, Vec<(usize, usize)>) = (Vec::new(), Vec::new());
        for (rank, host) in hosts.into_iter().enumerate() {
            let host = *known.entry(host).or_insert(ranks.len());
            if host == ranks.len() {
                ranks.push(Vec::new());
            }
            places.push((host, ranks[host].len()));
            ranks[host].push(rank);
        }
        Self { ranks, places }
    }

    /// Ranks of the group.
    pub fn world_size(&self) -> usize {
        self.places.len()
    }

    /// Number of hosts.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// Whether there are several hosts, and several ranks on one of them.
    pub fn are_two_levels(&self) -> bool {
        self.count() > 1 && self.count() < self.world_size()
    }

    /// The ranks of each host, ascending.
    pub fn ranks(&self) -> &[Vec<usize>] {
        &self.ranks
    }

    /// The host of a rank, and its place among the ranks there.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        self.places[rank]
    }

    /// How many ranks of every host can talk to their counterparts on the others: the ranks of the host with the fewest.
    pub fn counterparts(&self) -> usize {
        self.ranks.iter().map(Vec::len).min().unwrap_or(0)
    }
}
