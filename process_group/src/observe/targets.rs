//! The documented latency targets, for four GPUs joined by NVLink.
//!
//! | operation | size | target |
//! |---|---|---|
//! | all-reduce | 100 KB | < 0.5 ms |
//! | all-reduce | 10 MB | < 1 ms |
//! | all-reduce | 100 MB | < 10 ms |
//! | broadcast | 100 MB | < 5 ms |
//! | all-reduce | the best size | > 90 GB/s of bus bandwidth |
//! | all-reduce | the best size | > 90 % of what the link can carry |
//!
//! Other machines are compared with them too, as there are no better ones; a processor that misses one is no failure.

/// One target.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Target {
    /// Name of the operation.
    pub op: &'static str,
    /// Bytes of the whole array.
    pub bytes: u64,
    /// Upper limit of the time of a call, in microseconds.
    pub below_us: f64,
}

/// All targets, smaller sizes first.
pub const TARGETS: [Target; 4] = [
    Target { op: "all_reduce", bytes: 100_000, below_us: 500.0 },
    Target { op: "all_reduce", bytes: 10_000_000, below_us: 1_000.0 },
    Target { op: "all_reduce", bytes: 100_000_000, below_us: 10_000.0 },
    Target { op: "broadcast", bytes: 100_000_000, below_us: 5_000.0 },
];

/// Bus bandwidth that an all-reduce must reach at its best size, in 10⁹ bytes per second.
pub const ABOVE_GBS: f64 = 90.0;

/// Share of the link's bandwidth that the bus bandwidth of an all-reduce must reach at its best size: a ring moves no more than one
/// link can carry.
pub const ABOVE_SHARE: f64 = 0.9;

/// Returns the target of a call of `bytes` bytes: that of the next documented size, as a smaller call must not take longer.
pub fn target(op: &str, bytes: u64) -> Option<Target> {
    TARGETS.iter().copied().find(|t| t.op == op && bytes <= t.bytes)
}
