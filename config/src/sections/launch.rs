//! `[launch]`

use super::section;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

section! {
    /// How the processes of a job are started and ended.
    LaunchConfig = "launch" {
        /// How many nodes take part.
        nnodes: NonZeroU32 = "1",
        /// Which of them this is, counted from 0; less than `launch.nnodes`.
        node_rank: u32 = "0",
        /// How many times the job is started again, under a new epoch, after a rank has failed.
        max_restarts: u32 = "0",
        /// The folder for each rank's output, in `rank-R/stdout.log` and `stderr.log`; unset, output is forwarded only.
        log_dir: Option<PathBuf> = "",
        /// How long ranks have to end by themselves after a signal was forwarded to them, before SIGKILL.
        grace: Duration = "4s",
    }
}
