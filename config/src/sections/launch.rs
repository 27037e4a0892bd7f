//! `[launch]`

use super::section;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

section! {
    /// How the processes of a job are started and ended.
    LaunchConfig = "launch" {
        /// The number of nodes.
        nnodes: NonZeroU32 = "1",
        /// The rank of this node, from 0; less than `launch.nnodes`.
        node_rank: u32 = "0",
        /// How many times the job is restarted after a failure, each time in a new epoch. After an epoch of five minutes or more,
        /// they are counted anew.
        max_restarts: u32 = "0",
        /// The folder for each rank's output, in `rank-R/stdout.log` and `stderr.log`; unset, output is only forwarded.
        log_dir: Option<PathBuf> = "",
        /// How long ranks have to exit after a signal, before SIGKILL.
        grace: Duration = "4s",
    }
}
