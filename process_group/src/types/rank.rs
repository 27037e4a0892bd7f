//! The positions of a process in its job, its host and its group.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! ordinal {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// Returns the number as an index.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

ordinal! {
    /// A position in a process group, from 0. In the world group it is the global rank.
    Rank(u32)
}
ordinal! {
    /// A position among the ranks of one host, from 0. Determines the GPU.
    LocalRank(u32)
}
ordinal! {
    /// A generation of the roster. Everything of an older epoch is rejected.
    Epoch(u64)
}

impl Rank {
    /// Returns all ranks of a group of `world_size`, in order.
    pub fn all(world_size: usize) -> impl ExactSizeIterator<Item = Self> + Clone {
        (0..world_size as u32).map(Self)
    }
}

/// Writes `0, 2 and 3` for error messages.
pub(crate) fn list(ranks: &[Rank]) -> String {
    match ranks {
        [] => "none".into(),
        [one] => one.to_string(),
        [first @ .., last] => {
            format!("{} and {last}", first.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}
