//! One row of the table: a path, and the calls that it is preferred for.

use std::fmt;

use super::{Path, Query};
use crate::operation::Operation;

/// A path that is preferred wherever all of its conditions hold.
#[derive(Clone, PartialEq, Debug)]
pub struct Rule {
    /// The path.
    pub path: Path,
    /// All must hold.
    pub when: Vec<Condition>,
    /// Why the path is preferred then, and where that was measured.
    pub because: &'static str,
}

/// What a rule asks of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// The call is an all-reduce.
    AllReduce,
    /// It reduces 16-bit floats.
    HalfReduction,
    /// The group has at least so many ranks.
    RanksFrom(usize),
    /// The group has at most so many ranks.
    RanksUpTo(usize),
    /// The vector, or a rank's chunk where there are chunks, has at least so many bytes.
    BytesFrom(usize),
    /// It has at most so many bytes.
    BytesUpTo(usize),
    /// The chunk of each rank has at least so many bytes; a vector counts as cut into one chunk a rank.
    ChunkFrom(usize),
}

impl Rule {
    /// Why the rule does not fit a call, if so.
    pub(super) fn unmet(&self, query: &Query) -> Option<String> {
        self.when.iter().find_map(|condition| condition.unmet(query))
    }
}

impl Condition {
    fn unmet(self, query: &Query) -> Option<String> {
        let ranks = query.world_size;
        let (holds, why) = match self {
            Self::AllReduce => (
                matches!(query.operation, Operation::AllReduce(_)),
                format!("preferred for all_reduce only, not for {}", query.operation.name()),
            ),
            Self::HalfReduction => (
                query.dtype.is_half() && query.operation.reduce_op().is_some(),
                "preferred for reductions of 16-bit floats only".to_owned(),
            ),
            Self::RanksFrom(least) => {
                (ranks >= least, format!("{ranks} ranks, and it is preferred from {least} on"))
            }
            Self::RanksUpTo(most) => {
                (ranks <= most, format!("{ranks} ranks, and it is preferred up to {most}"))
            }
            Self::BytesFrom(least) => {
                (query.bytes() >= least, format!("{} are less than {}", bytes(query.bytes()), bytes(least)))
            }
            Self::BytesUpTo(most) => {
                (query.bytes() <= most, format!("{} are more than {}", bytes(query.bytes()), bytes(most)))
            }
            Self::ChunkFrom(least) => (
                query.chunk_bytes() >= least,
                format!("{} a rank are less than {}", bytes(query.chunk_bytes()), bytes(least)),
            ),
        };
        (!holds).then_some(why)
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::AllReduce => f.write_str("all_reduce"),
            Self::HalfReduction => f.write_str("reductions of 16-bit floats"),
            Self::RanksFrom(least) => write!(f, "{least} ranks and more"),
            Self::RanksUpTo(most) => write!(f, "up to {most} ranks"),
            Self::BytesFrom(least) => write!(f, "from {}", bytes(least)),
            Self::BytesUpTo(most) => write!(f, "up to {}", bytes(most)),
            Self::ChunkFrom(least) => write!(f, "from {} a rank", bytes(least)),
        }
    }
}

/// When the rule fits.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.when.is_empty() {
            return f.write_str("always");
        }
        for (index, condition) in self.when.iter().enumerate() {
            write!(f, "{}{condition}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// A size, exact: two that differ are told apart however close they are.
fn bytes(bytes: usize) -> String {
    for (unit, size) in [("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10), ("KB", 1000)] {
        if bytes > 0 && bytes.is_multiple_of(size) {
            return format!("{} {unit}", bytes / size);
        }
    }
    format!("{bytes} B")
}
