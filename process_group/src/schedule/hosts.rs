//! The assignment of a group's ranks to hosts.

use std::collections::HashMap;
use std::hash::Hash;

/// The ranks of a group by host. The same on every rank, since it comes from the roster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts {
    /// The ranks of each host, ascending. Hosts are in order of their first rank.
    ranks: Vec<Vec<usize>>,
    /// The host of each rank, and its place among the ranks there.
    places: Vec<(usize, usize)>,
}

impl Hosts {
    /// Puts all ranks on one host.
    pub fn one(world_size: usize) -> Self {
        Self::of(std::iter::repeat_n((), world_size))
    }

    /// Creates the hosts from the host of each rank, in rank order.
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

    /// Returns the number of ranks of the group.
    pub fn world_size(&self) -> usize {
        self.places.len()
    }

    /// Returns the number of hosts.
    pub fn count(&self) -> usize {
        self.ranks.len()
    }

    /// Returns `None` if there are several hosts, and several ranks on one of them; otherwise what is the case instead.
    pub fn why_one_level(&self) -> Option<&'static str> {
        match self.count() {
            0 | 1 => Some("all ranks are on one host"),
            count => (count == self.world_size()).then_some("each rank has a host of its own"),
        }
    }

    /// Returns the ranks of each host, ascending.
    pub fn ranks(&self) -> &[Vec<usize>] {
        &self.ranks
    }

    /// Returns the host of a rank, and its place among the ranks there.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        self.places[rank]
    }

    /// Returns the number of ranks of every host that have counterparts on the others: the number of ranks of the smallest host.
    pub fn counterparts(&self) -> usize {
        self.ranks.iter().map(Vec::len).min().unwrap_or(0)
    }
}
