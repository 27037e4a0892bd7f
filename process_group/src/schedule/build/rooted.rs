//! Broadcast and reduce: from one rank to all, and from all to one.

use super::{Builder, chunk_range};
use crate::schedule::Algorithm;
use crate::schedule::program::Source;

impl Builder {
    /// Returns parent and children of this rank in a tree over all ranks with `root` at the top. Children nearest to the leaves
    /// come first.
    pub(super) fn tree(&self, root: usize, algorithm: Algorithm) -> (Option<usize>, Vec<usize>) {
        let n = self.n;
        let place = (self.rank + n - root) % n;
        let rank_at = |place: usize| (place + root) % n;
        match algorithm {
            Algorithm::Ring => (
                (place > 0).then(|| rank_at(place - 1)),
                if place + 1 < n { vec![rank_at(place + 1)] } else { vec![] },
            ),
            Algorithm::RecursiveDoubling => {
                // Binomial tree: the parent is the place without its lowest set bit.
                let lowest = if place == 0 { n.next_power_of_two() } else { place & place.wrapping_neg() };
                let children = (0..usize::BITS)
                    .map(|bit| 1 << bit)
                    .take_while(|bit| *bit < lowest)
                    .filter(|bit| place + bit < n)
                    .map(|bit| rank_at(place + bit))
                    .collect();
                ((place > 0).then(|| rank_at(place - lowest)), children)
            }
            _ => {
                if place == 0 {
                    (None, self.others().collect())
                } else {
                    (Some(root), vec![])
                }
            }
        }
    }

    pub(super) fn broadcast(&mut self, root: usize, algorithm: Algorithm) {
        let am_root = self.rank == root;
        if algorithm == Algorithm::HalvingDoubling {
            return self.broadcast_scattered(root);
        }
        let (parent, children) = self.tree(root, algorithm);
        let output = self.output(self.all());
        let from = if am_root { self.input(self.all()) } else { output };
        if let Some(parent) = parent {
            self.receive(parent, output);
        }
        // The farthest child has the largest subtree.
        for child in children.into_iter().rev() {
            self.send(child, from);
        }
        if am_root {
            self.copy(from, output);
        }
    }

    /// The root sends one chunk to each of the other ranks, which exchange them.
    pub(super) fn broadcast_scattered(&mut self, root: usize) {
        let (rank, n, count) = (self.rank, self.n, self.spec.count);
        let chunk = |of: usize| chunk_range(count, n - 1, (of + n - root - 1) % n);
        let others: Vec<usize> = self.others().filter(|other| *other != root).collect();
        if rank == root {
            for to in others {
                self.send(to, self.input(chunk(to)));
            }
            return self.copy(self.input(self.all()), self.output(self.all()));
        }
        let own = self.output(chunk(rank));
        self.receive(root, own);
        for to in &others {
            self.send(*to, own);
        }
        for from in others {
            self.receive(from, self.output(chunk(from)));
        }
    }

    pub(super) fn reduce(&mut self, root: usize, algorithm: Algorithm) {
        if algorithm == Algorithm::HalvingDoubling {
            return self.reduce_scattered(root);
        }
        let am_root = self.rank == root;
        let input = self.input(self.all());
        let (parent, children) = self.tree(root, algorithm);
        let mut result = input;
        if !children.is_empty() {
            let sources = if am_root && algorithm == Algorithm::Direct {
                self.in_rank_order(input)
            } else {
                let peers = children.iter().map(|c| Source::Peer(*c));
                std::iter::once(Source::Own(input)).chain(peers).collect()
            };
            result = if am_root { self.output(self.all()) } else { self.scratch(self.spec.count) };
            self.reduce_into(result, sources, am_root);
        }
        if let Some(parent) = parent {
            self.send(parent, result);
        }
    }

    pub(super) fn reduce_scattered(&mut self, root: usize) {
        for to in self.others() {
            self.send(to, self.input(self.vector_chunk(to)));
        }
        let mine = self.vector_chunk(self.rank);
        let sources = self.in_rank_order(self.input(mine.clone()));
        if self.rank == root {
            self.reduce_into(self.output(mine), sources, true);
            for from in self.others() {
                self.receive(from, self.output(self.vector_chunk(from)));
            }
        } else {
            let reduced = self.scratch(mine.len());
            self.reduce_into(reduced, sources, true);
            self.send(root, reduced);
        }
    }
}
