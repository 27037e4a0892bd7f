//! Measures one size and prints one line, as `peers/measure.py` does.

use ryzanstein_orchestrator::measure::measure as figures;
use ryzanstein_orchestrator::measure::{Case, Collective, Host, back_to_back};
use ryzanstein_process_group::{Error, ProcessGroup};
use serde::{Deserialize, Serialize};

/// Sizes in bytes at which every peer is measured.
pub const SIZES: [usize; 9] =
    [1024, 8192, 65536, 262_144, 1 << 20, 4 << 20, 10_000_000, 16 << 20, 100_000_000];

/// Total bytes of all ranks in one measurement.
const WORK: usize = 200_000_000;

/// The figures of one size. Times in microseconds, of the slowest rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Bytes of the f32 vector.
    pub bytes: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Median of one all-reduce after a barrier.
    pub median_us: f64,
    /// Its 99th percentile.
    pub p99_us: f64,
    /// Back-to-back all-reduces, per call.
    pub back_to_back_us: f64,
    /// Median of one broadcast after a barrier.
    pub broadcast_us: f64,
    /// Wrong elements, over all ranks and timed calls.
    pub errors: u64,
}

/// Measures f32 sum all-reduce and broadcast of `bytes` bytes. Every rank calls this; every rank gets the row.
///
/// # Errors
/// Those of the collectives.
pub fn measure(group: &mut ProcessGroup, bytes: usize) -> Result<Row, Error> {
    let world_size = group.world_size();
    let calls = (WORK / (bytes * world_size).max(4000)).clamp(5, 400);
    let reduced = figures(group, &mut Host, &Case::new(Collective::AllReduce, bytes, calls))?;
    let (back_to_back_us, in_a_row) = back_to_back(group, bytes, calls)?;
    let cast = figures(group, &mut Host, &Case::new(Collective::Broadcast, bytes, (calls / 4).max(5)))?;
    Ok(Row {
        bytes: reduced.bytes,
        world_size,
        median_us: reduced.latency.median_us,
        p99_us: reduced.latency.p99_us,
        back_to_back_us,
        broadcast_us: cast.latency.median_us,
        errors: reduced.errors + in_a_row + cast.errors,
    })
}
