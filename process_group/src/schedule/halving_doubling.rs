//! Reduce-scatter by halving, then all-gather by doubling. A broadcast scatters to the others, which all-gather; a reduce is a
//! reduce-scatter, then a gather.
//!
//! After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

use std::ops::Range;

use super::build::{Builder, CollectiveSpec, chunk_range};
use super::cost::{Traffic, flat};
use super::program::Space;
use super::surplus::{
    largest_power_of_two, reduce_surplus, return_to_surplus, surplus_messages, surplus_rounds,
};
use super::{Hosts, Programs, unsuited};
use crate::types::operation::Operation::{self, AllReduce, Broadcast, Reduce};

pub(super) struct HalvingDoubling;

impl Programs for HalvingDoubling {
    fn suits(&self, operation: Operation) -> bool {
        matches!(operation, AllReduce(_) | Broadcast { .. } | Reduce { .. })
    }

    fn build(&self, b: &mut Builder<'_>) {
        match b.spec.operation {
            AllReduce(_) => all_reduce(b),
            Broadcast { root } => broadcast(b, root.index()),
            Reduce { root, .. } => reduce(b, root.index()),
            other => unsuited(other),
        }
    }

    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
        let (count, n) = (spec.count, hosts.world_size());
        let others = n - 1;
        let all = match spec.operation {
            Broadcast { root } => match (rank + n - root.index()) % n {
                // The chunks of all ranks except the root, which sends each of them once.
                0 => Traffic::of(others, count).receiving(0),
                place => {
                    Traffic::of(n - 2, (n - 2) * chunk_range(count, others, place - 1).len()).receiving(count)
                }
            },
            Reduce { root, .. } => {
                let (own, back) = (spec.vector_chunk(n, rank).len(), usize::from(rank != root.index()));
                Traffic::of(others + back, count - own + back * own)
                    .receiving(others * own + (1 - back) * (count - own))
            }
            _ => match surplus_messages(rank, n) {
                Ok(messages) => Traffic::of(messages, messages * count),
                Err(back) => {
                    let power = largest_power_of_two(n);
                    let steps = power.ilog2() as usize;
                    let block = |at, chunks| elements(&(at..at + chunks), power, count).len();
                    let doubling: usize = (0..steps).map(|s| block(rank >> s << s, 1 << s)).sum();
                    Traffic::of(2 * steps + back, count - block(rank, 1) + doubling + back * count)
                }
            },
        };
        flat(all, hosts)
    }

    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
        let n = hosts.world_size();
        let halving = 2 * largest_power_of_two(n).ilog2() as usize + surplus_rounds(n);
        flat(if spec.operation.root().is_some() { 2 } else { halving }, hosts)
    }
}

/// Returns the elements of these of the `of` chunks of a vector of `count`.
fn elements(chunks: &Range<usize>, of: usize, count: usize) -> Range<usize> {
    chunk_range(count, of, chunks.start).start..chunk_range(count, of, chunks.end - 1).end
}

fn all_reduce(b: &mut Builder<'_>) {
    let power = largest_power_of_two(b.n);
    let Some(own) = reduce_surplus(b, power) else { return };
    let mut space = own.space;
    let count = b.spec.count;
    let range = |chunks: &Range<usize>| elements(chunks, power, count);
    let mut chunks = 0..power;
    let mut distance = power / 2;
    while distance > 0 {
        let partner = b.rank ^ distance;
        let middle = chunks.start + distance;
        let (keep, give) = if b.rank & distance == 0 {
            (chunks.start..middle, middle..chunks.end)
        } else {
            (middle..chunks.end, chunks.start..middle)
        };
        b.send(partner, b.region(space, range(&give)));
        let sources = b.pair(b.region(space, range(&keep)), partner);
        b.reduce_into(b.output(range(&keep)), sources, distance == 1);
        space = Space::Output;
        chunks = keep;
        distance /= 2;
    }
    distance = 1;
    while distance < power {
        let partner = b.rank ^ distance;
        let theirs = if b.rank & distance == 0 {
            chunks.end..chunks.end + distance
        } else {
            chunks.start - distance..chunks.start
        };
        b.send(partner, b.output(range(&chunks)));
        b.receive(partner, b.output(range(&theirs)));
        chunks = chunks.start.min(theirs.start)..chunks.end.max(theirs.end);
        distance *= 2;
    }
    return_to_surplus(b, power);
}

/// The root sends one chunk to each of the other ranks, which exchange them.
fn broadcast(b: &mut Builder<'_>, root: usize) {
    let (rank, n, count) = (b.rank, b.n, b.spec.count);
    let chunk = |of: usize| chunk_range(count, n - 1, (of + n - root - 1) % n);
    let others: Vec<usize> = b.others().filter(|other| *other != root).collect();
    if rank == root {
        for to in others {
            b.send(to, b.input(chunk(to)));
        }
        return b.copy(b.input(b.all()), b.output(b.all()));
    }
    let own = b.output(chunk(rank));
    b.receive(root, own);
    for to in &others {
        b.send(*to, own);
    }
    for from in others {
        b.receive(from, b.output(chunk(from)));
    }
}

fn reduce(b: &mut Builder<'_>, root: usize) {
    for to in b.others() {
        b.send(to, b.input(b.vector_chunk(to)));
    }
    let mine = b.vector_chunk(b.rank);
    let sources = b.in_rank_order(b.input(mine.clone()));
    if b.rank == root {
        b.reduce_into(b.output(mine), sources, true);
        for from in b.others() {
            b.receive(from, b.output(b.vector_chunk(from)));
        }
    } else {
        let reduced = b.scratch(mine.len());
        b.reduce_into(reduced, sources, true);
        b.send(root, reduced);
    }
}
