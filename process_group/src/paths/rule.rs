//! One row of the table: a path, and the calls that it is preferred for.

use std::fmt;

use super::tuned::Measurement;
use super::{Path, Query};

/// A path that is preferred wherever all of its conditions hold.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Rule {
    /// The path.
    pub path: Path,
    /// All must hold.
    pub when: Vec<Condition>,
    /// Why the path is preferred then, and where that was measured.
    pub because: Reason,
}

/// Why a rule prefers its path.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Reason {
    /// It is built in, and this is why.
    BuiltIn(&'static str),
    /// It was measured on this machine.
    Measured(Measurement),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(why) => f.write_str(why),
            Self::Measured(measurement) => measurement.fmt(f),
        }
    }
}

/// What a rule asks of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Condition {
    /// The call is the operation of this name.
    Operation(&'static str),
    /// It reduces 16-bit floats.
    HalfReduction,
    /// It does not reduce 16-bit floats.
    NoHalfReduction,
    /// The vector, or a rank's chunk where there are chunks, has at least so many bytes.
    BytesFrom(usize),
    /// It has at most so many bytes.
    BytesUpTo(usize),
}

impl Rule {
    /// Whether it was measured on this machine.
    pub(super) const fn is_measured(&self) -> bool {
        matches!(self.because, Reason::Measured(_))
    }

    /// Whether it may decide an all-reduce.
    pub(super) fn suits_all_reduce(&self) -> bool {
        let other =
            |condition: &Condition| matches!(condition, Condition::Operation(name) if *name != "all_reduce");
        !self.when.iter().any(other)
    }

    /// Whether the rule fits a call.
    pub(super) fn holds(&self, query: &Query) -> bool {
        self.when.iter().all(|condition| condition.holds(query))
    }

    /// How many of the rule's conditions a call meets before the first that it does not meet.
    pub(super) fn met(&self, query: &Query) -> usize {
        self.when.iter().take_while(|condition| condition.holds(query)).count()
    }

    /// Why the rule does not fit a call, if so.
    pub(super) fn unmet(&self, query: &Query) -> Option<String> {
        self.when.iter().find_map(|condition| condition.unmet(query))
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

    /// Why it does not hold, if so.
    fn unmet(self, query: &Query) -> Option<String> {
        if self.holds(query) {
            return None;
        }
        Some(match self {
            Self::Operation(name) => {
                format!("preferred for {name} only, not for {}", query.operation.name())
            }
            Self::HalfReduction => "preferred for reductions of 16-bit floats only".to_owned(),
            Self::NoHalfReduction => "not preferred for reductions of 16-bit floats".to_owned(),
            Self::BytesFrom(least) => format!("{} are less than {}", bytes(query.bytes()), bytes(least)),
            Self::BytesUpTo(most) => format!("{} are more than {}", bytes(query.bytes()), bytes(most)),
        })
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

/// When the rule fits.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.when.is_empty() {
            return f.write_str("always");
        }
        for (index, condition) in self.when.iter().enumerate() {
            write!(f, "{}{condition}", if index == 0 { "" } else { ", " })?;
        }
        if self.is_measured() {
            write!(f, " ({})", self.because)?;
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
