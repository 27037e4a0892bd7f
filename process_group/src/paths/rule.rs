//! A row of the table: a path, and the calls for which it is preferred.

use std::fmt;

use super::{Path, Query};

/// A path that is preferred if all of its conditions hold.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rule {
    /// The path.
    pub path: Path,
    /// Conditions, all of which must hold. A rule without any decides every call, and is the last.
    pub when: Vec<Condition>,
    /// The reason for the preference.
    pub because: String,
    /// True if it comes from a table of `ryz tune`, and is not built in.
    pub is_measured: bool,
}

/// A condition on a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Condition {
    /// The call is the operation of this name.
    Operation(&'static str),
    /// It reduces 16-bit floats.
    HalfReduction,
    /// It does not reduce 16-bit floats.
    NoHalfReduction,
    /// The vector, or a rank's chunk if the operation has chunks, has at least this number of bytes.
    BytesFrom(usize),
    /// It has at most this number of bytes.
    BytesUpTo(usize),
}

impl Rule {
    /// Returns the rule that this path executes every call that no rule before it fits.
    pub(super) fn always(path: Path, because: &str) -> Self {
        Self { path, when: Vec::new(), because: because.into(), is_measured: false }
    }

    /// Returns true if it may decide an all-reduce.
    pub(super) fn suits_all_reduce(&self) -> bool {
        let other =
            |condition: &Condition| matches!(condition, Condition::Operation(name) if *name != "all_reduce");
        !self.when.iter().any(other)
    }

    /// Returns true if the rule fits a call.
    pub(super) fn holds(&self, query: &Query) -> bool {
        self.when.iter().all(|condition| condition.holds(query))
    }
}

impl Condition {
    fn holds(self, query: &Query) -> bool {
        match self {
            Self::Operation(name) => query.operation.name() == name,
            Self::HalfReduction => query.is_half_reduction(),
            Self::NoHalfReduction => !query.is_half_reduction(),
            Self::BytesFrom(least) => query.bytes() >= least,
            Self::BytesUpTo(most) => query.bytes() <= most,
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Operation(name) => f.write_str(name),
            Self::HalfReduction => f.write_str("reductions of 16-bit floats"),
            Self::NoHalfReduction => f.write_str("but for reductions of 16-bit floats"),
            Self::BytesFrom(least) => write!(f, "from {}", bytes(least)),
            Self::BytesUpTo(most) => write!(f, "up to {}", bytes(most)),
        }
    }
}

/// Describes the calls that the rule fits: without conditions, by the reason.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.when.is_empty() {
            return f.write_str(&self.because);
        }
        for (index, condition) in self.when.iter().enumerate() {
            write!(f, "{}{condition}", if index == 0 { "" } else { ", " })?;
        }
        if self.is_measured {
            write!(f, " ({})", self.because)?;
        }
        Ok(())
    }
}

/// Writes an exact size: two different sizes have different texts, however close they are.
pub(super) fn bytes(bytes: usize) -> String {
    for (unit, size) in [("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10), ("KB", 1000)] {
        if bytes > 0 && bytes.is_multiple_of(size) {
            return format!("{} {unit}", bytes / size);
        }
    }
    format!("{bytes} B")
}
