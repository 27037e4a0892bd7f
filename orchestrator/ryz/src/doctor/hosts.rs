//! The links between the hosts of a job: latency and bandwidth between every two.

use std::time::Instant;

use ryzanstein_benches::measure::median;
use ryzanstein_process_group::schedule::Hosts;
use ryzanstein_process_group::units;
use ryzanstein_process_group::{GroupBuffer, ProcessGroup, Rank, Result, Roster};
use serde::{Deserialize, Serialize};

use super::finding::{Finding, Status};
use ryzanstein_orchestrator::table::{self, Cell, Column, Screen};

/// Bytes of a message that measures latency, and of one that measures bandwidth.
const SHORT: usize = 8;
const LONG: usize = 4 << 20;
/// Number of round trips, of which the first tenth is not timed.
const ROUND_TRIPS: usize = 110;
/// Number of consecutive messages.
const MESSAGES: usize = 8;
/// Threshold of a finding: a link with less than this share of the best bandwidth, or with more than the inverse of it times
/// the best latency.
const SHARE: f64 = 0.5;

/// One direction of a link between two hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostLink {
    /// The sending host.
    pub from: String,
    /// The receiving host.
    pub to: String,
    /// Median of half a round trip of 8 bytes, in microseconds.
    pub latency_us: f64,
    /// Bandwidth of messages of 4 MiB, in 10⁹ bytes per second.
    pub gbs: f64,
}

/// Measures between the first ranks of every two hosts, in the memory and by the backend of the group. Each host is part of one
/// measurement at a time. Every rank of the world calls this, and gets all links.
///
/// # Errors
/// Returns the errors of the calls.
pub fn measure_links(world: &mut ProcessGroup, roster: &Roster) -> Result<Vec<HostLink>> {
    let hosts = Hosts::of(roster.members.iter().map(|member| &member.host));
    let (host, place) = hosts.place(world.rank().index());
    let mut mine = Vec::new();
    if place == 0 {
        let mut ends = Ends { short: world.upload(&[0u8; SHORT])?, long: world.upload(&vec![0u8; LONG])? };
        // All hosts go through the pairs in the same order, so none waits for one that waits for it.
        let pairs = (0..hosts.count()).flat_map(|a| (a + 1..hosts.count()).map(move |b| (a, b)));
        for (a, b) in pairs.filter(|(a, b)| *a == host || *b == host) {
            let other = a + b - host;
            let peer = hosts.ranks()[other][0];
            let name = |rank: usize| roster.members[rank].host.clone();
            let peer_rank = roster.members[peer].rank;
            let (latency_us, gbs) = ends.measure(world, peer_rank, host < other)?;
            mine.push(HostLink { from: name(world.rank().index()), to: name(peer), latency_us, gbs });
        }
    }
    Ok(world.all_gather_object(&mine)?.into_iter().flatten().collect())
}

/// The buffers of one rank.
struct Ends {
    short: GroupBuffer<u8>,
    long: GroupBuffer<u8>,
}

impl Ends {
    /// Measures the latency of both directions, in microseconds, and the bandwidth towards `peer`, in GB/s.
    fn measure(&mut self, group: &mut ProcessGroup, peer: Rank, is_first: bool) -> Result<(f64, f64)> {
        let mut trips = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            let started = Instant::now();
            if is_first {
                group.send(&self.short, peer)?;
                group.recv(&mut self.short, peer)?;
            } else {
                group.recv(&mut self.short, peer)?;
                group.send(&self.short, peer)?;
            }
            group.synchronize()?;
            trips.push(started.elapsed().as_secs_f64() * 1e6);
        }
        let latency = median(trips.split_off(ROUND_TRIPS / 11)) / 2.0;
        let mut gbs = 0.0;
        for sends in [is_first, !is_first] {
            // The first message establishes the route and is not timed.
            self.messages(group, peer, sends, 1)?;
            let started = Instant::now();
            self.messages(group, peer, sends, MESSAGES)?;
            if sends {
                gbs = (MESSAGES * LONG) as f64 / started.elapsed().as_secs_f64() / 1e9;
            }
        }
        Ok((latency, gbs))
    }

    /// Sends messages in one direction, until the receiver has confirmed the last one.
    fn messages(&mut self, group: &mut ProcessGroup, peer: Rank, sends: bool, count: usize) -> Result<()> {
        for _ in 0..count {
            if sends {
                group.send(&self.long, peer)?;
            } else {
                group.recv(&mut self.long, peer)?;
            }
        }
        if sends {
            group.recv(&mut self.short, peer)?;
        } else {
            group.send(&self.short, peer)?;
        }
        group.synchronize()
    }
}

/// Returns one finding for each link that is much worse than the best of them. *Pure*.
pub fn diagnose_links(links: &[HostLink]) -> Vec<Finding> {
    let best_gbs = links.iter().map(|link| link.gbs).fold(0.0, f64::max);
    let best_us = links.iter().map(|link| link.latency_us).fold(f64::INFINITY, f64::min);
    let poor = links.iter().filter(|link| link.gbs < SHARE * best_gbs || link.latency_us > best_us / SHARE);
    poor.map(|link| {
        let seen = format!(
            "{} and {}; the best link of the job: {} and {}",
            units::time(link.latency_us),
            rate(link.gbs),
            units::time(best_us),
            rate(best_gbs)
        );
        Finding::new("network", "host_to_host", Status::Warning, seen)
            .of(format!("{} to {}", link.from, link.to))
            .because("collectives over several hosts are as slow as the slowest link")
            .remedy(
                "compare both hosts' interfaces (ethtool: speed, duplex, errors), cables and MTU; choose another interface with \
                 process_group.tcp.interface or NCCL_SOCKET_IFNAME",
            )
    })
    .collect()
}

/// Formats a matrix of latencies and bandwidths, from each host of a row to that of a column.
pub fn links_table(links: &[HostLink], screen: Screen) -> String {
    let mut hosts: Vec<&str> = links.iter().map(|link| link.from.as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let columns: Vec<Column<'_>> =
        std::iter::once(Column::left("from")).chain(hosts.iter().map(|host| Column::right(host))).collect();
    let cell = |from: &str, to: &str| {
        let link = links.iter().find(|link| link.from == from && link.to == to);
        link.map_or_else(
            || "-".into(),
            |link| format!("{}, {}", units::time(link.latency_us), rate(link.gbs)).into(),
        )
    };
    let rows: Vec<Vec<Cell>> = hosts
        .iter()
        .map(|from| std::iter::once((*from).into()).chain(hosts.iter().map(|to| cell(from, to))).collect())
        .collect();
    format!("From host to host (one way):\n{}", table::table(&columns, &rows, screen))
}

fn rate(gbs: f64) -> String {
    format!("{gbs:.2} GB/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(from: &str, to: &str, latency_us: f64, gbs: f64) -> HostLink {
        HostLink { from: from.into(), to: to.into(), latency_us, gbs }
    }

    #[test]
    fn a_link_much_worse_than_the_best_is_a_warning_that_names_it() {
        let good = [link("a", "b", 20.0, 10.0), link("b", "a", 22.0, 8.0)];
        assert!(diagnose_links(&good).is_empty());
        let slow = [good[0].clone(), link("b", "a", 22.0, 1.0), link("c", "a", 90.0, 9.0)];
        let findings = diagnose_links(&slow);
        let subjects: Vec<_> = findings.iter().filter_map(|finding| finding.subject.as_deref()).collect();
        assert_eq!(subjects, ["b to a", "c to a"]);
        assert!(findings[0].seen.contains("1.00 GB/s") && findings[0].seen.contains("10.00 GB/s"));
    }
}
