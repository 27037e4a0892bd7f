//! Paths of groups on host memory: schedules over links, which are sockets or go through shared memory, and reads of peers' memory.

use std::collections::HashMap;

use super::tuned::{self, TunedRange};
use super::{Condition, Otherwise, Path, PathTable, Reason, Rule};
use crate::processor::{ProcessorMaker, processor};
use crate::roster::Member;
use crate::schedule::build::Agreement;
use crate::schedule::cost::LinkModel;
use crate::schedule::{Algorithm, Hosts};

/// From this many bytes of each rank's chunk on, an all-reduce and an all-gather among more than two ranks of one host read payloads
/// from their senders' memory where that can be done. Measured with 4 ranks on two cores: through Unix sockets, all-reduces take 1.0
/// to 1.1 times as long, all-gathers 1.0 to 1.4 times; smaller chunks take 0.7 to 1.0 times as long. Of other operations among more than
/// two ranks, only [long broadcasts](CROSS_MEMORY_BROADCAST_FROM) gain.
pub const CROSS_MEMORY_FROM: usize = 512 << 10;

/// From this many bytes of each rank's chunk on, an all-gather between two ranks of one host does so too. Measured on a Zen 4, through Unix
/// sockets: chunks of 64 KB take 0.6 times as long, of 128 KB 0.85 times, of 256 KB 1.15 times, longer ones 1.06 to 1.45 times; on a Xeon
/// 1.05 times with 128 KB, 1.5 times with 256 KB, 1.7 to 2.1 times above.
pub const CROSS_MEMORY_GATHER_OF_TWO_FROM: usize = 192 << 10;

/// The same of a reduce-scatter: on a Zen 4 sockets take 0.96 times as long with chunks of 256 KB, 1.03 to 1.18 times with longer ones; on a
/// Xeon 1.3 times with 256 KB, 1.5 to 1.8 times above.
pub const CROSS_MEMORY_REDUCE_SCATTER_OF_TWO_FROM: usize = 384 << 10;

/// From this many bytes on, a broadcast within one host reads the root's memory if links are sockets and several processors can copy.
/// Between two ranks, two threads read, as the root has nothing to do meanwhile. Measured on a Zen 4: Unix sockets take 1.1 to 1.4 times as
/// long from 10 MB on, 0.8 to 0.9 times from 1 MB to 8 MB; on a Xeon, 1.04 to 1.65 times from 1 MB on. Among 3, 4 and 8 ranks, on both, they
/// take 1.0 to 1.7 times as long with 10 MB, 1.2 to 1.9 times with 30 and 100 MB; with 10 MB and a processor for each of 8 ranks 0.86 times.
/// More ranks were not measured.
pub const CROSS_MEMORY_BROADCAST_FROM: usize = 8 << 20;

/// From this many bytes on, an all-reduce among more than two ranks goes round the ring; through shared memory, among more than
/// [`DIRECT_UP_TO`]. Measured through sockets on two cores with 4 ranks and 100 MB: `direct` takes 1.1 times as long,
/// `halving_doubling` between 1.0 and 1.7 times.
pub const RING_FROM: usize = 32 << 20;

/// From this many bytes on, an all-reduce over hosts that have several ranks is hierarchical if links within a host are sockets.
/// Measured with two ranks on each of two hosts and a cable of 1 Gbit/s: half the time of every other algorithm from 256 KB on, less from
/// 64 KB, more at 16 KB. Where links within hosts go through memory, no algorithm took less time from 1 KB to 32 KB, at 1 and at 10 Gbit/s.
/// Hosts with different numbers of ranks were not measured.
pub const HIERARCHICAL_FROM: usize = 32 << 10;

/// What a link costs: the time from a send until the receiver runs, the processor time of one message on both ends, and the time of
/// one byte, in seconds.
type Cost = (f64, f64, f64);
/// Of TCP, measured between processes of one host.
const TCP: Cost = (12e-6, 5e-6, 0.45e-9);
/// Of Unix sockets, measured with 4 ranks on two cores.
const UNIX: Cost = (3e-6, 2.6e-6, 0.25e-9);
/// Of shared memory, measured between two ranks that have a processor each.
const SHARED: Cost = (1e-6, 0.6e-6, 0.2e-9);

/// From this many bytes on, an all-reduce between two ranks of one host goes round the ring if links are sockets, but for
/// [long ones](DOUBLING_OF_TWO_FROM). Measured: `recursive_doubling`, which reduces each element on both, takes 1.1 to 1.4 times as long.
pub const RING_OF_TWO_FROM: usize = 192 << 10;

/// From this many bytes on, a broadcast among 3 or 4 ranks of one host is `halving_doubling` if links are sockets, and direct below.
/// Measured on two cores: with 4 ranks, `direct` takes up to 1.4 times as long above, `halving_doubling` 1.0 to 1.5 times below.
pub const SCATTERED_BROADCAST_FROM: usize = 192 << 10;

/// The same through shared memory, where `direct` takes 1.2 to 1.5 times as long above.
pub const SHARED_SCATTERED_BROADCAST_FROM: usize = 128 << 10;

/// Up to this many ranks, the most measured, an all-reduce through shared memory is direct, but for
/// [long ones of two ranks](DOUBLING_OF_TWO_FROM). With 2 ranks and up to 2 MB, `recursive_doubling` mostly takes 1.0 to 1.4 times as long:
/// it reduces each element on both. With 4 ranks and 32 MB, `ring` takes 1.3 times as long, and reading peers' memory 1.7 times.
pub const DIRECT_UP_TO: usize = 4;

/// From this many bytes on, an all-reduce between two ranks of one host is `recursive_doubling`: others pass over the vector a second time,
/// when it has fallen out of the cache. From 8 MB on, through shared memory, `direct` takes 1.1 to 1.6 times as long on a Zen 5, and 1.2 to
/// 1.3 times on a Xeon. Through sockets, `ring` takes 1.08 times as long with 10 MB and 1.16 to 1.22 times above on a Zen 4, 1.16 to 1.22
/// times from 6 MB on on a Xeon.
pub const DOUBLING_OF_TWO_FROM: usize = 6 << 20;

/// From this many bytes of each rank's chunk on, an all-gather between two ranks on processors of Intel reads the peer's memory. Measured
/// on a Xeon: shared memory takes 0.9 times as long with chunks of 64 KB, 1.05 times with 128 KB, 1.2 to 1.7 times with longer ones, and less
/// with [the longest](INTEL_LONG_GATHER_FROM).
pub const INTEL_GATHER_FROM: usize = 112 << 10;

/// The same of a reduce-scatter: with chunks of 2 MB to 50 MB, shared memory takes 1.1 to 1.6 times as long.
pub const INTEL_REDUCE_SCATTER_FROM: usize = 1 << 20;

/// From this many bytes of each rank's chunk on, such an all-gather goes through shared memory. Measured on four Xeons, shared memory takes
/// 0.9 to 1.4 times as long as reading with chunks of 5 MB, 0.9 to 1.2 times with 7 MB, 0.85 to 0.9 times with 10 and 15 MB, 0.83 to 1.0 times
/// with 50 MB.
pub const INTEL_LONG_GATHER_FROM: usize = 6 << 20;

/// Groups of up to this many ranks [agree](Agreement) pairwise. Measured with broadcasts on two cores through shared memory: with 3 and 4 ranks,
/// agreement at the root takes 1.0 to 1.4 times as long; with 8, 0.7 to 1.1 times. Barriers take as long with 3 and 4, 0.6 times with 8.
pub const PAIRWISE_UP_TO: usize = 4;

/// The same through sockets within one host: with 3 ranks, agreement at the root takes 1.0 to 1.2 times as long; with 4, 0.8 to 1.0 times;
/// with 8, 0.6 to 0.9 times.
pub const PAIRWISE_ON_UNIX_UP_TO: usize = 3;

/// How a group with these links agrees on rooted calls and direct barriers.
pub fn agreement(links: Links, hosts: &Hosts) -> Agreement {
    let most = match links {
        Links::Sockets(_) if hosts.count() == 1 => PAIRWISE_ON_UNIX_UP_TO,
        _ => PAIRWISE_UP_TO,
    };
    if hosts.world_size() <= most { Agreement::Pairwise } else { Agreement::AtRoot }
}

/// What the links of a group are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Links {
    /// Sockets, but for hosts whose ranks share memory. The text says why not all ranks do.
    Sockets(&'static str),
    /// Memory that the ranks of a host share, and sockets between hosts.
    SharedWithinHosts,
    /// Memory that all ranks share.
    SharedMemory,
}

impl Links {
    /// The path that streams over them with this schedule.
    pub const fn path(self, algorithm: Algorithm) -> Path {
        match self {
            Self::Sockets(_) | Self::SharedWithinHosts => Path::Tcp(algorithm),
            Self::SharedMemory => Path::SharedMemory(algorithm),
        }
    }
}

/// What a choice may depend on. All but `is_intel` comes from the roster and is the same on every rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    /// The ranks by host.
    pub hosts: Hosts,
    /// How many ranks can move data at the same time: of those that share CPUs, as many as there are CPUs.
    pub parallel: usize,
    /// The fewest CPUs that one of the ranks may use.
    pub fewest_cpus: usize,
    /// Whether this rank's processor is Intel's. The same on all ranks of one host, so only rules for one host may use it.
    pub is_intel: bool,
}

impl Topology {
    /// Of a group with these members.
    pub fn of(members: &[&Member]) -> Self {
        let mut sharing: HashMap<(&str, &str), (usize, usize)> = HashMap::new();
        for member in members {
            let (ranks, cpus) = sharing.entry(member.cpus_shared()).or_default();
            *ranks += 1;
            *cpus = (*cpus).max(member.cpus.count as usize);
        }
        let parallel = sharing.values().map(|(ranks, cpus)| (*ranks).min((*cpus).max(1))).sum();
        let hosts = Hosts::of(members.iter().map(|member| &member.host));
        let fewest_cpus = members.iter().map(|member| member.cpus.count as usize).min().unwrap_or_default();
        Self { hosts, parallel, fewest_cpus, is_intel: processor().maker == ProcessorMaker::Intel }
    }
}

/// The table of a group on host memory. `links`: what carries headers, and payloads that are not read from the sender's memory.
/// `cross_memory`: whether every rank can read every other's memory. `demand`: the algorithm of `process_group.tcp.algorithm`.
/// `tuned`: what was measured on this machine, which comes before the built-in rules.
pub fn table(
    topology: &Topology,
    links: Links,
    cross_memory: bool,
    demand: Option<Algorithm>,
    tuned: &[TunedRange],
) -> PathTable {
    let hosts = &topology.hosts;
    let hierarchical = links.path(Algorithm::Hierarchical);
    let mut paths: Vec<Path> = Algorithm::ALL.into_iter().map(|algorithm| links.path(algorithm)).collect();
    let mut rules = vec![
        Rule {
            path: links.path(Algorithm::Direct),
            when: vec![Condition::HalfReduction],
            because: Reason::BuiltIn("all operands of 16-bit floats meet in one place and are rounded once"),
        },
        Rule {
            path: links.path(Algorithm::Ring),
            when: vec![
                Condition::Operation("all_reduce"),
                Condition::RanksFrom(3),
                Condition::BytesFrom(RING_FROM),
            ],
            because: Reason::BuiltIn(
                "each rank fills one link at a time, so that the least is in flight and falls out of the cache",
            ),
        },
    ];
    if hosts.count() > 1 {
        // Measured on two hosts with two ranks each: `direct` takes 1.6 times as long.
        let when = vec![Condition::Operation("barrier")];
        rules.push(rule(
            links,
            Algorithm::RecursiveDoubling,
            when,
            "the fewest messages cross between the hosts",
        ));
    }
    if hosts.are_two_levels() {
        let mut when = vec![Condition::Operation("all_reduce")];
        if links != Links::SharedWithinHosts {
            when.push(Condition::BytesFrom(HIERARCHICAL_FROM));
        }
        let because = Reason::BuiltIn("the least crosses between the hosts");
        rules.insert(1, Rule { path: hierarchical, when, because });
    } else {
        paths.retain(|path| *path != hierarchical);
    }
    if cross_memory {
        paths.push(Path::CrossMemory);
    }
    match links {
        Links::SharedMemory => {
            rules.splice(1..1, shared_rules(links));
            if cross_memory && topology.is_intel {
                rules.splice(0..0, intel_rules(links));
            }
        }
        Links::Sockets(_) if hosts.count() == 1 => {
            rules.splice(1..1, unix_rules(links));
            if cross_memory {
                rules.splice(0..0, cross_memory_rules(topology));
            }
        }
        Links::Sockets(_) | Links::SharedWithinHosts => {}
    }
    rules.splice(..0, tuned::rules(tuned, hosts.world_size(), &paths));
    let (latency, message, byte) = match links {
        Links::Sockets(_) if hosts.count() == 1 => UNIX,
        Links::Sockets(_) | Links::SharedWithinHosts => TCP,
        Links::SharedMemory => SHARED,
    };
    let model = LinkModel { latency, message, byte, parallel: topology.parallel };
    let mut table = PathTable::new(
        hosts.world_size(),
        paths,
        rules,
        Otherwise::Cheapest { model, agreement: agreement(links, hosts) },
    )
    .demanding(demand);
    table = match links {
        Links::Sockets(why) => table.without(Path::SharedMemory(Algorithm::Direct), why),
        Links::SharedWithinHosts => table.without(
            Path::SharedMemory(Algorithm::Direct),
            "the ranks are on several hosts: only links within a host go through shared memory",
        ),
        Links::SharedMemory => table.without(
            Path::Tcp(Algorithm::Direct),
            "links go through shared memory; `tcp.shared_memory = false` turns that off",
        ),
    };
    if hosts.count() > 1 && !hosts.are_two_levels() {
        table = table.without(hierarchical, "each rank has a host of its own");
    }
    if cross_memory {
        return table;
    }
    let why = if hosts.count() > 1 {
        "the ranks are on several hosts"
    } else {
        "not every rank may read every other's memory: the system forbids it, or process_group.tcp.cross_memory is false"
    };
    table.without(Path::CrossMemory, why)
}

/// Where every rank can read every other's memory and links are sockets.
fn cross_memory_rules(topology: &Topology) -> Vec<Rule> {
    let rule = |when, because| Rule { path: Path::CrossMemory, when, because: Reason::BuiltIn(because) };
    let (two, more) = (Condition::RanksUpTo(2), Condition::RanksFrom(3));
    let mut rules = Vec::from(
        [
            ("all_reduce", more, CROSS_MEMORY_FROM),
            ("all_gather", more, CROSS_MEMORY_FROM),
            ("all_gather", two, CROSS_MEMORY_GATHER_OF_TWO_FROM),
            ("reduce_scatter", two, CROSS_MEMORY_REDUCE_SCATTER_OF_TWO_FROM),
        ]
        .map(|(operation, ranks, chunk)| {
            let when = vec![Condition::Operation(operation), ranks, Condition::ChunkFrom(chunk)];
            rule(when, "each byte is copied once, from its sender's memory to where it belongs")
        }),
    );
    // Between two ranks, two threads of the receiver copy.
    let copiers = if topology.hosts.world_size() == 2 { topology.fewest_cpus } else { topology.parallel };
    if copiers > 1 {
        let when = vec![Condition::Operation("broadcast"), Condition::BytesFrom(CROSS_MEMORY_BROADCAST_FROM)];
        rules.push(rule(when, "each byte is copied once, from the root's memory, by several processors"));
    }
    rules
}

/// What was measured through Unix sockets.
fn unix_rules(links: Links) -> Vec<Rule> {
    let of_two = vec![
        Condition::Operation("all_reduce"),
        Condition::RanksUpTo(2),
        Condition::BytesFrom(RING_OF_TWO_FROM),
    ];
    let mut rules = broadcast_rules(links, SCATTERED_BROADCAST_FROM).to_vec();
    rules.push(long_of_two(links));
    rules.push(rule(links, Algorithm::Ring, of_two, "each element is reduced once"));
    rules
}

/// What was measured through shared memory on a Zen 5. Reading peers' memory was quicker nowhere up to 32 MB: the kernel's copy takes
/// longer than two copies through a ring that stays in the cache.
fn shared_rules(links: Links) -> Vec<Rule> {
    let few = vec![Condition::Operation("all_reduce"), Condition::RanksUpTo(DIRECT_UP_TO)];
    let mut rules = broadcast_rules(links, SHARED_SCATTERED_BROADCAST_FROM).to_vec();
    rules.push(long_of_two(links));
    rules.push(rule(links, Algorithm::Direct, few, "each element is reduced once, in the fewest steps"));
    rules
}

/// What was measured between two ranks on a Xeon, where a line that one processor has written takes longer to reach another.
fn intel_rules(links: Links) -> [Rule; 3] {
    let read = "one copy is faster than two on processors of Intel, where a line takes long from one core's cache to another's";
    let share = "two copies are faster than one where the message does not stay in a cache: the second stores past it";
    [
        (links.path(Algorithm::Direct), "all_gather", INTEL_LONG_GATHER_FROM, share),
        (Path::CrossMemory, "all_gather", INTEL_GATHER_FROM, read),
        (Path::CrossMemory, "reduce_scatter", INTEL_REDUCE_SCATTER_FROM, read),
    ]
    .map(|(path, operation, from, because)| Rule {
        path,
        when: vec![Condition::Operation(operation), Condition::RanksUpTo(2), Condition::ChunkFrom(from)],
        because: Reason::BuiltIn(because),
    })
}

/// Long all-reduces between two ranks of one host.
fn long_of_two(links: Links) -> Rule {
    let when = vec![
        Condition::Operation("all_reduce"),
        Condition::RanksUpTo(2),
        Condition::BytesFrom(DOUBLING_OF_TWO_FROM),
    ];
    rule(links, Algorithm::RecursiveDoubling, when, "one step, and no second pass over the vector")
}

/// Broadcasts among 3 or 4 ranks of one host: `halving_doubling` from this many bytes on, direct below.
fn broadcast_rules(links: Links, scattered_from: usize) -> [Rule; 2] {
    let short = vec![Condition::Operation("broadcast"), Condition::RanksFrom(3), Condition::RanksUpTo(4)];
    let mut long = short.clone();
    long.push(Condition::BytesFrom(scattered_from));
    [
        rule(links, Algorithm::HalvingDoubling, long, "all ranks copy at the same time"),
        rule(links, Algorithm::Direct, short, "one step"),
    ]
}

fn rule(links: Links, algorithm: Algorithm, when: Vec<Condition>, because: &'static str) -> Rule {
    Rule { path: links.path(algorithm), when, because: Reason::BuiltIn(because) }
}
