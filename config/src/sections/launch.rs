//! `[launch]`

use super::section;
use crate::{BindChoice, ShownRanks};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

section! {
    /// Start and end of the processes of a job.
    LaunchConfig = "launch" {
        /// The number of nodes.
        nnodes: NonZeroU32 = "1",
        /// The rank of this node, from 0; less than `launch.nnodes`.
        node_rank: u32 = "0",
        /// The maximum number of restarts of the job after failures, each in a new epoch. After an epoch of five minutes or more,
        /// the count starts again.
        max_restarts: u32 = "0",
        /// The folder for each rank's output, in `rank-R/stdout.log` and `stderr.log`; unset, output is only forwarded.
        log_dir: Option<PathBuf> = "",
        /// The ranks whose output is shown: `all`, `none`, or ranks separated by commas. `launch.log_dir` still receives the output
        /// of every rank.
        show_ranks: ShownRanks = "all",
        /// The binding of ranks to processors: `auto` divides those of the launcher among the ranks of this node if there are enough.
        bind: BindChoice = "auto",
        /// The time that ranks have to exit after a signal, before SIGKILL.
        grace: Duration = "4s",
    }
}
