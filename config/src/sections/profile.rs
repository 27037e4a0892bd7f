//! `[profile]`

use super::section;
use std::time::Duration;

section! {
    /// What is measured while a job runs.
    ProfileConfig = "profile" {
        /// Whether the latency and bandwidth of calls are recorded.
        enabled: bool = "true",
        /// Whether calls inside a captured CUDA graph are timed too, one in 64 of a kind.
        graphs: bool = "true",
        /// A call that takes longer than this is logged; by `ryz check` and `ryz bench`, which make slow calls on purpose, only where it is set.
        slow_call: Duration = "10ms",
        /// The least time between two such log lines.
        slow_call_every: Duration = "10s",
    }
}
