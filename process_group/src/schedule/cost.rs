//! What a schedule sends, in closed form, and how long it should take.

use std::ops::Range;
use std::time::Duration;

use super::Algorithm::{self, Direct, HalvingDoubling, Hierarchical, RecursiveDoubling, Ring};
use super::Hosts;
use super::build::{CollectiveSpec, Tokens, chunk_range, exchanges_whole, largest_power_of_two, token_tree};
use crate::operation::Operation;
use crate::rank::Rank;

/// What one rank sends in one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Messages.
    pub messages: usize,
    /// Elements in them.
    pub elements: usize,
}

/// What `rank` of at least two sends. The programs of [`build`](super::build) send exactly this.
pub fn traffic(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> Traffic {
    let Traffic { messages, elements } = payloads(spec, rank, hosts);
    if spec.agrees_pairwise() {
        return Traffic { messages: messages.max(hosts.world_size() - 1), elements };
    }
    let tokens = tokens(spec, rank, hosts.world_size());
    Traffic { messages: messages + tokens, elements: elements + tokens }
}

/// Messages of one element by which the ranks agree at the root.
fn tokens(spec: CollectiveSpec, rank: usize, n: usize) -> usize {
    let Tokens { collects, releases } = Tokens::of(spec);
    let place = |root: Rank| (rank + n - root.index()) % n;
    let up = collects.map_or(0, |root| usize::from(place(root) > 0));
    up + releases.map_or(0, |root| children(place(root), n, token_tree(spec)))
}

fn payloads(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> Traffic {
    let (count, n) = (spec.count, hosts.world_size());
    let size = |index: usize| chunk_range(count, n, index % n).len();
    let of = |messages: usize, elements: usize| Traffic { messages, elements };
    match (spec.operation, spec.algorithm) {
        _ if spec.has_tokens_only() => of(0, 0),
        (Operation::AllReduce(_), Ring) => of(2 * (n - 1), 2 * count - size(rank + 1) - size(rank + 2)),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => {
            let messages = surplus_messages(rank, n)
                .unwrap_or_else(|back| largest_power_of_two(n).ilog2() as usize + back);
            of(messages, messages * count)
        }
        (Operation::AllReduce(_), HalvingDoubling) => match surplus_messages(rank, n) {
            Ok(messages) => of(messages, messages * count),
            Err(back) => {
                let power = largest_power_of_two(n);
                let block = |chunks: Range<usize>| {
                    chunk_range(count, power, chunks.end - 1).end
                        - chunk_range(count, power, chunks.start).start
                };
                let steps = power.ilog2() as usize;
                let doubling: usize =
                    (0..steps).map(|s| rank >> s << s).zip(0..).map(|(at, s)| block(at..at + (1 << s))).sum();
                of(2 * steps + back, count - block(rank..rank + 1) + doubling + back * count)
            }
        },
        (Operation::AllReduce(_), Direct) if spec.is_one_shot() => of(n - 1, (n - 1) * count),
        (Operation::AllReduce(_), Direct) => of(2 * (n - 1), count - size(rank) + (n - 1) * size(rank)),
        (Operation::AllReduce(_), Hierarchical) => hierarchical(count, rank, hosts),
        (Operation::Broadcast { root }, HalvingDoubling) => {
            // Chunks of all but the root, which sends each of them once.
            let place = (rank + n - root.index()) % n;
            if place == 0 {
                of(n - 1, count)
            } else {
                of(n - 2, (n - 2) * chunk_range(count, n - 1, place - 1).len())
            }
        }
        (Operation::Broadcast { root }, algorithm) => {
            let children = children((rank + n - root.index()) % n, n, algorithm);
            of(children, children * count)
        }
        (Operation::Reduce { root, .. }, HalvingDoubling) => {
            let back = usize::from(rank != root.index());
            of(n - 1 + back, count - size(rank) + back * size(rank))
        }
        (Operation::Reduce { root, .. } | Operation::Gather { root }, _) => {
            let up = usize::from(rank != root.index());
            of(up, up * count)
        }
        (Operation::Scatter { root }, _) => {
            let messages = if rank == root.index() { n - 1 } else { 0 };
            of(messages, messages * count)
        }
        (Operation::Send { .. }, _) => of(1, count),
        (Operation::Recv { .. }, _) | (Operation::Barrier, Direct) => of(0, 0),
        // One chunk to each of the others: all-gather, reduce-scatter, all-to-all, in a ring or directly.
        _ => of(n - 1, (n - 1) * count),
    }
}

fn hierarchical(count: usize, rank: usize, hosts: &Hosts) -> Traffic {
    let (chunks, h) = (hosts.counterparts(), hosts.count());
    let (host, place) = hosts.place(rank);
    if place >= chunks {
        return Traffic { messages: chunks, elements: count };
    }
    let siblings = hosts.ranks()[host].len() - 1;
    let chunk = chunk_range(count, chunks, place).len();
    let (between, exchanged) = if exchanges_whole(h, chunk) {
        (h - 1, (h - 1) * chunk)
    } else {
        let piece = chunk_range(chunk, h, host).len();
        (2 * (h - 1), chunk - piece + (h - 1) * piece)
    };
    Traffic {
        messages: chunks - 1 + between + siblings,
        elements: count - chunk + exchanged + siblings * chunk,
    }
}

/// `Ok(messages)` of a surplus rank, `Err(messages back to its surplus rank)` of the others.
fn surplus_messages(rank: usize, n: usize) -> Result<usize, usize> {
    let power = largest_power_of_two(n);
    if rank >= power { Ok(1) } else { Err(usize::from(rank + power < n)) }
}

fn children(place: usize, n: usize, algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::Ring => usize::from(place + 1 < n),
        Algorithm::RecursiveDoubling => {
            let lowest = if place == 0 { n.next_power_of_two() } else { place & place.wrapping_neg() };
            (0..usize::BITS).map(|bit| 1usize << bit).take_while(|b| *b < lowest && place + b < n).count()
        }
        _ => {
            if place == 0 {
                n - 1
            } else {
                0
            }
        }
    }
}

/// Messages that must follow one another until the last rank is done.
pub fn rounds(spec: CollectiveSpec, hosts: &Hosts) -> usize {
    let n = hosts.world_size();
    let doubling = doubling_rounds(n);
    let power = largest_power_of_two(n);
    let surplus = if power == n { 0 } else { 2 };
    let payloads = match (spec.operation, spec.algorithm) {
        (Operation::AllReduce(_), Ring) => 2 * (n - 1),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => power.ilog2() as usize + surplus,
        (Operation::AllReduce(_), HalvingDoubling) => 2 * power.ilog2() as usize + surplus,
        (Operation::AllReduce(_), Direct) if spec.is_one_shot() => 1,
        (Operation::AllReduce(_), Hierarchical) => {
            let within = if hosts.count() == n { 0 } else { 2 };
            let chunk = spec.count.div_ceil(hosts.counterparts());
            let between = match hosts.count() {
                1 => 0,
                h if exchanges_whole(h, chunk) => 1,
                _ => 2,
            };
            within + between
        }
        (Operation::AllReduce(_), Direct)
        | (Operation::Broadcast { .. } | Operation::Reduce { .. }, HalvingDoubling) => 2,
        (_, Ring) => n - 1,
        (_, RecursiveDoubling) => doubling,
        _ => 1,
    };
    let Tokens { collects, releases } = Tokens::of(spec);
    if spec.has_tokens_only() {
        2
    } else if collects.or(releases).is_none() {
        payloads
    } else {
        payloads + if token_tree(spec) == Direct { 1 } else { doubling }
    }
}

/// Depth of a binomial tree over `n` ranks.
fn doubling_rounds(n: usize) -> usize {
    n.next_power_of_two().ilog2() as usize
}

/// What the links and processors of a group can do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkModel {
    /// From a send until the receiver runs, in seconds.
    pub latency: f64,
    /// Processor time of one message on both ends, in seconds.
    pub message: f64,
    /// Time of one byte through one link, in seconds.
    pub byte: f64,
    /// How many ranks can move data at the same time: of those that share CPUs, as many as there are CPUs.
    pub parallel: usize,
}

/// Expected time of a call.
///
/// All ranks' messages and bytes, as far as they cannot go in parallel, plus, for each round, one latency for every rank that shares a
/// processor: a receiver runs after the others there. Pipelining hides neither: on one host the processors that copy are the bottleneck,
/// not the wires.
pub fn estimate(spec: CollectiveSpec, hosts: &Hosts, element_size: usize, model: &LinkModel) -> Duration {
    let n = hosts.world_size();
    let all = (0..n).map(|rank| traffic(spec, rank, hosts));
    let (messages, elements, most) =
        all.fold((0, 0, 0), |(m, e, most), t| (m + t.messages, e + t.elements, most.max(t.elements)));
    let parallel = model.parallel.clamp(1, n) as f64;
    // A single busy rank (a root) limits as much as the sum over ranks does.
    let bytes = (elements as f64 / parallel).max(most as f64) * element_size as f64;
    let latency = model.latency * (n as f64 / parallel).ceil();
    let seconds = rounds(spec, hosts) as f64 * latency + messages as f64 / parallel * model.message;
    Duration::from_secs_f64(seconds + bytes * model.byte)
}

#[cfg(test)]
mod tests {
    use super::super::build::Agreement;
    use super::*;

    #[test]
    fn a_round_waits_for_every_rank_that_shares_a_processor() {
        let spec = CollectiveSpec {
            operation: Operation::Barrier,
            algorithm: RecursiveDoubling,
            count: 1,
            in_place: true,
            zero_copy: false,
            agreement: Agreement::Pairwise,
        };
        let of = |parallel| {
            let model = LinkModel { latency: 1.0, message: 0.0, byte: 0.0, parallel };
            estimate(spec, &Hosts::one(8), 1, &model).as_secs()
        };
        assert_eq!([8, 4, 3, 1].map(of), [3, 6, 9, 24]);
    }
}
