//! `[profile]`

use super::section;
use std::time::Duration;

section! {
    /// Measurement while a job runs.
    ProfileConfig = "profile" {
        /// Whether latency and bandwidth of calls are recorded.
        enabled: bool = "true",
        /// Whether calls inside a captured CUDA graph are timed too, one in 64 of each kind.
        graphs: bool = "true",
        /// A call is logged if it takes longer than this plus the time that its bytes need at 0.1 GB/s on CPUs or 10 GB/s on GPUs.
        /// Over TCP, waiting for other ranks does not count. `ryz check` and `ryz bench`, which make slow calls on purpose, log
        /// only if it is set.
        slow_call: Duration = "10ms",
        /// The minimum time between two such log lines.
        slow_call_every: Duration = "10s",
    }
}
