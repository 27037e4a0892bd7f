//! The traffic of a schedule, in closed form, and its expected time: the α-β model of R. Thakur, R. Rabenseifner
//! and W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, in which ranks may share processors. It
//! chooses algorithms, and computes the expected times of `ryz bench`, `ryz plan` and `ryz topo`. Counting the nodes of every rank's
//! program would give the same traffic, but each call of a new length chooses, among thousands of ranks too.

use std::time::Duration;

use super::Hosts;
use super::build::CollectiveSpec;

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
    pub(super) const fn of(messages: usize, elements: usize) -> Self {
        Self { messages, elements, received: elements }
    }

    pub(super) const fn receiving(self, received: usize) -> Self {
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

/// Returns the traffic over links within hosts, and between them.
fn by_level(spec: CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2] {
    let mut levels = spec.programs().traffic(&spec, rank, hosts);
    if spec.needs_empty_messages() {
        // Rooted operations have no algorithm that distinguishes the links.
        let level = &mut levels[usize::from(hosts.count() > 1)];
        level.messages = level.messages.max(hosts.world_size() - 1);
    }
    levels
}

/// Returns the values within hosts and between them of an algorithm that does not distinguish the two: all counts as between hosts
/// if there are several.
pub(super) fn flat<T: Default>(all: T, hosts: &Hosts) -> [T; 2] {
    if hosts.count() == 1 { [all, T::default()] } else { [T::default(), all] }
}

/// Returns the number of messages that must follow one another until the last rank is done.
pub fn rounds(spec: CollectiveSpec, hosts: &Hosts) -> usize {
    rounds_by_level(spec, hosts).iter().sum()
}

fn rounds_by_level(spec: CollectiveSpec, hosts: &Hosts) -> [usize; 2] {
    spec.programs().rounds(&spec, hosts)
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
    use crate::schedule::Algorithm::{Hierarchical, RecursiveDoubling, Ring};
    use crate::types::operation::{Operation, ReduceOp};

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
