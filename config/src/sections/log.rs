//! `[log]`

use super::section;
use crate::LogFormat;

section! {
    /// What is logged, and how it looks.
    LogConfig = "log" {
        /// The filter: a level, or levels by module as in `info,ryzanstein_process_group=debug`.
        level: String = "info",
        /// How log lines look.
        format: LogFormat = "text",
    }
}
