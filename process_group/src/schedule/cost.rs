//! The traffic of a schedule, in closed form, and its expected time: the α-β model of R. Thakur, R. Rabenseifner
//! and W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, in which ranks may share processors. It
//! chooses algorithms, and computes the expected times of `ryz bench`, `ryz plan` and `ryz topo`. Counting the nodes of every rank's
//! program would give the same traffic, but each call of a new length chooses, among thousands of ranks too.

use std::ops::Range;
use std::time::Duration;

use super::Algorithm::{self, Direct, HalvingDoubling, Hierarchical, RecursiveDoubling, Ring};
use super::Hosts;
use super::build::{CollectiveSpec, chunk_range, exchanges_whole, largest_power_of_two};
use crate::types::operation::Operation;

/// The work of one rank in one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Number of messages that it sends.
    pub messages: usize,
    /// Number of elements in them.
    pub elements: usize,
    /// Number of elements that it receives. To add them to others costs no more than to copy them.
    pub received: usize,
}

impl Traffic {
    /// Returns the work of a rank that receives as much as it sends.
    const fn of(messages: usize, elements: usize) -> Self {
        Self { messages, elements, received: elements }
    }

    const fn receiving(self, received: usize) -> Self {
        Self { received, ..self }
    }

    const fn and(self, other: Self) -> Self {
        Self {
            messages: self.messages + other.messages,
            elements: self.elements + other.elements,
            received: self.received + other.received,
        }
    }
}

/// Returns the work of `rank` of at least two. The programs of [`build`](super::build) do exactly this.
pub fn traffic(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> Traffic {
    let [within, between] = by_level(spec, rank, hosts);
    within.and(between)
}

/// Returns the traffic over links within hosts, and between them. Only `hierarchical` distinguishes the two: for other algorithms
/// all traffic counts as between hosts if there are several.
fn by_level(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
    if spec.algorithm == Hierarchical {
        return hierarchical(spec.count, rank, hosts);
    }
    let mut all = payloads(spec, rank, hosts.world_size());
    if spec.needs_empty_messages() {
        all.messages = all.messages.max(hosts.world_size() - 1);
    }
    if hosts.count() == 1 { [all, Traffic::default()] } else { [Traffic::default(), all] }
}

fn payloads(spec: CollectiveSpec, rank: usize, n: usize) -> Traffic {
    let count = spec.count;
    let size = |index: usize| chunk_range(count, n, index % n).len();
    let of = Traffic::of;
    let others = n - 1;
    match (spec.operation, spec.algorithm) {
        (Operation::AllReduce(_), Ring) => of(2 * others, 2 * count - size(rank + 1) - size(rank + 2))
            .receiving(2 * count - size(rank) - size(rank + 1)),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => {
            match surplus_messages(rank, n) {
                Ok(messages) => of(messages, messages * count),
                Err(back) => {
                    let steps = largest_power_of_two(n).ilog2() as usize;
                    of(steps + back, (steps + back) * count)
                }
            }
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
        (Operation::AllReduce(_), Direct) if spec.is_one_shot() => of(others, others * count),
        (Operation::AllReduce(_), Direct) => of(2 * others, count - size(rank) + others * size(rank)),
        (Operation::Broadcast { root }, HalvingDoubling) => {
            // The chunks of all ranks except the root, which sends each of them once.
            let place = (rank + n - root.index()) % n;
            if place == 0 {
                of(others, count).receiving(0)
            } else {
                of(n - 2, (n - 2) * chunk_range(count, others, place - 1).len()).receiving(count)
            }
        }
        (Operation::Broadcast { root }, algorithm) => {
            let children = children((rank + n - root.index()) % n, n, algorithm);
            of(children, children * count).receiving(usize::from(rank != root.index()) * count)
        }
        (Operation::Reduce { root, .. }, HalvingDoubling) => {
            let back = usize::from(rank != root.index());
            of(others + back, count - size(rank) + back * size(rank))
                .receiving(others * size(rank) + (1 - back) * (count - size(rank)))
        }
        (Operation::Reduce { root, .. }, algorithm) => {
            let up = usize::from(rank != root.index());
            let children = children((rank + n - root.index()) % n, n, algorithm);
            of(up, up * count).receiving(children * count)
        }
        (Operation::Gather { root }, _) => {
            let up = usize::from(rank != root.index());
            of(up, up * count).receiving((1 - up) * others * count)
        }
        (Operation::Scatter { root }, _) => {
            let messages = if rank == root.index() { others } else { 0 };
            of(messages, messages * count).receiving(usize::from(messages == 0) * count)
        }
        (Operation::Send { .. }, _) => of(1, count).receiving(0),
        (Operation::Recv { .. }, _) => of(0, 0).receiving(count),
        // One chunk to each of the other ranks, in a ring or directly.
        (_, Ring | Direct) => of(others, others * count),
        (operation, algorithm @ (RecursiveDoubling | HalvingDoubling | Hierarchical)) => {
            unreachable!("{algorithm:?} does not suit {operation:?}")
        }
    }
}

fn hierarchical(count: usize, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
    let (chunks, h) = (hosts.counterparts(), hosts.count());
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

/// Returns `Ok(messages)` for a surplus rank, and `Err(messages back to its surplus rank)` for the others.
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
        Algorithm::Direct if place == 0 => n - 1,
        Algorithm::Direct => 0,
        Algorithm::HalvingDoubling | Algorithm::Hierarchical => unreachable!("these have no tree of ranks"),
    }
}

/// Returns the number of messages that must follow one another until the last rank is done.
pub fn rounds(spec: CollectiveSpec, hosts: &Hosts) -> usize {
    rounds_by_level(spec, hosts).iter().sum()
}

fn rounds_by_level(spec: CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
    let n = hosts.world_size();
    let power = largest_power_of_two(n);
    let surplus = if power == n { 0 } else { 2 };
    let rounds = match (spec.operation, spec.algorithm) {
        (_, Hierarchical) => {
            let within = if hosts.count() == n { 0 } else { 2 };
            let chunk = spec.count.div_ceil(hosts.counterparts());
            let between = match hosts.count() {
                1 => 0,
                h if exchanges_whole(h, chunk) => 1,
                _ => 2,
            };
            return [within, between];
        }
        (Operation::AllReduce(_), Ring) => 2 * (n - 1),
        (Operation::AllReduce(_) | Operation::Barrier, RecursiveDoubling) => power.ilog2() as usize + surplus,
        (Operation::AllReduce(_), HalvingDoubling) => 2 * power.ilog2() as usize + surplus,
        (Operation::AllReduce(_), Direct) if spec.is_one_shot() => 1,
        (Operation::AllReduce(_), Direct)
        | (Operation::Broadcast { .. } | Operation::Reduce { .. }, HalvingDoubling) => 2,
        (_, Ring) => n - 1,
        (_, RecursiveDoubling) => doubling_rounds(n),
        (_, Direct) => 1,
        (operation, HalvingDoubling) => unreachable!("halving and doubling does not suit {operation:?}"),
    };
    if hosts.count() == 1 { [rounds, 0] } else { [0, rounds] }
}

/// Returns the depth of a binomial tree over `n` ranks.
fn doubling_rounds(n: usize) -> usize {
    n.next_power_of_two().ilog2() as usize
}

/// The cost of one kind of link, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkCost {
    /// Time from a send until the receiver runs.
    pub latency: f64,
    /// Processor time of one message on both ends.
    pub message: f64,
    /// Time of one byte through one link.
    pub byte: f64,
}

/// The performance of the links and processors of a group.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkModel {
    /// Cost of the links within a host.
    pub within: LinkCost,
    /// Cost of the links between hosts.
    pub between: LinkCost,
    /// Time to receive a byte, as a share of the time to send it. A rank does both at the same time.
    pub receive: f64,
    /// Time until a rank runs in place of another that shares its processor, in seconds.
    pub switch: f64,
    /// Number of ranks that can move data at the same time: of those that share CPUs, as many as there are CPUs.
    pub parallel: usize,
}

impl LinkModel {
    /// Creates a model in which all links are like this one and duplex, and each rank of `ranks` has a processor: a bound for measured
    /// times.
    pub const fn bound(link: LinkCost, ranks: usize) -> Self {
        Self { within: link, between: link, receive: 1.0, switch: 0.0, parallel: ranks }
    }
}

/// Returns the expected time of a call. A single rank takes none.
///
/// The time includes all ranks' messages and bytes, as far as they cannot run in parallel, plus, for each round, a latency, and a
/// switch for every other rank that shares the processor: a receiver runs after those. Pipelining hides neither: on one host the
/// bottleneck is the processors that copy, not the wires.
pub fn estimate(spec: CollectiveSpec, hosts: &Hosts, element_size: usize, model: &LinkModel) -> Duration {
    let n = hosts.world_size();
    if n < 2 {
        return Duration::ZERO;
    }
    let parallel = model.parallel.clamp(1, n) as f64;
    let rounds = rounds_by_level(spec, hosts);
    // At each level: the work of all ranks, and the maximum number of elements that occupies one rank.
    let mut sums = [Traffic::default(); 2];
    let mut most = [0.0f64; 2];
    for levels in (0..n).map(|rank| by_level(spec, rank, hosts)) {
        for (level, one) in levels.into_iter().enumerate() {
            sums[level] = sums[level].and(one);
            let (sent, received) = (one.elements as f64, one.received as f64);
            most[level] = most[level].max(sent).max(received * model.receive);
        }
    }
    // A single busy rank (a root) limits the time as much as the sum over ranks does.
    let waits = ((n as f64 / parallel).ceil() - 1.0) * model.switch;
    let seconds = [model.within, model.between].into_iter().enumerate().map(|(level, link)| {
        let sum = sums[level];
        let elements = (sum.elements as f64 / parallel).max(most[level]);
        rounds[level] as f64 * (link.latency + waits)
            + sum.messages as f64 / parallel * link.message
            + elements * element_size as f64 * link.byte
    });
    Duration::from_secs_f64(seconds.sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::operation::ReduceOp;

    #[test]
    fn a_round_waits_for_every_rank_that_shares_a_processor() {
        let spec = CollectiveSpec {
            operation: Operation::Barrier,
            algorithm: RecursiveDoubling,
            count: 1,
            in_place: true,
        };
        let of = |parallel| {
            let link = LinkCost { latency: 1.0, message: 0.0, byte: 0.0 };
            let model = LinkModel { switch: 1.0, parallel, ..LinkModel::bound(link, 8) };
            estimate(spec, &Hosts::one(8), 1, &model).as_secs()
        };
        assert_eq!([8, 4, 3, 1].map(of), [3, 6, 9, 24]);
    }

    #[test]
    fn for_large_vectors_a_ring_takes_the_time_of_its_share() {
        let link = LinkCost { latency: 1e-6, message: 0.0, byte: 1e-9 };
        for ranks in 2..64 {
            let spec = CollectiveSpec {
                operation: Operation::AllReduce(ReduceOp::Sum),
                algorithm: Ring,
                count: ranks << 40,
                in_place: true,
            };
            let seconds = estimate(spec, &Hosts::one(ranks), 1, &LinkModel::bound(link, ranks)).as_secs_f64();
            let share = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
            assert!((seconds / (share * spec.count as f64 * link.byte) - 1.0).abs() < 1e-6, "{ranks} ranks");
        }
    }

    #[test]
    fn hosts_with_several_ranks_save_time_on_the_slow_links() {
        let link = |latency, byte| LinkCost { latency, message: 0.0, byte };
        let (within, between) = (link(0.6e-6, 1.0 / 300e9), link(2.7e-6, 1.0 / 25e9));
        let model = LinkModel { within, ..LinkModel::bound(between, 32) };
        let hosts = Hosts::of((0..32).map(|rank| rank / 8));
        let of = |algorithm| {
            let spec = CollectiveSpec {
                operation: Operation::AllReduce(ReduceOp::Sum),
                algorithm,
                count: 100_000_000,
                in_place: true,
            };
            estimate(spec, &hosts, 1, &model)
        };
        assert!(of(Hierarchical) < of(Ring) / 3);
    }
}
