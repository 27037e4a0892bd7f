//! Partners at doubling distance exchange whole vectors, in a barrier one byte; for rooted operations, a binomial tree.

use super::build::{Builder, CollectiveSpec};
use super::cost::{Traffic, flat};
use super::surplus::{
    largest_power_of_two, reduce_surplus, return_to_surplus, surplus_messages, surplus_rounds,
};
use super::{Hosts, Programs, tree, unsuited};
use crate::types::operation::Operation::{self, AllReduce, Barrier, Broadcast, Reduce};

pub(super) struct RecursiveDoubling;

impl Programs for RecursiveDoubling {
    fn suits(&self, operation: Operation) -> bool {
        matches!(operation, AllReduce(_) | Broadcast { .. } | Reduce { .. } | Barrier)
    }

    fn build(&self, b: &mut Builder<'_>) {
        match b.spec.operation {
            AllReduce(_) | Barrier => all_reduce(b),
            Broadcast { root } => tree::broadcast(b, root, binomial),
            Reduce { root, .. } => tree::reduce(b, root, binomial),
            other => unsuited(other),
        }
    }

    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
        let n = hosts.world_size();
        if spec.operation.root().is_some() {
            return flat(tree::traffic(spec, rank, n, binomial), hosts);
        }
        let steps = largest_power_of_two(n).ilog2() as usize;
        let messages = surplus_messages(rank, n).unwrap_or_else(|back| steps + back);
        flat(Traffic::of(messages, messages * spec.count), hosts)
    }

    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
        let n = hosts.world_size();
        let rounds = if spec.operation.root().is_some() {
            n.next_power_of_two().ilog2() as usize
        } else {
            largest_power_of_two(n).ilog2() as usize + surplus_rounds(n)
        };
        flat(rounds, hosts)
    }
}

/// The parent is the place without its lowest set bit.
fn binomial(place: usize, n: usize) -> (Option<usize>, Vec<usize>) {
    let lowest = if place == 0 { n.next_power_of_two() } else { place & place.wrapping_neg() };
    let bits = (0..usize::BITS).map(|bit| 1 << bit).take_while(|bit| *bit < lowest);
    ((place > 0).then(|| place - lowest), bits.map(|bit| place + bit).filter(|child| *child < n).collect())
}

fn all_reduce(b: &mut Builder<'_>) {
    let power = largest_power_of_two(b.n);
    let Some(mut own) = reduce_surplus(b, power) else { return };
    let mut distance = 1;
    while distance < power {
        let partner = b.rank ^ distance;
        b.send(partner, own);
        let sources = b.pair(own, partner);
        own = b.output(b.all());
        distance *= 2;
        b.reduce_into(own, sources, distance == power);
    }
    return_to_surplus(b, power);
}
