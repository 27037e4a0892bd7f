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

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
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

/// Error: the number is not a rank, as ranks have 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0} is no rank: the greatest is {max}", max = u32::MAX)]
pub struct NoRank(pub usize);

impl TryFrom<usize> for Rank {
    type Error = NoRank;

    fn try_from(index: usize) -> Result<Self, NoRank> {
        u32::try_from(index).map(Self).map_err(|_| NoRank(index))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_becomes_a_rank_and_back_unless_it_is_too_great() {
        assert_eq!(Rank::try_from(7usize).unwrap().index(), 7);
        let error = Rank::try_from(1usize << 32).unwrap_err();
        assert_eq!(error.to_string(), "4294967296 is no rank: the greatest is 4294967295");
    }
}
