//! From (operation, algorithm, rank, world size, length) to a program.
//!
//! | operation | ring | recursive_doubling | halving_doubling | direct |
//! |---|---|---|---|---|
//! | all-reduce | reduce-scatter and all-gather round the ring | whole vectors at doubling distance | halving, then doubling | small: everybody to everybody; large: reduce-scatter and all-gather, each in one step |
//! | broadcast | a chain, pipelined | binomial tree | scatter, then all-gather | root to everybody |
//! | reduce | a chain, pipelined | binomial tree | reduce-scatter, then gather | everybody to root |
//! | all-gather, reduce-scatter | round the ring | – | – | everybody to everybody |
//! | gather, scatter, all-to-all | – | – | – | in one step |
//!
//! Sources: ring and halving-doubling after Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH" (2005); world sizes that are no power of two fold the surplus ranks into partners first, as
//! there. Every element is folded in one place, or in an order that two partners share, so all ranks get the same bits.

use std::ops::Range;

use super::Algorithm::{self, Direct, HalvingDoubling, RecursiveDoubling, Ring};
use super::program::{Node, Program, Region, Source, Space};
use crate::call::Operation;

/// Up to this many elements, a direct all-reduce sends whole vectors instead of scattering.
pub(super) const ONE_SHOT_ELEMENTS: usize = 1024;

/// What a program is made for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    /// The operation.
    pub operation: Operation,
    /// How.
    pub algorithm: Algorithm,
    /// Elements of the vector, or of one rank's chunk.
    pub count: usize,
    /// Whether input and output are one memory.
    pub in_place: bool,
    /// Whether receivers read payloads where they lie, so that a send is done only when its message has been read:
    /// nothing is in flight, and two ranks cannot exchange the contents of one region.
    pub by_reference: bool,
}

impl Shape {
    /// Whether a direct all-reduce sends whole vectors.
    pub(super) fn is_one_shot(&self) -> bool {
        self.count <= ONE_SHOT_ELEMENTS && !self.by_reference
    }
}

/// Element range of part `index` when `count` elements are cut into `parts`: the first ones are longer by one.
pub fn part(count: usize, parts: usize, index: usize) -> Range<usize> {
    let (base, extra) = (count / parts, count % parts);
    let start = index * base + index.min(extra);
    start..start + base + usize::from(index < extra)
}

/// The program of `rank` among `n ≥ 2` ranks.
///
/// # Panics
/// When the operation has no such algorithm; [`Algorithm::suits`] and [`Algorithm::by_reference`] say.
pub fn build(shape: Shape, rank: usize, n: usize) -> Program {
    let mut b = Builder { shape, rank, n, program: Program::default() };
    match (shape.operation, shape.algorithm) {
        (Operation::AllReduce(_), Ring) => b.all_reduce_ring(),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => b.all_reduce_doubling(),
        (Operation::AllReduce(_), HalvingDoubling) => b.all_reduce_halving(),
        (Operation::AllReduce(_), Direct) if shape.is_one_shot() => b.all_reduce_one_shot(),
        (Operation::AllReduce(_), Direct) => b.all_reduce_two_shot(),
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
    b.program
}

struct Builder {
    shape: Shape,
    rank: usize,
    n: usize,
    program: Program,
}

impl Builder {
    // ---- vocabulary ------------------------------------------------------------------------------------------

    fn send(&mut self, to: usize, region: Region) {
        self.program.nodes.push(Node::Send { to, region });
    }

    fn receive(&mut self, from: usize, region: Region) {
        self.program.nodes.push(Node::Receive { from, region });
    }

    fn fold(&mut self, into: Region, sources: Vec<Source>, last: bool) {
        self.program.nodes.push(Node::Fold { into, sources, last });
    }

    /// Copies own values, which in place may be where they belong already.
    fn copy(&mut self, from: Region, into: Region) {
        if from != into {
            self.fold(into, vec![Source::Own(from)], false);
        }
    }

    fn region(&self, space: Space, range: Range<usize>) -> Region {
        // In place, what is read is what is written.
        let space = if space == Space::Input && self.shape.in_place { Space::Output } else { space };
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
        0..self.shape.count
    }

    /// Part `index` of a vector that is cut evenly for the algorithm's own purposes.
    fn part(&self, index: usize) -> Range<usize> {
        part(self.shape.count, self.n, index % self.n)
    }

    /// Chunk `index` of an array that holds one chunk a rank.
    fn chunk(&self, index: usize) -> Range<usize> {
        let index = index % self.n;
        index * self.shape.count..(index + 1) * self.shape.count
    }

    /// This rank's own chunk where only that is passed out of place.
    fn lone_input(&self) -> Region {
        self.input(if self.shape.in_place { self.chunk(self.rank) } else { self.all() })
    }

    fn lone_output(&self) -> Region {
        self.output(if self.shape.in_place { self.chunk(self.rank) } else { self.all() })
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.n
    }

    fn previous(&self) -> usize {
        (self.rank + self.n - 1) % self.n
    }

    /// The other ranks, nearest successor first: at any time all ranks send to different ones.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, n) = (self.rank, self.n);
        (1..n).map(move |distance| (rank + distance) % n)
    }

    /// All ranks in order, this one by its own values.
    fn in_rank_order(&self, own: Region) -> Vec<Source> {
        (0..self.n).map(|r| if r == self.rank { Source::Own(own) } else { Source::Peer(r) }).collect()
    }

    /// Two operands, the lower rank's first.
    fn pair(&self, own: Region, peer: usize) -> Vec<Source> {
        if self.rank < peer {
            vec![Source::Own(own), Source::Peer(peer)]
        } else {
            vec![Source::Peer(peer), Source::Own(own)]
        }
    }

    // ---- all-reduce ------------------------------------------------------------------------------------------

    fn all_reduce_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        for step in 0..n - 1 {
            let sent = self.part(rank + n - step);
            let region = if step == 0 { self.input(sent) } else { self.output(sent) };
            self.send(self.next(), region);
            let folded = self.part(rank + 2 * n - step - 1);
            let sources = vec![Source::Peer(self.previous()), Source::Own(self.input(folded.clone()))];
            self.fold(self.output(folded), sources, step == n - 2);
        }
        for step in 0..n - 1 {
            self.send(self.next(), self.output(self.part(rank + 1 + n - step)));
            self.receive(self.previous(), self.output(self.part(rank + n - step)));
        }
    }

    /// Folds surplus ranks into partners. Gives the rank's place among the largest power of two of ranks, with where
    /// its values are then, or `None` for a surplus rank, which is done but for the result.
    fn fold_surplus(&mut self, power: usize) -> Option<Region> {
        let (input, output) = (self.input(self.all()), self.output(self.all()));
        if self.rank >= power {
            self.send(self.rank - power, input);
            self.receive(self.rank - power, output);
            return None;
        }
        if self.rank + power < self.n {
            let sources = self.pair(input, self.rank + power);
            self.fold(output, sources, false);
            return Some(output);
        }
        Some(input)
    }

    fn return_to_surplus(&mut self, power: usize) {
        if self.rank + power < self.n {
            self.send(self.rank + power, self.output(self.all()));
        }
    }

    fn all_reduce_doubling(&mut self) {
        let power = largest_power_of_two(self.n);
        let Some(mut own) = self.fold_surplus(power) else { return };
        let mut distance = 1;
        while distance < power {
            let partner = self.rank ^ distance;
            self.send(partner, own);
            let sources = self.pair(own, partner);
            own = self.output(self.all());
            distance *= 2;
            self.fold(own, sources, distance == power);
        }
        self.return_to_surplus(power);
    }

    fn all_reduce_halving(&mut self) {
        let power = largest_power_of_two(self.n);
        let Some(own) = self.fold_surplus(power) else { return };
        let mut space = own.space;
        let elements = |parts: &Range<usize>, count: usize| {
            part(count, power, parts.start).start..part(count, power, parts.end - 1).end
        };
        let count = self.shape.count;
        let mut parts = 0..power;
        let mut distance = power / 2;
        while distance > 0 {
            let partner = self.rank ^ distance;
            let middle = parts.start + distance;
            let (keep, give) = if self.rank & distance == 0 {
                (parts.start..middle, middle..parts.end)
            } else {
                (middle..parts.end, parts.start..middle)
            };
            self.send(partner, self.region(space, elements(&give, count)));
            let sources = self.pair(self.region(space, elements(&keep, count)), partner);
            self.fold(self.output(elements(&keep, count)), sources, distance == 1);
            space = Space::Output;
            parts = keep;
            distance /= 2;
        }
        distance = 1;
        while distance < power {
            let partner = self.rank ^ distance;
            let theirs = if self.rank & distance == 0 {
                parts.end..parts.end + distance
            } else {
                parts.start - distance..parts.start
            };
            self.send(partner, self.output(elements(&parts, count)));
            self.receive(partner, self.output(elements(&theirs, count)));
            parts = parts.start.min(theirs.start)..parts.end.max(theirs.end);
            distance *= 2;
        }
        self.return_to_surplus(power);
    }

    fn all_reduce_one_shot(&mut self) {
        let input = self.input(self.all());
        for to in self.others() {
            self.send(to, input);
        }
        self.fold(self.output(self.all()), self.in_rank_order(input), true);
    }

    fn all_reduce_two_shot(&mut self) {
        for to in self.others() {
            self.send(to, self.input(self.part(to)));
        }
        let mine = self.part(self.rank);
        let reduced = self.output(mine.clone());
        self.fold(reduced, self.in_rank_order(self.input(mine)), true);
        for to in self.others() {
            self.send(to, reduced);
        }
        for from in self.others() {
            self.receive(from, self.output(self.part(from)));
        }
    }

    // ---- broadcast and reduce --------------------------------------------------------------------------------

    /// Parent and children of this rank in a tree over all ranks with `root` on top. Children nearest to the leaves
    /// first.
    fn tree(&self, root: usize, algorithm: Algorithm) -> (Option<usize>, Vec<usize>) {
        let n = self.n;
        let place = (self.rank + n - root) % n;
        let rank_at = |place: usize| (place + root) % n;
        match algorithm {
            Algorithm::Ring => (
                (place > 0).then(|| rank_at(place - 1)),
                if place + 1 < n { vec![rank_at(place + 1)] } else { vec![] },
            ),
            Algorithm::RecursiveDoubling => {
                // Binomial: the parent is the place without its lowest set bit.
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

    fn broadcast(&mut self, root: usize, algorithm: Algorithm) {
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
        // The farthest child has the largest tree below it.
        for child in children.into_iter().rev() {
            self.send(child, from);
        }
        if am_root {
            self.copy(from, output);
        }
    }

    fn broadcast_scattered(&mut self, root: usize) {
        if self.rank == root {
            for to in self.others() {
                self.send(to, self.input(self.part(to)));
            }
        } else {
            self.receive(root, self.output(self.part(self.rank)));
        }
        let own =
            if self.rank == root { self.input(self.part(root)) } else { self.output(self.part(self.rank)) };
        for to in self.others().filter(|to| *to != root) {
            self.send(to, own);
        }
        if self.rank == root {
            self.copy(self.input(self.all()), self.output(self.all()));
        } else {
            for from in self.others() {
                self.receive(from, self.output(self.part(from)));
            }
        }
    }

    fn reduce(&mut self, root: usize, algorithm: Algorithm) {
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
            result = if am_root { self.output(self.all()) } else { self.scratch(self.shape.count) };
            self.fold(result, sources, am_root);
        }
        if let Some(parent) = parent {
            self.send(parent, result);
        }
    }

    fn reduce_scattered(&mut self, root: usize) {
        for to in self.others() {
            self.send(to, self.input(self.part(to)));
        }
        let mine = self.part(self.rank);
        let sources = self.in_rank_order(self.input(mine.clone()));
        if self.rank == root {
            self.fold(self.output(mine), sources, true);
            for from in self.others() {
                self.receive(from, self.output(self.part(from)));
            }
        } else {
            let reduced = self.scratch(mine.len());
            self.fold(reduced, sources, true);
            self.send(root, reduced);
        }
    }

    // ---- one chunk a rank ------------------------------------------------------------------------------------

    fn all_gather_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        let own = self.lone_input();
        self.send(self.next(), own);
        self.copy(own, self.output(self.chunk(rank)));
        for step in 1..n {
            self.receive(self.previous(), self.output(self.chunk(rank + n - step)));
            if step < n - 1 {
                self.send(self.next(), self.output(self.chunk(rank + n - step)));
            }
        }
    }

    fn all_gather_direct(&mut self) {
        let own = self.lone_input();
        for to in self.others() {
            self.send(to, own);
        }
        self.copy(own, self.output(self.chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }

    fn reduce_scatter_ring(&mut self) {
        let (rank, n) = (self.rank, self.n);
        // Partial sums travel in the array itself in place, else in scratch as long as one chunk: a partial sum is
        // sent on before the next one is folded.
        for step in 0..n - 1 {
            let sent = self.chunk(rank + 2 * n - 1 - step);
            let folded = self.chunk(rank + 2 * n - 2 - step);
            let in_place = self.shape.in_place;
            let region = match (step, in_place) {
                (0, _) => self.input(sent),
                (_, true) => self.output(sent),
                (_, false) => self.scratch(self.shape.count),
            };
            self.send(self.next(), region);
            let last = step == n - 2;
            let into = match (last, in_place) {
                (true, _) => self.lone_output(),
                (false, true) => self.output(folded.clone()),
                (false, false) => self.scratch(self.shape.count),
            };
            let sources = vec![Source::Peer(self.previous()), Source::Own(self.input(folded))];
            self.fold(into, sources, last);
        }
    }

    fn reduce_scatter_direct(&mut self) {
        for to in self.others() {
            self.send(to, self.input(self.chunk(to)));
        }
        let sources = self.in_rank_order(self.input(self.chunk(self.rank)));
        self.fold(self.lone_output(), sources, true);
    }

    fn gather(&mut self, root: usize) {
        let own = self.lone_input();
        if self.rank != root {
            return self.send(root, own);
        }
        self.copy(own, self.output(self.chunk(root)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }

    fn scatter(&mut self, root: usize) {
        if self.rank != root {
            return self.receive(root, self.lone_output());
        }
        for to in self.others() {
            self.send(to, self.input(self.chunk(to)));
        }
        self.copy(self.input(self.chunk(root)), self.lone_output());
    }

    fn all_to_all(&mut self) {
        // In place, the message from a rank overwrites the one to it, as far as that has left already; what is only read
        // where it lies is put aside.
        let leaves_first = self.shape.in_place && self.shape.by_reference;
        for to in self.others() {
            let chunk = self.input(self.chunk(to));
            if leaves_first {
                let aside = Region { space: Space::Scratch, ..chunk };
                self.program.scratch = self.n * self.shape.count;
                self.copy(chunk, aside);
                self.send(to, aside);
            } else {
                self.send(to, chunk);
            }
        }
        self.copy(self.input(self.chunk(self.rank)), self.output(self.chunk(self.rank)));
        for from in self.others() {
            self.receive(from, self.output(self.chunk(from)));
        }
    }
}

/// The largest power of two that is at most `n`.
pub(super) fn largest_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}
