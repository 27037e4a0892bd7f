//! `[profile]`

use super::section;
use crate::RecordedCalls;
use std::path::PathBuf;
use std::time::Duration;

section! {
    /// Measurement while a job runs.
    ProfileConfig = "profile" {
        /// Record the latency and bandwidth of calls.
        enabled: bool = "true",
        /// Also time calls inside a captured CUDA graph, one in 64 of each kind. Each timed call makes a replay some 20 µs longer.
        graphs: bool = "false",
        /// A call is logged if it takes longer than this plus the time that its bytes need at 0.1 GB/s on CPUs or 10 GB/s on GPUs.
        /// Over TCP, waiting for other ranks does not count. `ryz check`, `ryz bench`, `ryz tune` and `ryz generate` log
        /// only if it is set.
        slow_call: Duration = "10ms",
        /// The minimum time between two such log lines.
        slow_call_every: Duration = "10s",
        /// The number of calls that the flight recorder keeps in each group, the newest ones, at 64 bytes each; 0 turns it off.
        /// Then the launcher cannot see which call each rank is in, and reports no rank as stalled.
        recorder: RecordedCalls = "2048",
        /// The folder in which a rank writes its flight record, `rank-R.json`, when a group fails, or when a `ryz` command that
        /// is a rank receives SIGUSR1; unset, none is written. `ryz trace` reads it.
        trace_dir: Option<PathBuf> = "",
    }
}
