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

macro_rules! algorithms {
    ($( $(#[$meta:meta])+ $variant:ident, $name:literal, $programs:expr; )+) => {
        /// A way to execute a collective with messages between pairs.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        pub enum Algorithm {
            $( $(#[$meta])+ #[serde(rename = $name)] $variant, )+
        }

        impl Algorithm {
            /// Every algorithm.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Returns the name used in configuration, in tables and between ranks.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            fn programs(self) -> &'static dyn Programs {
                match self { $(Self::$variant => &$programs),+ }
            }
        }
    };
}

// The only list of algorithms: settings, paths and ranks know them by these names.
algorithms! {
    /// Chunks travel round a ring of ranks; for rooted operations, along a chain.
    Ring, "ring", ring::Ring;
    /// Partners at doubling distance exchange whole vectors; for rooted operations, a binomial tree.
    RecursiveDoubling, "recursive_doubling", recursive_doubling::RecursiveDoubling;
    /// Reduce-scatter by halving, then all-gather by doubling.
    HalvingDoubling, "halving_doubling", halving_doubling::HalvingDoubling;
    /// Every rank exchanges with every other at once.
    Direct, "direct", direct::Direct;
    /// Reduce-scatter within each host, all-reduce between hosts, all-gather within each host.
    Hierarchical, "hierarchical", hierarchical::Hierarchical;
}

impl Algorithm {
    /// Returns true if the algorithm supports the operation. Every operation except a barrier has a direct form.
    pub fn suits(self, operation: Operation) -> bool {
        self.programs().suits(operation)
    }

    /// Returns the algorithm of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

/// The programs of an algorithm, and what they cost.
trait Programs {
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
