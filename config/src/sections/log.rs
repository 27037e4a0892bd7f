//! `[log]`

use super::section;
use crate::LogFormat;

section! {
    /// What is logged, and in which format.
    LogConfig = "log" {
        /// The filter: a level, or levels by module as in `info,ryzanstein_process_group=debug`.
        level: String = "info",
        /// The format of log lines.
        format: LogFormat = "text",
    }
}
