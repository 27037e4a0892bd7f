//! The messages between ranks: pure, no socket and no clock.
//!
//! [`build`] makes a rank's [`Program`](program::Program), [`hazards`](hazards::hazards) computes the overlap that it allows, and
//! [`cost`] its traffic. [`paths`](crate::paths) chooses the algorithm of a call.

pub mod build;
pub mod cost;
pub mod hazards;
mod hosts;
pub mod program;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::operation::Operation;
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
    pub const fn suits(self, operation: Operation) -> bool {
        use Operation::{AllGather, AllReduce, Barrier, Broadcast, Reduce, ReduceScatter};
        match self {
            Self::Ring => {
                matches!(
                    operation,
                    AllReduce(_) | Broadcast { .. } | Reduce { .. } | AllGather | ReduceScatter(_)
                )
            }
            Self::RecursiveDoubling => {
                matches!(operation, AllReduce(_) | Broadcast { .. } | Reduce { .. } | Barrier)
            }
            Self::HalvingDoubling => matches!(operation, AllReduce(_) | Broadcast { .. } | Reduce { .. }),
            Self::Direct => !matches!(operation, Barrier),
            Self::Hierarchical => matches!(operation, AllReduce(_)),
        }
    }

    /// Returns the name used in configuration and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::HalvingDoubling => "halving_doubling",
            Self::Direct => "direct",
            Self::Hierarchical => "hierarchical",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
