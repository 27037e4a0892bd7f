//! Chunks travel round a ring of ranks; for rooted operations, whole vectors along a chain, pipelined.
//!
//! After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

use super::build::{Builder, CollectiveSpec};
use super::cost::{Traffic, flat};
use super::program::Source;
use super::{Hosts, Programs, tree, unsuited};
use crate::types::operation::Operation::{self, AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};

pub(super) struct Ring;

impl Programs for Ring {
    fn suits(&self, operation: Operation) -> bool {
        matches!(operation, AllReduce(_) | Broadcast { .. } | Reduce { .. } | AllGather | ReduceScatter(_))
    }

    fn build(&self, b: &mut Builder<'_>) {
        match b.spec.operation {
            AllReduce(_) => all_reduce(b),
            Broadcast { root } => tree::broadcast(b, root, chain),
            Reduce { root, .. } => tree::reduce(b, root, chain),
            AllGather => all_gather(b),
            ReduceScatter(_) => reduce_scatter(b),
            other => unsuited(other),
        }
    }

    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
        let (count, n) = (spec.count, hosts.world_size());
        let size = |index| spec.vector_chunk(n, index).len();
        let all = match spec.operation {
            AllReduce(_) => Traffic::of(2 * (n - 1), 2 * count - size(rank + 1) - size(rank + 2))
                .receiving(2 * count - size(rank) - size(rank + 1)),
            Broadcast { .. } | Reduce { .. } => tree::traffic(spec, rank, n, chain),
            _ => Traffic::of(n - 1, (n - 1) * count),
        };
        flat(all, hosts)
    }

    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
        let steps = hosts.world_size() - 1;
        flat(if matches!(spec.operation, AllReduce(_)) { 2 * steps } else { steps }, hosts)
    }
}

fn chain(place: usize, n: usize) -> (Option<usize>, Vec<usize>) {
    (place.checked_sub(1), (place + 1..n).take(1).collect())
}

fn all_reduce(b: &mut Builder<'_>) {
    let (rank, n) = (b.rank, b.n);
    for step in 0..n - 1 {
        let sent = b.vector_chunk(rank + n - step);
        let region = if step == 0 { b.input(sent) } else { b.output(sent) };
        b.send(b.next(), region);
        let reduced = b.vector_chunk(rank + 2 * n - step - 1);
        let sources = vec![Source::Peer(b.previous()), Source::Own(b.input(reduced.clone()))];
        b.reduce_into(b.output(reduced), sources, step == n - 2);
    }
    for step in 0..n - 1 {
        b.send(b.next(), b.output(b.vector_chunk(rank + 1 + n - step)));
        b.receive(b.previous(), b.output(b.vector_chunk(rank + n - step)));
    }
}

fn all_gather(b: &mut Builder<'_>) {
    let (rank, n) = (b.rank, b.n);
    let own = b.lone_input();
    b.send(b.next(), own);
    b.copy(own, b.output(b.rank_chunk(rank)));
    for step in 1..n {
        b.receive(b.previous(), b.output(b.rank_chunk(rank + n - step)));
        if step < n - 1 {
            b.send(b.next(), b.output(b.rank_chunk(rank + n - step)));
        }
    }
}

fn reduce_scatter(b: &mut Builder<'_>) {
    let (rank, n) = (b.rank, b.n);
    // In place, partial sums travel in the array itself; otherwise in scratch of the length of one chunk: a partial sum is sent
    // before the next one is computed.
    for step in 0..n - 1 {
        let sent = b.rank_chunk(rank + 2 * n - 1 - step);
        let reduced = b.rank_chunk(rank + 2 * n - 2 - step);
        let in_place = b.spec.in_place;
        let region = match (step, in_place) {
            (0, _) => b.input(sent),
            (_, true) => b.output(sent),
            (_, false) => b.scratch(b.spec.count),
        };
        b.send(b.next(), region);
        let last = step == n - 2;
        let into = match (last, in_place) {
            (true, _) => b.lone_output(),
            (false, true) => b.output(reduced.clone()),
            (false, false) => b.scratch(b.spec.count),
        };
        let sources = vec![Source::Peer(b.previous()), Source::Own(b.input(reduced))];
        b.reduce_into(into, sources, last);
    }
}
