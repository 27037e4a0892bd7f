//! The messages between ranks: pure, no socket and no clock.
//!
//! Each algorithm has a file that implements the trait `Programs`. [`build`] makes a rank's [`Program`](program::Program),
//! [`hazards`](hazards::hazards) computes the overlap that it allows, and [`cost`] its time. [`paths`](crate::paths) chooses the
//! algorithm of a call.

pub mod build;
pub mod cost;
mod direct;
mod halving_doubling;
pub mod hazards;
mod hierarchical;
mod hosts;
pub mod program;
mod recursive_doubling;
mod ring;
mod surplus;
mod tree;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::operation::Operation;
use build::{Builder, CollectiveSpec};
use cost::Traffic;
pub use hosts::Hosts;

/// A way to execute a collective with messages between pairs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Algorithm {
    /// Chunks travel round a ring of ranks; for rooted operations, along a chain.
    Ring,
    /// Partners at doubling distance exchange whole vectors; for rooted operations, a binomial tree.
    RecursiveDoubling,
    /// Reduce-scatter by halving, then all-gather by doubling.
    HalvingDoubling,
    /// Every rank exchanges with every other at once.
    Direct,
    /// Reduce-scatter within each host, all-reduce between hosts, all-gather within each host.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm, in wire order.
    pub const ALL: [Self; 5] =
        [Self::Ring, Self::RecursiveDoubling, Self::HalvingDoubling, Self::Direct, Self::Hierarchical];

    /// Returns true if the algorithm supports the operation. Every operation except a barrier has a direct form.
    pub fn suits(self, operation: Operation) -> bool {
        self.programs().suits(operation)
    }

    /// Returns the name used in configuration and tables.
    pub fn name(self) -> &'static str {
        self.programs().name()
    }

    fn programs(self) -> &'static dyn Programs {
        match self {
            Self::Ring => &ring::Ring,
            Self::RecursiveDoubling => &recursive_doubling::RecursiveDoubling,
            Self::HalvingDoubling => &halving_doubling::HalvingDoubling,
            Self::Direct => &direct::Direct,
            Self::Hierarchical => &hierarchical::Hierarchical,
        }
    }
}

/// The programs of an algorithm, and what they cost.
trait Programs {
    /// Returns the name used in configuration and tables.
    fn name(&self) -> &'static str;

    fn suits(&self, operation: Operation) -> bool;

    /// Adds the program of one of at least two ranks, for an operation that the algorithm suits.
    fn build(&self, b: &mut Builder<'_>);

    /// Returns the work of `rank`, without empty messages, over links within hosts and between them: what the nodes of
    /// [`build`](Self::build) add up to, in closed form.
    fn traffic(&self, spec: &CollectiveSpec, rank: usize, hosts: &Hosts) -> [Traffic; 2];

    /// Returns the number of messages that must follow one another until the last rank is done, within hosts and between them.
    fn rounds(&self, spec: &CollectiveSpec, hosts: &Hosts) -> [usize; 2];
}

fn unsuited(operation: Operation) -> ! {
    unreachable!("the algorithm does not suit {operation}")
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
