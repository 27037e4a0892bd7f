//! Paths of groups on host memory: schedules over links, which are sockets or go through shared memory. The cost model chooses.

use std::collections::HashMap;

use super::tuned::{self, TunedRange};
use super::{Condition, Path, PathTable, Rule};
use crate::membership::roster::Member;
use crate::schedule::cost::{LinkCost, LinkModel};
use crate::schedule::{Algorithm, Hosts};

/// Cost of TCP between hosts.
const TCP: LinkCost = LinkCost { latency: 12e-6, message: 5e-6, byte: 0.45e-9 };
/// Cost of Unix sockets between processes of one host.
const UNIX: LinkCost = LinkCost { latency: 2.3e-6, message: 2.5e-6, byte: 0.32e-9 };
/// Cost of memory that two processes share.
const SHARED: LinkCost = LinkCost { latency: 1.4e-6, message: 0.35e-6, byte: 0.2e-9 };
/// Time to copy or reduce what another processor wrote, as a share of the time to write it.
const RECEIVE: f64 = 0.5;
/// Time until a rank runs in place of another that shares its processor, in seconds.
const SWITCH: f64 = 7e-6;

/// The kind of links of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Links {
    /// Sockets, except for hosts whose ranks share memory. The text is the reason why not all ranks do.
    Sockets(&'static str),
    /// Memory that the ranks of a host share, and sockets between hosts.
    SharedWithinHosts,
    /// Memory that all ranks share.
    SharedMemory,
}

impl Links {
    /// Returns the path that uses them with this schedule.
    pub(crate) const fn path(self, algorithm: Algorithm) -> Path {
        match self {
            Self::Sockets(_) | Self::SharedWithinHosts => Path::Tcp(algorithm),
            Self::SharedMemory => Path::SharedMemory(algorithm),
        }
    }
}

/// The facts on which a choice may depend. The same on every rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Topology {
    /// The ranks by host.
    pub hosts: Hosts,
    /// Number of ranks that can move data at the same time: of those that share CPUs, as many as there are CPUs.
    pub parallel: usize,
}

impl Topology {
    /// Returns the topology of a group with these members.
    pub(crate) fn of(members: &[&Member]) -> Self {
        let mut sharing: HashMap<(&str, &str), (usize, usize)> = HashMap::new();
        for member in members {
            let (ranks, cpus) = sharing.entry(member.cpus_shared()).or_default();
            *ranks += 1;
            *cpus = (*cpus).max(member.cpus.count as usize);
        }
        let parallel = sharing.values().map(|(ranks, cpus)| (*ranks).min((*cpus).max(1))).sum();
        Self { hosts: Hosts::of(members.iter().map(|member| &member.host)), parallel }
    }
}

/// Returns the table of a group on host memory. `demand` is the algorithm of `process_group.tcp.algorithm`. `tuned` contains ranges
/// of the table that `ryz tune` writes, which come before the cost model.
pub(crate) fn table(
    topology: &Topology,
    links: Links,
    demand: Option<Algorithm>,
    tuned: &[TunedRange],
) -> PathTable {
    let hosts = &topology.hosts;
    let hierarchical = links.path(Algorithm::Hierarchical);
    let mut paths: Vec<Path> = Algorithm::ALL.into_iter().map(|algorithm| links.path(algorithm)).collect();
    if hosts.why_one_level().is_some() {
        paths.retain(|path| *path != hierarchical);
    }
    let mut rules = tuned::rules(tuned, hosts.world_size(), &paths);
    rules.push(Rule {
        path: links.path(Algorithm::Direct),
        when: vec![Condition::HalfReduction],
        because: "all operands of 16-bit floats meet in one place and are rounded once".into(),
        is_measured: false,
    });
    let within = if matches!(links, Links::Sockets(_)) { UNIX } else { SHARED };
    let model =
        LinkModel { within, between: TCP, receive: RECEIVE, switch: SWITCH, parallel: topology.parallel };
    let table = PathTable::new(hosts.world_size(), paths, rules, Some((model, hosts.clone())))
        .demanding(demand.map(|algorithm| links.path(algorithm)));
    let table = match links {
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
    match hosts.why_one_level() {
        Some(why) => table.without(hierarchical, why),
        None => table,
    }
}
