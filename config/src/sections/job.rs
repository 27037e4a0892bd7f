//! `[job]`

use super::section;
use crate::WorldSize;

section! {
    /// The job as a whole.
    JobConfig = "job" {
        /// The number of ranks on all nodes together. `ryz launch` needs it; a process without a launcher is one rank when it
        /// is unset.
        world_size: Option<WorldSize> = "",
        /// The name of the job, shown in the report of `ryz check`.
        name: String = "ryzanstein",
    }
}
