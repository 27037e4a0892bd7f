//! `[log]`

use super::section;
use crate::LogFormat;

section! {
    /// Filter and format of log lines.
    LogConfig = "log" {
        /// The filter: a level, or levels by module as in `info,ryzanstein_process_group=debug`.
        level: String = "info",
        /// The format of log lines.
        format: LogFormat = "text",
    }
}
