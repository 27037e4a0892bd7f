//! The bandwidth of a group's links, and the expected times of calls over the links of GPUs.

use std::time::Instant;

use ryzanstein_config::DeviceConfig;
use ryzanstein_process_group::device::{Device, DeviceError, peer_copy_gbs};
use ryzanstein_process_group::paths::{Path, PeerAlgorithm, gpu};
use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{LinkCost, LinkModel, estimate};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{DType, Error, LocalRank, Memory, Operation, ProcessGroup, Rank};

use ryzanstein_orchestrator::host_name;

/// Bytes and number of the messages that determine the bandwidth of a link.
const MESSAGE: usize = 8_000_000;
const MESSAGES: usize = 8;
/// Seconds of a call of NCCL in addition to its steps: NCCL's own constant for the protocol LL (`baseLatencies` in
/// `src/graph/tuning.cc`).
pub const NCCL_CALL: f64 = 6.6e-6;
/// Seconds of a step of NCCL over NVLink (`hwLatencies` there).
const NCCL_STEP: f64 = 0.6e-6;
/// Seconds of a step of our own kernels over NVLink.
const PEER_STEP: f64 = 1.7e-6;

/// Measures the bandwidth of a link in one direction, in 10⁹ bytes per second: the same on all ranks, and `None` if it is not known.
/// Every rank calls this.
///
/// # Errors
/// Returns the errors of the collectives.
pub(super) fn measure_link(group: &mut ProcessGroup) -> Result<Option<f64>, Error> {
    match group.memory() {
        _ if group.world_size() < 2 => Ok(None),
        Memory::Host => stream_gbs(group),
        Memory::Device(_) => copy_gbs(group),
    }
}

/// Returns the expected seconds of a call of `count` elements (of a chunk, where there are chunks) between GPUs whose links carry
/// `link_gbs`; `None` where no model applies.
pub(super) fn gpu_seconds(
    path: Path,
    operation: Operation,
    dtype: DType,
    ranks: usize,
    count: usize,
    link_gbs: f64,
) -> Option<f64> {
    let (bytes, byte) = (count * dtype.size(), 1e-9 / link_gbs);
    match path {
        Path::Nccl => nccl_seconds(operation, dtype, ranks, count, byte),
        Path::PeerMemory(algorithm) => {
            let others = ranks - 1;
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
            let steps = steps * bytes.div_ceil(most).max(1);
            Some(steps as f64 * PEER_STEP + moved * byte)
        }
        Path::Local | Path::Tcp(_) | Path::SharedMemory(_) => None,
    }
}

/// Returns the expected seconds of a call of NCCL: a ring or a chain, or the pair of trees of an all-reduce if that is faster. `None`
/// for a barrier.
fn nccl_seconds(operation: Operation, dtype: DType, ranks: usize, count: usize, byte: f64) -> Option<f64> {
    let link = LinkCost { latency: NCCL_STEP, message: 0.0, byte };
    let seconds = |operation, algorithm| {
        let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
        let model = LinkModel::bound(link, ranks);
        NCCL_CALL + estimate(spec, &Hosts::one(ranks), dtype.size(), &model).as_secs_f64()
    };
    match operation {
        Operation::AllReduce(_) => {
            // The trees are pipelines: up and down, two vectors, whatever the depth.
            let depth = f64::from(ranks.next_power_of_two().ilog2());
            let tree = NCCL_CALL + 2.0 * depth * NCCL_STEP + (2 * count * dtype.size()) as f64 * byte;
            Some(seconds(operation, Algorithm::Ring).min(tree))
        }
        Operation::Barrier => None,
        // A root receives what it sends in the opposite operation.
        Operation::Gather { root } => Some(seconds(Operation::Scatter { root }, Algorithm::Direct)),
        _ if Algorithm::Ring.suits(operation) => Some(seconds(operation, Algorithm::Ring)),
        _ => Some(seconds(operation, Algorithm::Direct)),
    }
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
    use ryzanstein_process_group::ReduceOp;

    fn assert_close(actual: Option<f64>, wanted_us: f64) {
        let close = |actual: f64| (actual * 1e6 / wanted_us - 1.0).abs() < 0.01;
        assert!(actual.is_some_and(close), "{actual:?}, not {wanted_us} us");
    }

    fn expected(path: Path, operation: Operation, bytes: usize) -> Option<f64> {
        gpu_seconds(path, operation, DType::F32, 4, bytes / 4, 1.0)
    }

    #[test]
    fn each_launch_of_our_own_kernels_has_its_steps() {
        let all_reduce = |algorithm, bytes: usize| {
            expected(Path::PeerMemory(algorithm), Operation::AllReduce(ReduceOp::Sum), bytes)
        };
        // Four ranks send 3 arrays in pieces of one launch, or 1.5 arrays in pieces of 32 MiB.
        let launches = ((1 << 20) / gpu::one_shot_most(4)) as f64;
        assert_close(all_reduce(PeerAlgorithm::OneShot, 1 << 10), 1.7 + 3.072);
        assert_close(all_reduce(PeerAlgorithm::OneShot, 1 << 20), launches * 1.7 + 3145.7);
        assert_close(all_reduce(PeerAlgorithm::TwoShot, 1 << 20), 3.4 + 1572.9);
        assert_close(all_reduce(PeerAlgorithm::TwoShot, 96 << 20), 3.0 * 3.4 + 150_994.9);
        // A chunk of an all-gather goes to each other rank.
        let all_gather =
            |bytes| expected(Path::PeerMemory(PeerAlgorithm::OneShot), Operation::AllGather, bytes);
        assert_close(all_gather(1 << 10), 1.7 + 3.072);
    }

    #[test]
    fn nccl_takes_the_quicker_of_tree_and_ring() {
        let all_reduce = |bytes| expected(Path::Nccl, Operation::AllReduce(ReduceOp::Sum), bytes);
        assert_close(all_reduce(4), 6.6 + 4.0 * 0.6 + 0.008);
        assert_close(all_reduce(1 << 30), 6.6 + 6.0 * 0.6 + 1.5 * 1_073_741.8);
        // A root receives three chunks.
        assert_close(expected(Path::Nccl, Operation::Gather { root: Rank(0) }, 4000), 6.6 + 0.6 + 12.0);
        assert_eq!(expected(Path::Nccl, Operation::Barrier, 0), None);
    }
}
