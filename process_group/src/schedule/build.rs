//! Builds a program from (operation, algorithm, rank, hosts, length).
//!
//! In broadcast, reduce, gather and scatter, every rank also receives a message from every other, so that all compare their calls
//! before any of them returns.
//!
//! Each algorithm has a file next to this one. Every element is reduced at one rank, or in an order that two partners share, so all
//! ranks get the same bits.

use std::ops::Range;

use super::program::{Node, Program, Region, Source, Space};
use super::{Algorithm, Hosts, Programs};
use crate::types::operation::Operation;

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
    /// Returns the programs of its algorithm.
    ///
    /// # Panics
    /// When the operation has no such algorithm; [`Algorithm::suits`] says.
    pub(super) fn programs(&self) -> &'static dyn Programs {
        assert!(
            self.algorithm.suits(self.operation),
            "{} has no {} schedule",
            self.operation,
            self.algorithm
        );
        self.algorithm.programs()
    }

    /// Returns true if the data alone do not let every two ranks compare their calls: in a rooted call. Every rank then sends an
    /// empty message to each rank that gets no payload from it. Headers contain the call; otherwise a rank that only sends would be
    /// done before any other can object.
    pub(super) fn needs_empty_messages(&self) -> bool {
        self.operation.root().is_some()
    }

    /// Returns the range of chunk `index` of a vector that is divided into one chunk per rank.
    pub(super) fn vector_chunk(&self, ranks: usize, index: usize) -> Range<usize> {
        chunk_range(self.count, ranks, index % ranks)
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
    let mut b = Builder { spec, rank, n: hosts.world_size(), hosts, program: Program::default() };
    spec.programs().build(&mut b);
    if spec.needs_empty_messages() {
        b.send_empty_messages();
    }
    b.program
}

/// The program of one rank, while it is made.
pub(super) struct Builder<'a> {
    pub(super) spec: CollectiveSpec,
    pub(super) rank: usize,
    /// Number of ranks.
    pub(super) n: usize,
    pub(super) hosts: &'a Hosts,
    program: Program,
}

impl Builder<'_> {
    pub(super) fn send(&mut self, to: usize, region: Region) {
        self.program.nodes.push(Node::Send { to, region });
    }

    pub(super) fn receive(&mut self, from: usize, region: Region) {
        self.program.nodes.push(Node::Receive { from, region });
    }

    pub(super) fn reduce_into(&mut self, into: Region, sources: Vec<Source>, last: bool) {
        self.program.nodes.push(Node::Reduce { into, sources, last });
    }

    /// Copies own values. In place, they may already be at their destination.
    pub(super) fn copy(&mut self, from: Region, into: Region) {
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

    pub(super) fn region(&self, space: Space, range: Range<usize>) -> Region {
        // In place, the input is the output.
        let space = if space == Space::Input && self.spec.in_place { Space::Output } else { space };
        Region { space, start: range.start, end: range.end }
    }

    pub(super) fn input(&self, range: Range<usize>) -> Region {
        self.region(Space::Input, range)
    }

    pub(super) fn output(&self, range: Range<usize>) -> Region {
        self.region(Space::Output, range)
    }

    pub(super) fn scratch(&mut self, length: usize) -> Region {
        self.program.scratch = self.program.scratch.max(length);
        self.region(Space::Scratch, 0..length)
    }

    pub(super) fn all(&self) -> Range<usize> {
        0..self.spec.count
    }

    /// Returns chunk `index` of a vector that the algorithm divides into one chunk per rank.
    pub(super) fn vector_chunk(&self, index: usize) -> Range<usize> {
        self.spec.vector_chunk(self.n, index)
    }

    /// Returns chunk `index` of an array that consists of one chunk per rank.
    pub(super) fn rank_chunk(&self, index: usize) -> Range<usize> {
        let index = index % self.n;
        index * self.spec.count..(index + 1) * self.spec.count
    }

    /// Returns the input region of an operation to which only this rank's own chunk is passed out of place.
    pub(super) fn lone_input(&self) -> Region {
        self.input(if self.spec.in_place { self.rank_chunk(self.rank) } else { self.all() })
    }

    pub(super) fn lone_output(&self) -> Region {
        self.output(if self.spec.in_place { self.rank_chunk(self.rank) } else { self.all() })
    }

    pub(super) fn next(&self) -> usize {
        (self.rank + 1) % self.n
    }

    pub(super) fn previous(&self) -> usize {
        (self.rank + self.n - 1) % self.n
    }

    /// Returns the other ranks, nearest successor first: at any time all ranks send to different ones.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, n) = (self.rank, self.n);
        (1..n).map(move |distance| (rank + distance) % n)
    }

    /// Returns one operand from each rank in rank order, with `own` for this rank.
    pub(super) fn in_rank_order(&self, own: Region) -> Vec<Source> {
        self.in_order(0..self.n, own)
    }

    /// Returns one operand from each of these ranks, in their order, with `own` for this rank.
    pub(super) fn in_order(&self, ranks: impl Iterator<Item = usize>, own: Region) -> Vec<Source> {
        ranks.map(|r| if r == self.rank { Source::Own(own) } else { Source::Peer(r) }).collect()
    }

    /// Returns two operands, the lower rank's first.
    pub(super) fn pair(&self, own: Region, peer: usize) -> Vec<Source> {
        if self.rank < peer {
            vec![Source::Own(own), Source::Peer(peer)]
        } else {
            vec![Source::Peer(peer), Source::Own(own)]
        }
    }
}
