//! A measured table: machine, number of ranks, and sizes for which another path was faster than the built-in choice. Pure.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Condition, Path, Rule};
use crate::types::operation::{Operation, ReduceOp};
use crate::types::rank::Rank;
use crate::types::units;

/// The format of the file that this version writes and reads.
const FORMAT: u32 = 2;

/// The operations of a table: those with more than one path. Roots and reductions do not matter here.
const OPERATIONS: [Operation; 8] = [
    Operation::AllReduce(ReduceOp::Sum),
    Operation::Broadcast { root: Rank(0) },
    Operation::Reduce { op: ReduceOp::Sum, root: Rank(0) },
    Operation::AllGather,
    Operation::ReduceScatter(ReduceOp::Sum),
    Operation::Gather { root: Rank(0) },
    Operation::Scatter { root: Rank(0) },
    Operation::AllToAll,
];

/// Returns true if a table may have the operation of this name.
pub fn has_operation(name: &str) -> bool {
    operation(name).is_some()
}

fn operation(name: &str) -> Option<Operation> {
    OPERATIONS.into_iter().find(|operation| operation.name() == name)
}

/// The machine, on which times depend: a table of another machine does not apply to this one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The processor's model.
    pub cpu: String,
    /// Number of its processors.
    pub cpus: usize,
    /// The GPUs and their driver; empty if there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub gpus: String,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.cpus, self.cpu)?;
        if self.gpus.is_empty() { Ok(()) } else { write!(f, ", {}", self.gpus) }
    }
}

/// The measurement in favour of a path.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measurement {
    /// The day, as `2026-11-22`.
    pub date: String,
    /// Bytes of the whole array at which the gain was smallest.
    pub bytes: u64,
    /// The median at that size, in microseconds.
    pub us: f64,
    /// The path of the built-in table at that size.
    #[serde(with = "as_text")]
    pub against: Path,
    /// Its median, in microseconds.
    pub against_us: f64,
}

impl fmt::Display for Measurement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { date, bytes, us, against, against_us } = self;
        write!(
            f,
            "measured by ryz tune on {date}: {} against {} of {against}, at {}",
            units::time(*us),
            units::time(*against_us),
            units::bytes(*bytes as f64)
        )
    }
}

/// Sizes of an operation for which another path than the built-in one was faster.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TunedRange {
    /// Number of ranks of the job.
    pub world_size: usize,
    /// The operation's name.
    pub operation: String,
    /// Minimum number of bytes of the whole array for which the path is taken.
    pub from_bytes: u64,
    /// Maximum number of bytes of the whole array for which it is taken, inclusive.
    pub to_bytes: u64,
    /// The path.
    #[serde(with = "as_text")]
    pub path: Path,
    /// The measurement in favour of the path.
    #[serde(flatten)]
    pub measured: Measurement,
}

impl TunedRange {
    /// Returns the reason why the line is invalid, if there is one.
    fn fault(&self) -> Option<String> {
        let Self { world_size, operation: name, from_bytes, to_bytes, path, measured } = self;
        let Some(operation) = operation(name) else {
            let names = OPERATIONS.map(Operation::name);
            return Some(format!("`{name}` is no operation of a table; there are {}", names.join(", ")));
        };
        let is_time = |us: f64| us.is_finite() && us > 0.0;
        if *world_size < 2 {
            Some(format!("{world_size} ranks: a rank alone sends nothing"))
        } else if !(is_of_host(*path) || is_of_gpus(*path)) || !path.suits(operation) {
            Some(format!("`{path}` is no path of {name}"))
        } else if from_bytes > to_bytes {
            Some(format!("it begins at {from_bytes} bytes and ends before, at {to_bytes}"))
        } else if !is_time(measured.us) || !is_time(measured.against_us) {
            Some("its times must be numbers above 0".to_owned())
        } else {
            None
        }
    }

    /// Returns true if it is for groups on the memory of GPUs.
    pub const fn is_of_gpus(&self) -> bool {
        is_of_gpus(self.path)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.world_size == other.world_size
            && self.is_of_gpus() == other.is_of_gpus()
            && self.operation == other.operation
            && self.from_bytes <= other.to_bytes
            && other.from_bytes <= self.to_bytes
    }

    /// Returns the rule of a group with these paths; `None` if the group does not have this path.
    fn rule(&self, paths: &[Path]) -> Option<Rule> {
        let operation = operation(&self.operation).filter(|_| paths.contains(&self.path))?;
        // Rules count the bytes of one rank's chunk for operations with chunks.
        let parts = if operation.is_chunked() { self.world_size as u64 } else { 1 };
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut when = vec![
            Condition::Operation(operation.name()),
            Condition::BytesFrom(bytes(self.from_bytes.div_ceil(parts))),
            Condition::BytesUpTo(bytes(self.to_bytes / parts)),
        ];
        // On CPUs, f32 was measured, and the path of 16-bit floats determines their rounding.
        if is_of_host(self.path) {
            when.insert(1, Condition::NoHalfReduction);
        }
        Some(Rule { path: self.path, when, because: self.measured.to_string(), is_measured: true })
    }
}

const fn is_of_host(path: Path) -> bool {
    matches!(path, Path::Tcp(_) | Path::SharedMemory(_))
}

const fn is_of_gpus(path: Path) -> bool {
    matches!(path, Path::Nccl | Path::PeerMemory(_))
}

/// Returns the rules of a group with these paths, for a table's lines about groups of its size.
pub(super) fn rules(ranges: &[TunedRange], world_size: usize, paths: &[Path]) -> Vec<Rule> {
    let of_size = ranges.iter().filter(|range| range.world_size == world_size);
    of_size.filter_map(|range| range.rule(paths)).collect()
}

/// The file of `ryz tune`: the ranges that were measured on one machine, for any numbers of ranks. The built-in table decides calls
/// that no range contains.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuningTable {
    format: u32,
    version: String,
    machine: Machine,
    ranges: Vec<TunedRange>,
}

/// The reason why a table cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// The file is not a table.
    #[error("this is no table of `ryz tune`: {0}; write it again with `ryz tune -n N --apply`")]
    IllFormed(#[from] serde_json::Error),
    /// It was written by another version, which may have other paths.
    #[error(
        "it was measured with version {found} (format {format}), and this is {} (format {FORMAT}); measure again with \
         `ryz tune -n N --apply`",
        env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The version that wrote it.
        found: String,
        /// Its format.
        format: u32,
    },
    /// It was measured on another machine.
    #[error(
        "it was measured on {found}, and this machine has {here}; measure here with `ryz tune -n N --apply`"
    )]
    Machine {
        /// The machine of the measurement.
        found: Machine,
        /// This machine.
        here: Machine,
    },
    /// One of its lines is invalid.
    #[error("range {} of the table: {why}; write it again with `ryz tune -n N --apply`", .index + 1)]
    Range {
        /// Its index.
        index: usize,
        /// The error.
        why: String,
    },
}

impl TuningTable {
    /// Creates a table without ranges.
    pub fn new(machine: Machine) -> Self {
        Self { format: FORMAT, version: env!("CARGO_PKG_VERSION").into(), machine, ranges: Vec::new() }
    }

    /// Reads a table that was measured with this version on the machine `here`.
    ///
    /// # Errors
    /// [`TuningError`] with the mismatch.
    pub fn parse(text: &str, here: &Machine) -> Result<Self, TuningError> {
        // A file of another version may have other keys.
        #[derive(Deserialize)]
        struct Head {
            format: u32,
            version: String,
        }
        let Head { format, version: found } = serde_json::from_str(text)?;
        if format != FORMAT || found != env!("CARGO_PKG_VERSION") {
            return Err(TuningError::Version { found, format });
        }
        let table: Self = serde_json::from_str(text)?;
        if table.machine != *here {
            return Err(TuningError::Machine { found: table.machine, here: here.clone() });
        }
        for (index, range) in table.ranges.iter().enumerate() {
            let earlier = table.ranges[..index].iter().position(|earlier| earlier.overlaps(range));
            let fault = range.fault().or_else(|| Some(format!("it overlaps range {}", earlier? + 1)));
            if let Some(why) = fault {
                return Err(TuningError::Range { index, why });
            }
        }
        Ok(table)
    }

    /// Returns the text of its file.
    ///
    /// # Panics
    /// Never: every value has a form in JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and texts") + "\n"
    }

    /// Returns the ranges of jobs of this number of ranks.
    pub fn of_world(&self, world_size: usize) -> Vec<TunedRange> {
        self.ranges.iter().filter(|range| range.world_size == world_size).cloned().collect()
    }

    /// Returns the numbers of ranks for which it has ranges, each once.
    pub fn world_sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.ranges.iter().map(|range| range.world_size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Replaces all ranges of these operations for this number of ranks, on GPUs or on CPUs. Returns the removed ranges.
    pub fn replace(
        &mut self,
        world_size: usize,
        on_gpus: bool,
        operations: &[&str],
        ranges: Vec<TunedRange>,
    ) -> Vec<TunedRange> {
        let is_old = |range: &TunedRange| {
            range.world_size == world_size
                && range.is_of_gpus() == on_gpus
                && operations.contains(&range.operation.as_str())
        };
        let (old, kept) = std::mem::take(&mut self.ranges).into_iter().partition(is_old);
        self.ranges = kept;
        self.ranges.extend(ranges);
        self.ranges.sort_by(|a, b| {
            let key = |range: &TunedRange| {
                (range.world_size, range.is_of_gpus(), range.operation.clone(), range.from_bytes)
            };
            key(a).cmp(&key(b))
        });
        old
    }
}

/// Serialises a path by its name.
mod as_text {
    use serde::de::{Deserialize as _, Deserializer, Error as _};
    use serde::ser::Serializer;

    use super::Path;

    pub(super) fn serialize<S: Serializer>(
        path: &impl std::fmt::Display,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(path)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Path, D::Error> {
        let name = String::deserialize(deserializer)?;
        Path::named(&name).ok_or_else(|| D::Error::custom(format!("`{name}` is no path")))
    }
}
