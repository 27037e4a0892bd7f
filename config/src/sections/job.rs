//! `[job]`

use super::section;
use crate::WorldSize;

section! {
    /// What the job is.
    JobConfig = "job" {
        /// How many ranks there are over all nodes; unset, the launcher's own count or that of the GPUs.
        world_size: Option<WorldSize> = "",
        /// The name of the job, in logs, metrics and reports.
        name: String = "ryzanstein",
    }
}
