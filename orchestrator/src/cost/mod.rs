//! How long collectives take, in closed form: α-β-γ models. Pure.
//!
//! A collective is a number of steps on its critical path, the bytes that a rank moves one way in them, and the bytes that it
//! reduces. Time is α (the latency of a [`Link`]) for each step, β (the inverse of its bandwidth) for each byte moved, and γ for
//! each byte reduced. Nothing overlaps in these models, and links are not shared: they are bounds to compare with, not forecasts.
//!
//! The CPU backend chooses its algorithms with another model,
//! [`schedule::cost`](ryzanstein_process_group::schedule::cost), in which the ranks of a host share its processors.
//!
//! Formulas: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
//! P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
//!
//! ```
//! use ryzanstein_orchestrator::cost::{AllReduce, Interconnect};
//!
//! let link = Interconnect::NvLink4.link();
//! let seconds = AllReduce::Ring.cost(4, 100e6).seconds(link);
//! assert!((330e-6..340e-6).contains(&seconds));
//! ```

mod fit;
mod gradients;
mod interconnect;

use std::fmt;

pub use self::fit::FitError;
pub use self::gradients::{GRADIENTS, GradientRow, Gradients, gradient_table};
pub use self::interconnect::{Interconnect, UnknownInterconnect};

/// What joins a rank to its peers, in one direction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Time of a step that moves nothing, in seconds: α.
    pub latency: f64,
    /// Bytes per second in one direction: 1/β.
    pub bandwidth: f64,
}

/// What a collective takes on its critical path.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cost {
    /// Messages that follow one another.
    pub steps: usize,
    /// Bytes that a rank sends, or receives if that is more, in these steps.
    pub bytes: f64,
    /// Bytes that a rank reduces.
    pub reduced: f64,
}

impl Cost {
    /// One message.
    pub const fn message(bytes: f64) -> Self {
        Self { steps: 1, bytes, reduced: 0.0 }
    }

    /// Seconds to move the bytes: α · steps + β · bytes.
    pub fn seconds(self, link: Link) -> f64 {
        self.steps as f64 * link.latency + self.bytes / link.bandwidth
    }

    /// Seconds to reduce: γ · reduced bytes, for a rank that reduces `rate` bytes per second. Add it to
    /// [`seconds`](Self::seconds) where it does not overlap with moving.
    pub fn reduction_seconds(self, rate: f64) -> f64 {
        self.reduced / rate
    }

    /// This and then `next`.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        Self {
            steps: self.steps + next.steps,
            bytes: self.bytes + next.bytes,
            reduced: self.reduced + next.reduced,
        }
    }
}

/// A way to do an all-reduce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllReduce {
    /// Chunks travel round a ring twice: to be reduced, then to be gathered.
    Ring,
    /// Up a binomial tree, then down, with whole vectors. NCCL's tree is a pipelined pair of trees, which moves 2 vectors
    /// in place of 2⌈log₂ n⌉.
    Tree,
    /// Every rank sends its vector to every other, and reduces all.
    OneShot,
    /// Reduce-scatter, then all-gather, each in one step to all others at once.
    TwoShot,
    /// Partners at doubling distance exchange whole vectors. Ranks beyond the largest power of two hand theirs to a partner
    /// first, and get the result at the end.
    RecursiveDoubling,
    /// Reduce-scatter by halving, then all-gather by doubling. Ranks beyond the largest power of two as above.
    HalvingDoubling,
}

impl AllReduce {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Ring,
        Self::Tree,
        Self::OneShot,
        Self::TwoShot,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::OneShot => "one_shot",
            Self::TwoShot => "two_shot",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::HalvingDoubling => "halving_doubling",
        }
    }

    /// An all-reduce of a vector of so many bytes. One rank costs nothing.
    pub fn cost(self, ranks: usize, bytes: f64) -> Cost {
        if ranks < 2 {
            return Cost::default();
        }
        let others = (ranks - 1) as f64;
        let halvings = ranks.ilog2() as usize;
        let power = (1usize << halvings) as f64;
        // What the ranks beyond the largest power of two add: their vectors in, the result out.
        let surplus = usize::from(!ranks.is_power_of_two());
        let extra = surplus as f64 * bytes;
        match self {
            Self::Ring => reduce_scatter(ranks, bytes).then(all_gather(ranks, bytes)),
            Self::Tree => {
                let depth = levels(ranks);
                let moved = depth as f64 * bytes;
                Cost { steps: 2 * depth, bytes: 2.0 * moved, reduced: moved }
            }
            Self::OneShot => Cost { steps: 1, bytes: others * bytes, reduced: others * bytes },
            Self::TwoShot => {
                let share = others / ranks as f64 * bytes;
                Cost { steps: 2, bytes: 2.0 * share, reduced: share }
            }
            Self::RecursiveDoubling => {
                let moved = halvings as f64 * bytes;
                Cost { steps: halvings + 2 * surplus, bytes: moved + 2.0 * extra, reduced: moved + extra }
            }
            Self::HalvingDoubling => {
                let share = (power - 1.0) / power * bytes;
                Cost { steps: 2 * (halvings + surplus), bytes: 2.0 * (share + extra), reduced: share + extra }
            }
        }
    }
}

impl fmt::Display for AllReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An all-reduce in three parts: reduce-scatter within each host, all-reduce of each chunk between the hosts, all-gather within
/// each host. Rings everywhere.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hierarchical {
    /// The first and the last part, over the links within a host.
    pub within: Cost,
    /// The part between hosts, over the link of one rank.
    pub between: Cost,
}

impl Hierarchical {
    /// An all-reduce of a vector of so many bytes over `hosts` hosts with `ranks_per_host` ranks each.
    pub fn all_reduce(hosts: usize, ranks_per_host: usize, bytes: f64) -> Self {
        let chunk = bytes / ranks_per_host.max(1) as f64;
        Self {
            within: reduce_scatter(ranks_per_host, bytes).then(all_gather(ranks_per_host, bytes)),
            between: AllReduce::Ring.cost(hosts, chunk),
        }
    }

    /// Seconds to move the bytes.
    pub fn seconds(self, within: Link, between: Link) -> f64 {
        self.within.seconds(within) + self.between.seconds(between)
    }
}

/// An all-gather by a ring; `bytes` are those of the whole array, of which each rank has a chunk.
pub fn all_gather(ranks: usize, bytes: f64) -> Cost {
    let others = ranks.saturating_sub(1);
    Cost { steps: others, bytes: others as f64 / ranks.max(1) as f64 * bytes, reduced: 0.0 }
}

/// A reduce-scatter by a ring; `bytes` are those of the whole array, of which each rank gets a chunk.
pub fn reduce_scatter(ranks: usize, bytes: f64) -> Cost {
    let moved = all_gather(ranks, bytes);
    Cost { reduced: moved.bytes, ..moved }
}

/// A broadcast along a chain, in pieces so small that only the steps to the last rank count.
pub fn broadcast(ranks: usize, bytes: f64) -> Cost {
    if ranks < 2 {
        return Cost::default();
    }
    Cost { steps: ranks - 1, bytes, reduced: 0.0 }
}

/// A reduction to one rank along a chain, in pieces as above.
pub fn reduce(ranks: usize, bytes: f64) -> Cost {
    let moved = broadcast(ranks, bytes);
    Cost { reduced: moved.bytes, ..moved }
}

/// A gather or a scatter: the root receives or sends the chunks of all others at once. `bytes` are those of the whole array.
pub fn gather(ranks: usize, bytes: f64) -> Cost {
    all_to_all(ranks, bytes)
}

/// An exchange of a chunk between every two ranks, all at once; `bytes` are those of one rank's whole array.
pub fn all_to_all(ranks: usize, bytes: f64) -> Cost {
    let moved = all_gather(ranks, bytes);
    Cost { steps: moved.steps.min(1), ..moved }
}

/// A barrier by recursive doubling.
pub fn barrier(ranks: usize) -> Cost {
    Cost { steps: levels(ranks), ..Cost::default() }
}

/// ⌈log₂ ranks⌉.
fn levels(ranks: usize) -> usize {
    ranks.max(1).next_power_of_two().ilog2() as usize
}

#[cfg(test)]
mod tests;
