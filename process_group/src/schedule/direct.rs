//! Every rank exchanges with every other at once.

use std::ops::Range;

use super::build::{Builder, CollectiveSpec, chunk_range};
use super::cost::{Traffic, flat};
use super::program::Space;
use super::{Hosts, Programs, tree, unsuited};
use crate::types::operation::Operation::{
    self, AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Recv, Reduce, ReduceScatter, Scatter,
    Send,
};

/// Maximum number of elements for which an all-reduce sends whole vectors instead of scattering: a step then costs more than the
/// elements.
const ONE_SHOT_ELEMENTS: usize = 4096;

pub(super) struct Direct;

impl Programs for Direct {
    fn suits(&self, operation: Operation) -> bool {
        operation != Barrier
    }

    fn build(&self, b: &mut Builder<'_>) {
        match b.spec.operation {
            AllReduce(_) => {
                let ranks: Vec<usize> = (0..b.n).collect();
                all_reduce(b, (&ranks, b.rank), (Space::Input, b.all()), is_one_shot(&b.spec));
            }
            Broadcast { root } => tree::broadcast(b, root, star),
            Reduce { root, .. } => reduce(b, root.index()),
            AllGather => all_gather(b),
            ReduceScatter(_) => reduce_scatter(b),
            Gather { root } => gather(b, root.index()),
            Scatter { root } => scatter(b, root.index()),
            AllToAll => all_to_all(b),
            Send { to } => b.send(to.index(), b.input(b.all())),
            Recv { from } => b.receive(from.index(), b.output(b.all())),
            Barrier => unsuited(Barrier),
        }
    }

    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
        let (count, n) = (spec.count, hosts.world_size());
        let (of, others) = (Traffic::of, n - 1);
        let all = match spec.operation {
            AllReduce(_) if !is_one_shot(spec) => {
                let own = spec.vector_chunk(n, rank).len();
                of(2 * others, count - own + others * own)
            }
            Broadcast { root } | Scatter { root } if rank == root.index() => {
                of(others, others * count).receiving(0)
            }
            Broadcast { .. } | Scatter { .. } | Recv { .. } => of(0, 0).receiving(count),
            Reduce { root, .. } | Gather { root } if rank == root.index() => {
                of(0, 0).receiving(others * count)
            }
            Reduce { .. } | Gather { .. } | Send { .. } => of(1, count).receiving(0),
            _ => of(others, others * count),
        };
        flat(all, hosts)
    }

    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
        let is_two_shot = matches!(spec.operation, AllReduce(_)) && !is_one_shot(spec);
        flat(if is_two_shot { 2 } else { 1 }, hosts)
    }
}

fn is_one_shot(spec: &CollectiveSpec) -> bool {
    spec.count <= ONE_SHOT_ELEMENTS
}

fn star(place: usize, n: usize) -> (Option<usize>, Vec<usize>) {
    if place == 0 { (None, (1..n).collect()) } else { (Some(0), vec![]) }
}

/// All-reduces `part` of the vector among `ranks`, where this rank is `ranks[index]`. Its terms are in `space`; the sum goes to the
/// output.
pub(super) fn all_reduce(
    b: &mut Builder<'_>,
    (ranks, index): (&[usize], usize),
    (space, part): (Space, Range<usize>),
    is_one_shot: bool,
) {
    let n = ranks.len();
    // The next rank comes first: at any time all ranks send to different ones.
    let others = (1..n).map(|distance| (index + distance) % n);
    let reduced_by = |index| {
        let piece = if is_one_shot { 0..part.len() } else { chunk_range(part.len(), n, index) };
        part.start + piece.start..part.start + piece.end
    };
    for other in others.clone() {
        b.send(ranks[other], b.region(space, reduced_by(other)));
    }
    let mine = reduced_by(index);
    let (terms, sum) = (b.region(space, mine.clone()), b.output(mine));
    b.reduce_into(sum, b.in_order(ranks.iter().copied(), terms), true);
    if is_one_shot {
        return;
    }
    for other in others.clone() {
        b.send(ranks[other], sum);
    }
    for other in others {
        b.receive(ranks[other], b.output(reduced_by(other)));
    }
}

fn reduce(b: &mut Builder<'_>, root: usize) {
    let input = b.input(b.all());
    if b.rank == root {
        b.reduce_into(b.output(b.all()), b.in_rank_order(input), true);
    } else {
        b.send(root, input);
    }
}

fn all_gather(b: &mut Builder<'_>) {
    let own = b.lone_input();
    for to in b.others() {
        b.send(to, own);
    }
    b.copy(own, b.output(b.rank_chunk(b.rank)));
    for from in b.others() {
        b.receive(from, b.output(b.rank_chunk(from)));
    }
}

fn reduce_scatter(b: &mut Builder<'_>) {
    for to in b.others() {
        b.send(to, b.input(b.rank_chunk(to)));
    }
    let sources = b.in_rank_order(b.input(b.rank_chunk(b.rank)));
    b.reduce_into(b.lone_output(), sources, true);
}

fn gather(b: &mut Builder<'_>, root: usize) {
    let own = b.lone_input();
    if b.rank != root {
        return b.send(root, own);
    }
    b.copy(own, b.output(b.rank_chunk(root)));
    for from in b.others() {
        b.receive(from, b.output(b.rank_chunk(from)));
    }
}

fn scatter(b: &mut Builder<'_>, root: usize) {
    if b.rank != root {
        return b.receive(root, b.lone_output());
    }
    for to in b.others() {
        b.send(to, b.input(b.rank_chunk(to)));
    }
    b.copy(b.input(b.rank_chunk(root)), b.lone_output());
}

fn all_to_all(b: &mut Builder<'_>) {
    // In place, the message from a rank overwrites the message to it, as far as that has been sent already.
    for to in b.others() {
        b.send(to, b.input(b.rank_chunk(to)));
    }
    b.copy(b.input(b.rank_chunk(b.rank)), b.output(b.rank_chunk(b.rank)));
    for from in b.others() {
        b.receive(from, b.output(b.rank_chunk(from)));
    }
}
