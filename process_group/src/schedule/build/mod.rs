//! Builds a program from (operation, algorithm, rank, hosts, length).
//!
//! | operation | ring | recursive_doubling | halving_doubling | direct | hierarchical |
//! |---|---|---|---|---|---|
//! | all-reduce | reduce-scatter and all-gather round the ring | whole vectors at doubling distance | halving, then doubling | small: all to all; large: reduce-scatter and all-gather, each in one step | reduce-scatter within hosts, all-reduce between them, all-gather within |
//! | broadcast | a chain, pipelined | binomial tree | scatter to the others, all-gather among them | root to all | – |
//! | reduce | a chain, pipelined | binomial tree | reduce-scatter, then gather | all to root | – |
//! | all-gather, reduce-scatter | round the ring | – | – | all to all | – |
//! | barrier | – | one byte at doubling distance | – | – | – |
//! | gather, scatter, all-to-all | – | – | – | in one step | – |
//!
//! In broadcast, reduce, gather and scatter, every rank also receives a message from every other, so that all compare their calls
//! before any of them returns.
//!
//! Sources: ring and halving-doubling after Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH" (2005); if the world size is no power of two, surplus ranks first send their vectors to partners, as
//! there. Every element is reduced at one rank, or in an order that two partners share, so all ranks get the same bits.

mod all_reduce;
mod chunks;
mod hierarchical;
mod rooted;

use std::ops::Range;

pub(super) use hierarchical::exchanges_whole;

use super::Algorithm::{self, Direct, HalvingDoubling, Hierarchical, RecursiveDoubling, Ring};
use super::Hosts;
use super::program::{Node, Program, Region, Source, Space};
use crate::types::operation::Operation;

/// Maximum number of elements for which a direct all-reduce sends whole vectors instead of scattering: a step then costs more than
/// the elements.
pub(super) const ONE_SHOT_ELEMENTS: usize = 4096;

/// The collective of a program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CollectiveSpec {
    /// The operation.
    pub operation: Operation,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Number of elements of the vector, or of one rank's chunk.
    pub count: usize,
    /// True if input and output are the same memory.
    pub in_place: bool,
}

impl CollectiveSpec {
    /// Returns true if a direct all-reduce sends whole vectors.
    pub(super) fn is_one_shot(&self) -> bool {
        self.count <= ONE_SHOT_ELEMENTS
    }

    /// Returns true if the data alone do not let every two ranks compare their calls: in a rooted call. Every rank then sends an
    /// empty message to each rank that gets no payload from it. Headers contain the call; otherwise a rank that only sends would be
    /// done before any other can object.
    pub(super) fn needs_empty_messages(&self) -> bool {
        self.operation.root().is_some()
    }
}

/// Returns the element range of chunk `index` of `count` elements in `chunks` chunks; the first ones are longer by one.
pub fn chunk_range(count: usize, chunks: usize, index: usize) -> Range<usize> {
    let (base, extra) = (count / chunks, count % chunks);
    let start = index * base + index.min(extra);
    start..start + base + usize::from(index < extra)
}

/// Builds the program of `rank` in a group of at least two ranks.
///
/// # Panics
/// When the operation has no such algorithm; [`Algorithm::suits`] says.
pub fn build(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> Program {
    let mut b = Builder { spec, rank, n: hosts.world_size(), program: Program::default() };
    match (spec.operation, spec.algorithm) {
        (Operation::AllReduce(_), Ring) => b.all_reduce_ring(),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => b.all_reduce_doubling(),
        (Operation::AllReduce(_), HalvingDoubling) => b.all_reduce_halving(),
        (Operation::AllReduce(_), Direct) if spec.is_one_shot() => b.all_reduce_one_shot(),
        (Operation::AllReduce(_), Direct) => b.all_reduce_two_shot(),
        (Operation::AllReduce(_), Hierarchical) => b.all_reduce_hierarchical(hosts),
        (Operation::Broadcast { root }, algorithm) => b.broadcast(root.index(), algorithm),
        (Operation::Reduce { root, .. }, algorithm) => b.reduce(root.index(), algorithm),
        (Operation::AllGather, Ring) => b.all_gather_ring(),
        (Operation::AllGather, Direct) => b.all_gather_direct(),
        (Operation::ReduceScatter(_), Ring) => b.reduce_scatter_ring(),
        (Operation::ReduceScatter(_), Direct) => b.reduce_scatter_direct(),
        (Operation::Gather { root }, Direct) => b.gather(root.index()),
        (Operation::Scatter { root }, Direct) => b.scatter(root.index()),
        (Operation::AllToAll, Direct) => b.all_to_all(),
        (Operation::Send { to }, Direct) => b.send(to.index(), b.input(b.all())),
        (Operation::Recv { from }, Direct) => b.receive(from.index(), b.output(b.all())),
        (operation, algorithm) => panic!("{operation} has no {algorithm} schedule"),
    }
    if spec.needs_empty_messages() {
        b.send_empty_messages();
    }
    b.program
}

struct Builder {
    spec: CollectiveSpec,
    rank: usize,
    n: usize,
    program: Program,
}

impl Builder {
    fn send(&mut self, to: usize, region: Region) {
        self.program.nodes.push(Node::Send { to, region });
    }

    fn receive(&mut self, from: usize, region: Region) {
        self.program.nodes.push(Node::Receive { from, region });
    }

    fn reduce_into(&mut self, into: Region, sources: Vec<Source>, last: bool) {
        self.program.nodes.push(Node::Reduce { into, sources, last });
    }

    /// Copies own values. In place, they may already be at their destination.
    fn copy(&mut self, from: Region, into: Region) {
        if from != into {
            self.reduce_into(into, vec![Source::Own(from)], false);
        }
    }

    fn send_empty_messages(&mut self) {
        let nothing = Region { space: Space::Scratch, start: 0, end: 0 };
        let sends = |node: &Node, peer| matches!(node, Node::Send { to, .. } if *to == peer);
        let receives = |node: &Node, peer| match node {
            Node::Receive { from, .. } => *from == peer,
            Node::Reduce { sources, .. } => sources.contains(&Source::Peer(peer)),
            Node::Send { .. } => false,
        };
        for peer in self.others() {
            if !self.program.nodes.iter().any(|node| sends(node, peer)) {
                self.send(peer, nothing);
            }
            if !self.program.nodes.iter().any(|node| receives(node, peer)) {
                self.receive(peer, nothing);
            }
        }
    }

    fn region(&self, space: Space, range: Range<usize>) -> Region {
        // In place, the input is the output.
        let space = if space == Space::Input && self.spec.in_place { Space::Output } else { space };
        Region { space, start: range.start, end: range.end }
    }

    fn input(&self, range: Range<usize>) -> Region {
        self.region(Space::Input, range)
    }

    fn output(&self, range: Range<usize>) -> Region {
        self.region(Space::Output, range)
    }

    fn scratch(&mut self, length: usize) -> Region {
        self.program.scratch = self.program.scratch.max(length);
        self.region(Space::Scratch, 0..length)
    }

    fn all(&self) -> Range<usize> {
        0..self.spec.count
    }

    /// Returns chunk `index` of a vector that the algorithm divides into one chunk per rank.
    fn vector_chunk(&self, index: usize) -> Range<usize> {
        chunk_range(self.spec.count, self.n, index % self.n)
    }

    /// Returns chunk `index` of an array that consists of one chunk per rank.
    fn rank_chunk(&self, index: usize) -> Range<usize> {
        let index = index % self.n;
        index * self.spec.count..(index + 1) * self.spec.count
    }

    /// Returns the input region of an operation to which only this rank's own chunk is passed out of place.
    fn lone_input(&self) -> Region {
        self.input(if self.spec.in_place { self.rank_chunk(self.rank) } else { self.all() })
    }

    fn lone_output(&self) -> Region {
        self.output(if self.spec.in_place { self.rank_chunk(self.rank) } else { self.all() })
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.n
    }

    fn previous(&self) -> usize {
        (self.rank + self.n - 1) % self.n
    }

    /// Returns the other ranks, nearest successor first: at any time all ranks send to different ones.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, n) = (self.rank, self.n);
        (1..n).map(move |distance| (rank + distance) % n)
    }

    /// Returns one operand from each rank in rank order, with `own` for this rank.
    fn in_rank_order(&self, own: Region) -> Vec<Source> {
        (0..self.n).map(|r| if r == self.rank { Source::Own(own) } else { Source::Peer(r) }).collect()
    }

    /// Returns two operands, the lower rank's first.
    fn pair(&self, own: Region, peer: usize) -> Vec<Source> {
        if self.rank < peer {
            vec![Source::Own(own), Source::Peer(peer)]
        } else {
            vec![Source::Peer(peer), Source::Own(own)]
        }
    }
}

/// Returns the largest power of two that is at most `n`.
pub(super) fn largest_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}
