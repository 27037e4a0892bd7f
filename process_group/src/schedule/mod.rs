//! Which rank sends what to whom: pure, no socket and no clock.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A way to do a collective with messages between pairs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Chunks travel round a ring of ranks.
    Ring,
    /// Partners at doubling distance exchange whole vectors.
    RecursiveDoubling,
    /// Reduce-scatter by halving, then all-gather by doubling.
    HalvingDoubling,
    /// Every rank exchanges with every other at once.
    Direct,
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ring => "ring",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::HalvingDoubling => "halving_doubling",
            Self::Direct => "direct",
        })
    }
}
