//! All-reduce on two levels: links within a host are fast, and the hosts share slow ones.

use super::build::{Builder, CollectiveSpec, chunk_range};
use super::cost::Traffic;
use super::program::Space;
use super::{Hosts, Programs, direct};
use crate::types::operation::Operation;

/// Maximum number of elements for which hosts exchange whole chunks instead of pieces.
const WHOLE_ELEMENTS: usize = 1024;

pub(super) struct Hierarchical;

impl Programs for Hierarchical {
    fn suits(&self, operation: Operation) -> bool {
        matches!(operation, Operation::AllReduce(_))
    }

    fn build(&self, b: &mut Builder<'_>) {
        all_reduce(b);
    }

    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
        let (count, chunks, h) = (spec.count, hosts.counterparts(), hosts.count());
        let (host, place) = hosts.place(rank);
        if place >= chunks {
            return [Traffic::of(chunks, count), Traffic::default()];
        }
        let siblings = hosts.ranks()[host].len() - 1;
        let chunk = chunk_range(count, chunks, place).len();
        let within = Traffic::of(chunks - 1 + siblings, count - chunk + siblings * chunk);
        let between = if exchanges_whole(h, chunk) {
            Traffic::of(h - 1, (h - 1) * chunk)
        } else {
            let piece = chunk_range(chunk, h, host).len();
            Traffic::of(2 * (h - 1), chunk - piece + (h - 1) * piece)
        };
        [within, between]
    }

    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
        let within = if hosts.count() == hosts.world_size() { 0 } else { 2 };
        let chunk = spec.count.div_ceil(hosts.counterparts());
        let between = match hosts.count() {
            1 => 0,
            h if exchanges_whole(h, chunk) => 1,
            _ => 2,
        };
        [within, between]
    }
}

/// Returns true if hosts exchange whole chunks of this length. Two hosts do not send more in this way, and save a round.
fn exchanges_whole(hosts: usize, length: usize) -> bool {
    hosts == 2 || length <= WHOLE_ELEMENTS
}

/// The vector is divided into as many chunks as every host has ranks. The rank at place `c` of each host reduces chunk `c` over
/// its host, then with its counterparts, and sends it to the ranks of its host. Between two hosts each byte travels once in
/// each direction.
///
/// After Thakur, Rabenseifner and Gropp for clusters of multi-core nodes; NCCL's older trees and Horovod do the same.
fn all_reduce(b: &mut Builder<'_>) {
    let hosts = b.hosts;
    let chunks = hosts.counterparts();
    let (host, place) = hosts.place(b.rank);
    let siblings = &hosts.ranks()[host];
    let count = b.spec.count;
    // The next place comes first: at any time all ranks of a host send to different ones.
    let others: Vec<usize> = (1..siblings.len()).map(|d| (place + d) % siblings.len()).collect();
    let with_chunk = || others.iter().copied().filter(|c| *c < chunks);
    for chunk in with_chunk() {
        b.send(siblings[chunk], b.input(chunk_range(count, chunks, chunk)));
    }
    if place < chunks {
        let mine = chunk_range(count, chunks, place);
        let (input, output) = (b.input(mine.clone()), b.output(mine.clone()));
        if others.is_empty() {
            b.copy(input, output);
        } else {
            let sources = b.in_order(siblings.iter().copied(), input);
            b.reduce_into(output, sources, hosts.count() == 1);
        }
        let counterparts: Vec<usize> = hosts.ranks().iter().map(|ranks| ranks[place]).collect();
        if hosts.count() > 1 {
            let is_one_shot = exchanges_whole(hosts.count(), mine.len());
            direct::all_reduce(b, (&counterparts, host), (Space::Output, mine), is_one_shot);
        }
        for other in &others {
            b.send(siblings[*other], output);
        }
    }
    for chunk in with_chunk() {
        b.receive(siblings[chunk], b.output(chunk_range(count, chunks, chunk)));
    }
}
