//! The other ranks of a group, and a value for each of them.

use std::ops::{Index, IndexMut};

use crate::types::rank::Rank;

/// A rank of a group other than the own rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Peer(usize);

impl Peer {
    /// Returns `None` for `own` itself. Both are positions in the group.
    pub(crate) fn new(rank: usize, own: usize) -> Option<Self> {
        match rank {
            lower if lower < own => Some(Self(lower)),
            higher if higher > own => Some(Self(higher - 1)),
            _ => None,
        }
    }
}

/// One `T` for each other rank of a group, in group order.
///
/// The own rank has no value and every other rank has one, so indexing by a [`Peer`] of the same group always succeeds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Peers<T> {
    own: usize,
    all: Vec<T>,
}

impl<T> Peers<T> {
    /// Creates the values with `make`, which gets positions in the group.
    pub(crate) fn from_fn(own: usize, world_size: usize, make: impl FnMut(usize) -> T) -> Self {
        Self { own, all: (0..world_size).filter(|rank| *rank != own).map(make).collect() }
    }

    /// Creates the values from one slot for each rank of the group.
    ///
    /// # Errors
    /// Returns the slots when one other than that of `own` is empty.
    pub(crate) fn complete(own: usize, slots: Vec<Option<T>>) -> Result<Self, Vec<Option<T>>> {
        if slots.iter().enumerate().any(|(rank, slot)| rank != own && slot.is_none()) {
            return Err(slots);
        }
        let others = slots.into_iter().enumerate().filter(|(rank, _)| *rank != own);
        Ok(Self { own, all: others.filter_map(|(_, slot)| slot).collect() })
    }

    /// Returns one slot for each rank of the group, the own one empty.
    pub(crate) fn into_slots(self) -> Vec<Option<T>> {
        let mut slots: Vec<Option<T>> = self.all.into_iter().map(Some).collect();
        slots.insert(self.own.min(slots.len()), None);
        slots
    }

    /// Returns the same ranks with another value for each.
    pub(crate) fn map<U>(self, mut make: impl FnMut(Rank, T) -> U) -> Peers<U> {
        let own = self.own;
        let all = self.all.into_iter().enumerate();
        Peers { own, all: all.map(|(index, item)| make(rank_of(Peer(index), own), item)).collect() }
    }

    /// Returns the number of ranks of the group, including this one.
    pub(crate) fn world_size(&self) -> usize {
        self.all.len() + 1
    }

    /// Returns every peer, in group order.
    pub(crate) fn ids(&self) -> impl Iterator<Item = Peer> + use<T> {
        (0..self.all.len()).map(Peer)
    }

    /// Returns a peer's position in the group.
    pub(crate) fn rank(&self, peer: Peer) -> Rank {
        rank_of(peer, self.own)
    }

    pub(crate) fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.all.iter_mut()
    }

    /// Returns every peer with its value.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = (Peer, &T)> {
        self.ids().zip(&self.all)
    }
}

fn rank_of(Peer(index): Peer, own: usize) -> Rank {
    Rank((index + usize::from(index >= own)) as u32)
}

impl<T> Index<Peer> for Peers<T> {
    type Output = T;

    fn index(&self, Peer(index): Peer) -> &T {
        &self.all[index]
    }
}

impl<T> IndexMut<Peer> for Peers<T> {
    fn index_mut(&mut self, Peer(index): Peer) -> &mut T {
        &mut self.all[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_other_rank_is_a_peer_and_the_own_one_is_not() {
        for world_size in 1..6 {
            for own in 0..world_size {
                let ranks = Peers::from_fn(own, world_size, |rank| rank);
                assert_eq!(ranks.world_size(), world_size);
                assert_eq!(Peer::new(own, own), None);
                for rank in (0..world_size).filter(|rank| *rank != own) {
                    let peer = Peer::new(rank, own).unwrap();
                    assert_eq!((ranks[peer], ranks.rank(peer).index()), (rank, rank));
                }
                let slots = ranks.clone().into_slots();
                assert!(slots.iter().enumerate().all(|(rank, slot)| (rank == own) == slot.is_none()));
                assert_eq!(Peers::complete(own, slots), Ok(ranks));
            }
        }
    }

    #[test]
    fn a_rank_that_is_missing_keeps_a_group_from_being_complete() {
        let slots = vec![Some('a'), None, None];
        assert_eq!(Peers::complete(1, slots.clone()), Err(slots));
    }
}
