//! The path of a call, and the reason for it: one table for each group. Pure.
//!
//! A table is data: the paths of a group, rules in order of preference, and the costs of links. The first rule that fits a call
//! decides it; a forced path, or an algorithm that the user demands, comes before all rules. Where no rule fits, the costs decide.
//!
//! `host` has the costs of links, by which calls on host memory are chosen, and `gpu` the limits for the memory of GPUs. A new path
//! needs a new variant of [`Path`], its rules, and the backend that implements it.

#[doc(hidden)]
pub mod gpu;
pub(crate) mod host;
mod rule;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod tuned;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::schedule::Hosts;
use crate::schedule::build::CollectiveSpec;
use crate::schedule::cost::{LinkModel, estimate};
use crate::types::dtype::DType;
use crate::types::operation::{Operation, ReduceOp};
use crate::types::units;
pub(crate) use rule::{Condition, Rule};

pub use crate::schedule::Algorithm;

/// The algorithm of the peer-memory kernels for a collective.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerAlgorithm {
    /// In one step: every rank sends to every other the data that the other needs, for an all-reduce its whole array.
    OneShot,
    /// In two steps: all-reduce as reduce-scatter and all-gather, broadcast as scatter and all-gather.
    TwoShot,
}

impl PeerAlgorithm {
    /// Every algorithm.
    pub const ALL: [Self; 2] = [Self::OneShot, Self::TwoShot];

    /// Returns true if it supports an operation.
    pub const fn suits(self, operation: Operation) -> bool {
        match operation {
            Operation::AllReduce(ReduceOp::Sum) | Operation::Broadcast { .. } => true,
            Operation::AllGather | Operation::ReduceScatter(ReduceOp::Sum) => matches!(self, Self::OneShot),
            _ => false,
        }
    }

    /// Returns the name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one_shot",
            Self::TwoShot => "two_shot",
        }
    }
}

/// The path of a call.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Path {
    /// Nothing to send: a group of one rank.
    Local,
    /// Between GPUs, by NCCL.
    Nccl,
    /// Between GPUs of one node, by kernels of this crate that read and write each other's memory.
    PeerMemory(PeerAlgorithm),
    /// Through sockets with this schedule: Unix sockets within a host, TCP between hosts.
    Tcp(Algorithm),
    /// Over links that go through memory which the ranks of one host share, with this schedule.
    SharedMemory(Algorithm),
}

impl Path {
    /// Returns the path of this name, as [`Display`](fmt::Display) writes it.
    pub fn named(name: &str) -> Option<Self> {
        let others = [Self::Local, Self::Nccl];
        let peers = PeerAlgorithm::ALL.map(Self::PeerMemory);
        let all = others
            .into_iter()
            .chain(peers)
            .chain(Algorithm::ALL.map(Self::Tcp))
            .chain(Algorithm::ALL.map(Self::SharedMemory));
        all.into_iter().find(|path| path.to_string() == name)
    }

    /// Returns true if the path supports this operation.
    pub fn suits(self, operation: Operation) -> bool {
        match self {
            Self::Tcp(algorithm) | Self::SharedMemory(algorithm) => algorithm.suits(operation),
            Self::Local => !operation.is_point_to_point(),
            Self::Nccl => true,
            Self::PeerMemory(algorithm) => algorithm.suits(operation),
        }
    }

    /// Returns true if the path can execute this call.
    fn takes(self, query: &Query) -> bool {
        let has_type = !matches!(self, Self::PeerMemory(_)) || gpu::PEER_TYPES.contains(&query.dtype);
        has_type && self.suits(query.operation)
    }

    /// Returns true if the cost model can estimate the path's time.
    const fn is_costed(self) -> bool {
        self.schedule().is_some()
    }

    /// Returns the schedule whose payloads go over links.
    pub(crate) const fn schedule(self) -> Option<Algorithm> {
        match self {
            Self::Tcp(algorithm) | Self::SharedMemory(algorithm) => Some(algorithm),
            Self::Local | Self::Nccl | Self::PeerMemory(_) => None,
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.pad("local"),
            Self::Nccl => f.pad("nccl"),
            Self::PeerMemory(algorithm) => f.pad(&format!("peer/{}", algorithm.name())),
            Self::Tcp(algorithm) => f.pad(&format!("tcp/{algorithm}")),
            Self::SharedMemory(algorithm) => f.pad(&format!("shared_memory/{algorithm}")),
        }
    }
}

/// The properties of a call for which a path is chosen. The same on every rank of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Query {
    /// The operation.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// Number of elements of the vector, or of one rank's chunk where [`Operation::is_chunked`].
    pub count: usize,
}

impl Query {
    /// Returns the bytes of the vector, or of one rank's chunk.
    pub(crate) const fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Returns true if it reduces 16-bit floats.
    pub(crate) const fn is_half_reduction(&self) -> bool {
        self.dtype.is_half() && self.operation.reduce_op().is_some()
    }
}

/// A chosen path, and the reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PathChoice {
    /// The path.
    pub path: Path,
    /// The reason for this path.
    pub reason: String,
    /// The time that the cost model expects; `None` for paths on the memory of GPUs.
    pub expected: Option<Duration>,
}

/// The paths of a group, and the rules that choose one.
#[derive(Clone, Debug)]
pub(crate) struct PathTable {
    world_size: usize,
    paths: Vec<Path>,
    /// Paths that the group does not have, and the reasons.
    unavailable: Vec<(Path, String)>,
    /// The rules, in order of preference.
    rules: Vec<Rule>,
    /// The costs of the links, and the ranks by host: calls that no rule fits take the schedule that costs the least time.
    costs: Option<(LinkModel, Hosts)>,
    /// The path that the user demands for every operation that supports it.
    demand: Option<Path>,
    forced: Option<Path>,
}

/// The reason for the choice of a path.
#[derive(Clone, Copy, Debug)]
enum Decision {
    Forced,
    Demanded,
    /// The rule with this index.
    Rule(usize),
    Cheapest,
}

impl PathTable {
    /// Creates the table of a group with one path for every call.
    pub(crate) fn single(path: Path, world_size: usize, because: &'static str) -> Self {
        Self::new(world_size, vec![path], vec![Rule::always(path, because)], None)
    }

    /// Creates the table of a group with these paths. The first rule that fits a call decides it: the last one is without conditions,
    /// or there are `costs`. A group of one rank has only [`Path::Local`], regardless of the arguments.
    ///
    /// # Panics
    /// When a rule names a path that is not among `paths`, or nothing decides every call.
    pub(crate) fn new(
        world_size: usize,
        paths: Vec<Path>,
        rules: Vec<Rule>,
        costs: Option<(LinkModel, Hosts)>,
    ) -> Self {
        let (paths, rules, costs) = if world_size == 1 {
            let alone = Rule::always(Path::Local, "one rank alone has nothing to send");
            (vec![Path::Local], vec![alone], None)
        } else {
            (paths, rules, costs)
        };
        let last = rules.last().is_some_and(|rule| rule.when.is_empty());
        assert!(costs.is_some() || last, "no rule decides every call, and there are no costs");
        for Rule { path, .. } in &rules {
            assert!(paths.contains(path), "the table chooses {path}, which the group does not have");
        }
        Self { world_size, paths, unavailable: Vec::new(), rules, costs, demand: None, forced: None }
    }

    /// Records a path that the group might have had, and the reason why it does not have it.
    #[must_use]
    pub(crate) fn without(mut self, path: Path, why: impl Into<String>) -> Self {
        if self.world_size > 1 {
            self.unavailable.push((path, why.into()));
        }
        self
    }

    /// Records the user's demand of a path for every operation that supports it, if the group has the path.
    #[must_use]
    pub(crate) fn demanding(mut self, path: Option<Path>) -> Self {
        self.demand = path.filter(|path| self.paths.contains(path));
        self
    }

    /// Returns every path that calls may take.
    pub(crate) fn all(&self) -> &[Path] {
        &self.paths
    }

    /// Forces calls to take a path for every operation that it supports, or lets the table choose again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the group does not have the path, with the reason where that is known.
    pub(crate) fn force(&mut self, path: Option<Path>) -> Result<()> {
        if let Some(unknown) = path.filter(|path| !self.paths.contains(path)) {
            // A group that has one schedule over a kind of links has others too: the reason is that of the links.
            let links = |path: &Path| std::mem::discriminant(path);
            let why = self.unavailable.iter().find(|(path, _)| links(path) == links(&unknown));
            let why = why.map(|(_, why)| format!(": {why}")).unwrap_or_default();
            return Err(Error::invalid(format!("this group has no path `{unknown}`{why}")));
        }
        self.forced = path;
        Ok(())
    }

    /// Returns the bytes of a vector from which on an all-reduce may take another path, according to the rules.
    pub(crate) fn thresholds(&self) -> Vec<usize> {
        let conditions = self.rules.iter().filter(|rule| rule.suits_all_reduce()).flat_map(|rule| &rule.when);
        conditions
            .filter_map(|condition| match *condition {
                Condition::BytesFrom(least) => Some(least),
                Condition::BytesUpTo(most) => Some(most.saturating_add(1)),
                _ => None,
            })
            .collect()
    }

    /// Describes when each path is taken, in one line per path.
    pub(crate) fn describe(&self) -> Vec<(Path, String)> {
        let taken = |path: Path| {
            let rules = self.rules.iter().filter(|rule| rule.path == path).map(Rule::to_string);
            let is_costed = self.costs.is_some() && path.is_costed();
            let cheapest = is_costed.then(|| "where it costs least".to_owned());
            let taken = rules.chain(cheapest).collect::<Vec<_>>().join("; ");
            if taken.is_empty() {
                "only if forced, or if `ryz tune` measured it as the fastest".to_owned()
            } else {
                taken
            }
        };
        let there = self.paths.iter().map(|path| (*path, taken(*path)));
        there.chain(self.unavailable.iter().map(|(path, why)| (*path, format!("never: {why}")))).collect()
    }

    /// Returns the path of a call. It depends on nothing that differs between ranks.
    pub(crate) fn path(&self, operation: Operation, dtype: DType, count: usize) -> Path {
        self.decide(&Query { operation, dtype, count }).0
    }

    /// Returns the path with the reason.
    pub(crate) fn choose(&self, operation: Operation, dtype: DType, count: usize) -> PathChoice {
        let query = Query { operation, dtype, count };
        let (path, because) = self.decide(&query);
        let expected = self.estimate(path, &query);
        let mut reason = match because {
            Decision::Forced => "it is forced".to_owned(),
            Decision::Demanded => "process_group.tcp.algorithm demands it".to_owned(),
            Decision::Rule(index) => self.rules[index].because.clone(),
            Decision::Cheapest if self.paths.iter().filter(|path| path.suits(operation)).count() == 1 => {
                format!("no other path has {}", operation.name())
            }
            Decision::Cheapest => {
                let time =
                    expected.map_or_else(|| "none".into(), |time| units::time(time.as_secs_f64() * 1e6));
                format!("the cost model expects the least time: {time}")
            }
        };
        if path == Path::Nccl
            && let Some(op) = operation.reduce_op()
            && let Some(plan) = gpu::nccl_reduction(op, dtype, self.world_size).reason()
        {
            reason = format!("{reason}; {plan}");
        }
        PathChoice { path, reason, expected }
    }

    /// Returns true if an all-reduce of `count` elements and the following operations of a layer, a sum with the residual and a
    /// norm of its rows of `columns` elements, are one call: if the table assigns the sum to the peer-memory kernels, and the sum
    /// is short or of f32. A forced path executes the sum alone.
    pub(crate) fn fuses_add_norm(&self, dtype: DType, count: usize, columns: usize) -> bool {
        let row = columns.saturating_mul(dtype.size());
        let fits = row > 0 && row <= gpu::MOST_ROW && row.is_multiple_of(16) && count.is_multiple_of(columns);
        let operation = Operation::AllReduce(ReduceOp::Sum);
        fits && self.forced.is_none()
            && (dtype == DType::F32 || count.saturating_mul(dtype.size()) <= gpu::ADD_NORM_MOST)
            && matches!(self.path(operation, dtype, count), Path::PeerMemory(_))
    }

    fn decide(&self, query: &Query) -> (Path, Decision) {
        if let Some(told) = self.forced.or(self.demand).filter(|path| path.takes(query)) {
            return (told, if self.forced.is_some() { Decision::Forced } else { Decision::Demanded });
        }
        let fits =
            |rule: &Rule| rule.when.is_empty() || (self.is_eligible(rule.path, query) && rule.holds(query));
        if let Some(index) = self.rules.iter().position(fits) {
            return (self.rules[index].path, Decision::Rule(index));
        }
        let costed = self.paths.iter().filter(|path| path.is_costed() && path.suits(query.operation));
        let cheapest = costed.min_by_key(|path| self.estimate(**path, query));
        // Every operation has an algorithm.
        (*cheapest.unwrap_or(&Path::Tcp(Algorithm::Direct)), Decision::Cheapest)
    }

    /// Returns true if rules may choose this path. While a path is forced, the peer-memory kernels are not chosen, not even for
    /// operations that the forced path does not support.
    fn is_eligible(&self, path: Path, query: &Query) -> bool {
        path.takes(query) && !(self.forced.is_some() && matches!(path, Path::PeerMemory(_)))
    }

    /// Returns the cost model's estimate for a path; `None` if its payloads do not go over links.
    fn estimate(&self, path: Path, query: &Query) -> Option<Duration> {
        let Query { operation, dtype, count } = *query;
        let ((model, hosts), algorithm) = self.costs.as_ref().zip(path.schedule())?;
        // A barrier has no data, and always the same cost.
        let (count, size) = if operation == Operation::Barrier { (0, 1) } else { (count, dtype.size()) };
        let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
        Some(estimate(spec, hosts, size, model))
    }
}
