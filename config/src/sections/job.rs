//! `[job]`

use super::section;
use crate::WorldSize;

section! {
    /// What the job is.
    JobConfig = "job" {
        /// How many ranks there are over all nodes; a launch needs it, and a process by itself is one rank when it is
        /// unset.
        world_size: Option<WorldSize> = "",
        /// The name of the job, at the head of the report of `ryz check`.
        name: String = "ryzanstein",
    }
}
