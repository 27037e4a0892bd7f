//! `ryz trace`: the combined analysis of the flight records of a job's ranks.
//!
//! [`read`] reads the files; [`merge()`] and [`timeline()`] use nothing but the records.

mod merge;
mod read;
mod report;
#[cfg(test)]
mod tests;
mod timeline;

pub use merge::merge;
pub use read::{Files, read};
pub use report::{
    Behind, Called, GroupReport, Late, LateCall, Mismatch, NewestCall, RankFile, RankState, Report, Sequence,
    Verdict,
};
pub use timeline::timeline;
