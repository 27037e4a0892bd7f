//! The bandwidth of the group's links and the expected time of calls, from a short probe before the rows are measured.

use std::time::Instant;

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{Device, DeviceError, peer_copy_gbs};
use ryzanstein_process_group::paths::{Path, PeerAlgorithm, gpu};
use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{LinkCost, busiest, rounds};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{DType, Error, LocalRank, Memory, Operation, ProcessGroup, Rank, ReduceOp};

use super::fit::{Cost, fit};
use crate::measure::{Case, Collective, measure_group};
use ryzanstein_orchestrator::host_name;

/// Bytes of the all-reduces that are fitted: from the sizes bound by latency to those bound by bandwidth.
const HOST_SIZES: [usize; 3] = [1_000, 100_000, 4_000_000];
const GPU_SIZES: [usize; 3] = [1_000, 1_000_000, 64_000_000];
/// Timed calls of each size. Their median counts.
const CALLS: usize = 7;
/// NCCL's tree carries smaller all-reduces, its ring larger ones.
const NCCL_RING_FROM: f64 = 1e6;
/// Bytes and number of the messages that determine the bandwidth of a link.
const MESSAGE: usize = 8_000_000;
const MESSAGES: usize = 8;

/// The capability of a group's links. The same on all ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Calibration {
    /// Bandwidth of a link in one direction, in 10⁹ bytes per second, if known.
    pub link_gbs: Option<f64>,
    /// For each carrier, the link on which the cost models are closest to the probe.
    links: Vec<(Carrier, LinkCost)>,
}

/// The carrier of a path's bytes. Paths with the same carrier share a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Carrier {
    Tcp,
    SharedMemory,
    Nccl,
    PeerMemory,
}

impl Carrier {
    /// Returns the carrier of a path; `None` if nothing is sent, or only within a process.
    const fn of(path: Path) -> Option<Self> {
        match path {
            Path::Tcp(_) => Some(Self::Tcp),
            Path::SharedMemory(_) => Some(Self::SharedMemory),
            Path::Nccl => Some(Self::Nccl),
            Path::PeerMemory(_) => Some(Self::PeerMemory),
            Path::Local => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::SharedMemory => "shared_memory",
            Self::Nccl => "nccl",
            Self::PeerMemory => "peer",
        }
    }
}

impl Calibration {
    /// Probes the group: a few small and large all-reduces on every path, `graph`s or not, and large messages
    /// over one link. Every rank calls this.
    ///
    /// # Errors
    /// Returns the errors of the collectives.
    pub fn probe(group: &mut ProcessGroup, graph: bool) -> Result<Self, Error> {
        if group.world_size() < 2 {
            return Ok(Self::default());
        }
        let link_gbs = if group.memory() == Memory::Host { stream_gbs(group)? } else { copy_gbs(group)? };
        Ok(Self { link_gbs, links: probe(group, graph)? })
    }

    /// Returns the expected time of a call of `count` elements (of a chunk, where there are chunks) on this path, in
    /// microseconds; `None` where no model applies.
    pub fn expected_us(&self, path: Path, operation: Operation, dtype: DType, shape: Shape) -> Option<f64> {
        let carrier = Carrier::of(path)?;
        let (_, link) = self.links.iter().find(|(known, _)| *known == carrier)?;
        let costs = costs(path, operation, dtype, shape);
        let seconds = costs.into_iter().map(|cost| cost.seconds(*link)).min_by(f64::total_cmp);
        // A call that sends nothing takes its time elsewhere.
        seconds.filter(|seconds| *seconds > 0.0).map(|seconds| seconds * 1e6)
    }

    /// Returns true if the probe found nothing.
    pub const fn is_empty(&self) -> bool {
        self.link_gbs.is_none() && self.links.is_empty()
    }

    /// Formats the calibration in one line for people; empty if the probe found nothing.
    pub fn summary(&self) -> String {
        let link = self.link_gbs.map(|gbs| format!("one link carries {gbs:.2} GB/s"));
        let fits = self.links.iter().map(|(carrier, link)| {
            let (latency, gbs) = (link.latency * 1e6, 1e-9 / link.byte);
            format!("{}: {latency:.1} us a step and {gbs:.2} GB/s", carrier.name())
        });
        let parts: Vec<String> = link.into_iter().chain(fits).collect();
        parts.join("; ")
    }
}

/// The size of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of ranks of the group.
    pub ranks: usize,
    /// Number of elements of the vector, or of one rank's chunk.
    pub count: usize,
}

/// Returns the possible costs of a call: the carrier takes the cheapest.
fn costs(path: Path, operation: Operation, dtype: DType, Shape { ranks, count }: Shape) -> Vec<Cost> {
    match path {
        // Two levels have two kinds of links, of which the probe measures one.
        Path::Local | Path::Tcp(Algorithm::Hierarchical) | Path::SharedMemory(Algorithm::Hierarchical) => {
            Vec::new()
        }
        Path::Tcp(algorithm) | Path::SharedMemory(algorithm) => {
            vec![of_schedule(operation, algorithm, dtype, Shape { ranks, count })]
        }
        Path::PeerMemory(algorithm) => {
            let (bytes, others) = (count * dtype.size(), ranks - 1);
            let is_broadcast = matches!(operation, Operation::Broadcast { .. });
            // A chunk is sent to each other rank once, as a short array is.
            let (steps, moved, most) = match algorithm {
                PeerAlgorithm::OneShot if is_broadcast => (1, (others * bytes) as f64, usize::MAX),
                PeerAlgorithm::TwoShot if is_broadcast => (2, bytes as f64, usize::MAX),
                PeerAlgorithm::TwoShot => (2, (2 * others * bytes) as f64 / ranks as f64, gpu::TWO_SHOT_PART),
                PeerAlgorithm::OneShot => {
                    let is_chunked = operation.is_chunked();
                    let most = if is_chunked { gpu::chunk_most(ranks) } else { gpu::one_shot_most(ranks) };
                    (1, (others * bytes) as f64, most)
                }
            };
            // A longer array takes several launches, each with the steps of one.
            vec![Cost { steps: steps * bytes.div_ceil(most).max(1), bytes: moved }]
        }
        Path::Nccl => nccl_costs(operation, dtype, Shape { ranks, count }),
    }
}

/// Returns the steps of a schedule, and the bytes of its busiest rank.
fn of_schedule(operation: Operation, algorithm: Algorithm, dtype: DType, shape: Shape) -> Cost {
    let Shape { ranks, count } = shape;
    let (spec, hosts) = (CollectiveSpec { operation, algorithm, count, in_place: true }, Hosts::one(ranks));
    Cost { steps: rounds(spec, &hosts), bytes: (busiest(spec, &hosts) * dtype.size()) as f64 }
}

/// Returns the costs of NCCL's algorithms for an operation: rings and chains, and for all-reduces a pair of trees as well.
/// Empty for a barrier.
fn nccl_costs(operation: Operation, dtype: DType, shape: Shape) -> Vec<Cost> {
    let of = |algorithm| of_schedule(operation, algorithm, dtype, shape);
    match operation {
        Operation::AllReduce(_) => {
            // The trees are pipelines: up and down, two vectors, whatever the depth.
            let depth = shape.ranks.next_power_of_two().ilog2() as usize;
            let tree = Cost { steps: 2 * depth, bytes: (2 * shape.count * dtype.size()) as f64 };
            vec![of(Algorithm::Ring), tree]
        }
        Operation::Barrier => Vec::new(),
        _ if Algorithm::Ring.suits(operation) => vec![of(Algorithm::Ring)],
        _ => vec![of(Algorithm::Direct)],
    }
}

/// Measures all-reduces on every path, and fits a link to those of each carrier.
fn probe(group: &mut ProcessGroup, graph: bool) -> Result<Vec<(Carrier, LinkCost)>, Error> {
    let (operation, dtype, ranks) = (Operation::AllReduce(ReduceOp::Sum), DType::F32, group.world_size());
    let sizes = if group.memory() == Memory::Host { HOST_SIZES } else { GPU_SIZES };
    let mut points: Vec<(Carrier, Vec<(Cost, f64)>)> = Vec::new();
    for path in group.paths() {
        let Some(carrier) = Carrier::of(path).filter(|_| path.suits(operation)) else { continue };
        group.force_path(Some(path))?;
        for bytes in sizes {
            let case = Case::new(Collective::AllReduce, bytes, CALLS);
            let seconds = measure_group(group, graph, &case)?.latency.median_us / 1e6;
            let costs = costs(path, operation, dtype, Shape { ranks, count: case.count(ranks) });
            let is_tree = path == Path::Nccl && (bytes as f64) < NCCL_RING_FROM;
            let Some(cost) = (if is_tree { costs.last() } else { costs.first() }) else { continue };
            match points.iter_mut().find(|(known, _)| *known == carrier) {
                Some((_, points)) => points.push((*cost, seconds)),
                None => points.push((carrier, vec![(*cost, seconds)])),
            }
        }
    }
    group.force_path(None)?;
    let fitted = points.into_iter().filter_map(|(carrier, points)| match fit(&points) {
        Ok(link) => Some((carrier, link)),
        Err(error) => {
            tracing::warn!(%error, carrier = carrier.name(), "no expected times: no link fits the probe");
            None
        }
    });
    Ok(fitted.collect())
}

/// Returns the bandwidth of large messages from rank 0 to the first rank on another host, or else to rank 1, in 10⁹ bytes per
/// second.
fn stream_gbs(group: &mut ProcessGroup) -> Result<Option<f64>, Error> {
    let hosts = group.all_gather_object(&host_name())?;
    let receiver = hosts.iter().position(|host| *host != hosts[0]).unwrap_or(1);
    let mut gbs: Option<f64> = None;
    match group.rank().index() {
        0 => {
            let message = vec![0u8; MESSAGE];
            for _ in 0..=MESSAGES {
                group.send(&message, Rank(receiver as u32))?;
            }
        }
        rank if rank == receiver => {
            let mut message = vec![0u8; MESSAGE];
            // The first message waits for its sender, and touches the memory.
            group.recv(&mut message, Rank(0))?;
            let started = Instant::now();
            for _ in 0..MESSAGES {
                group.recv(&mut message, Rank(0))?;
            }
            gbs = Some((MESSAGES * MESSAGE) as f64 / started.elapsed().as_secs_f64() / 1e9);
        }
        _ => {}
    }
    Ok(group.all_gather_object(&gbs)?.into_iter().flatten().next())
}

/// Returns the bandwidth of a copy between the first two GPUs of a group, in 10⁹ bytes per second: the reference for the bus
/// bandwidth of a ring. The same on all ranks; `None` without two GPUs on one host with peer access.
fn copy_gbs(group: &mut ProcessGroup) -> Result<Option<f64>, Error> {
    let mut gbs: Option<f64> = None;
    if group.rank().0 == 0 && group.world_size() > 1 {
        gbs = group.device().and_then(|device| {
            copy_to_next(device).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot measure the bandwidth of the links");
                None
            })
        });
    }
    let all = group.all_gather_object(&gbs)?;
    Ok(all.into_iter().next().flatten())
}

fn copy_to_next(device: &Device) -> Result<Option<f64>, DeviceError> {
    // Only GPUs visible to this process can be copied to; a rank that sees only its own GPU has no other.
    let next = LocalRank(device.ordinal() + 1);
    if device.libraries().device_count()? <= next.0 {
        return Ok(None);
    }
    let next = Device::open(device.libraries(), next, &DeviceConfig::default())?;
    peer_copy_gbs(device, &next)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: LinkCost = LinkCost { latency: 1e-5, message: 0.0, byte: 1e-9 };

    fn calibration(carrier: Carrier) -> Calibration {
        Calibration { link_gbs: Some(1.0), links: vec![(carrier, LINK)] }
    }

    fn expected(calibration: &Calibration, path: Path, operation: Operation, count: usize) -> Option<f64> {
        calibration.expected_us(path, operation, DType::F32, Shape { ranks: 4, count })
    }

    fn assert_close(actual: Option<f64>, wanted: f64) {
        assert!(
            actual.is_some_and(|actual| (actual / wanted - 1.0).abs() < 0.01),
            "{actual:?}, not {wanted}"
        );
    }

    #[test]
    fn the_schedule_of_the_path_decides_what_is_expected() {
        let tcp = calibration(Carrier::Tcp);
        let all_reduce = Operation::AllReduce(ReduceOp::Sum);
        let of = |algorithm, operation| expected(&tcp, Path::Tcp(algorithm), operation, 1_000_000);
        // 4 MB: a ring has 6 steps and moves 6 MB, doubling 2 steps and 8 MB, halving-doubling 4 steps and 6 MB.
        assert_close(of(Algorithm::Ring, all_reduce), 6.0 * 10.0 + 6000.0);
        assert_close(of(Algorithm::RecursiveDoubling, all_reduce), 2.0 * 10.0 + 8000.0);
        assert_close(of(Algorithm::HalvingDoubling, all_reduce), 4.0 * 10.0 + 6000.0);
        // A root receives three chunks of 4 MB.
        assert_close(of(Algorithm::Direct, Operation::Gather { root: Rank(0) }), 10.0 + 12_000.0);
        assert_eq!(
            expected(&tcp, Path::SharedMemory(Algorithm::Ring), all_reduce, 1000),
            None,
            "nothing was measured of it"
        );
        assert_eq!(expected(&tcp, Path::Local, all_reduce, 1000), None);
    }

    #[test]
    fn each_launch_of_our_own_kernels_has_its_steps() {
        let peer = calibration(Carrier::PeerMemory);
        let all_reduce = |algorithm, bytes: usize| {
            expected(&peer, Path::PeerMemory(algorithm), Operation::AllReduce(ReduceOp::Sum), bytes / 4)
        };
        // Four ranks send 3 arrays in pieces of one launch, or 1.5 arrays in pieces of 32 MiB.
        let launches = ((1 << 20) / gpu::one_shot_most(4)) as f64;
        assert_close(all_reduce(PeerAlgorithm::OneShot, 1 << 10), 10.0 + 3.072);
        assert_close(all_reduce(PeerAlgorithm::OneShot, 1 << 20), launches * 10.0 + 3145.7);
        assert_close(all_reduce(PeerAlgorithm::TwoShot, 1 << 20), 20.0 + 1572.9);
        let long = costs(
            Path::PeerMemory(PeerAlgorithm::TwoShot),
            Operation::AllReduce(ReduceOp::Sum),
            DType::F32,
            Shape { ranks: 2, count: 24 << 20 },
        );
        assert_eq!(long.first().map(|cost| cost.steps), Some(6), "96 MiB are three parts");
        // 16 MiB from each rank, which is a part, to one other rank.
        let gathered = costs(
            Path::PeerMemory(PeerAlgorithm::OneShot),
            Operation::AllGather,
            DType::F32,
            Shape { ranks: 2, count: 4 << 20 },
        );
        assert_eq!(gathered.first().map(|cost| (cost.steps, cost.bytes)), Some((1, f64::from(16 << 20))));
    }

    #[test]
    fn nccl_takes_the_quicker_of_tree_and_ring() {
        let nccl = calibration(Carrier::Nccl);
        let all_reduce = |count| expected(&nccl, Path::Nccl, Operation::AllReduce(ReduceOp::Sum), count);
        // Small arrays by the tree, in 4 steps; large ones by the ring, which moves 1.5 arrays.
        assert_close(all_reduce(1), 40.0);
        assert_close(all_reduce(10_000_000), 60.0 + 60_000.0);
        assert_eq!(expected(&nccl, Path::Nccl, Operation::Barrier, 1), None);
    }

    #[test]
    fn a_group_of_threads_finds_no_link_and_expects_nothing() {
        let mut group = ProcessGroup::loopback(1).remove(0);
        let found = Calibration::probe(&mut group, false).expect("nothing to probe");
        assert_eq!(found, Calibration::default());
        assert_eq!(found.summary(), "");
    }
}
