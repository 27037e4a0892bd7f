//! What kernels there are.

use crate::paths::{Path, PeerAlgorithm};

/// The entry points of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    OneShot,
    AddNorm,
    TwoShot,
    ReduceScatter,
    AllGather,
}

impl Entry {
    /// In the order of their numbers.
    pub(super) const ALL: [Self; 5] =
        [Self::OneShot, Self::AddNorm, Self::TwoShot, Self::ReduceScatter, Self::AllGather];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one_shot",
            Self::AddNorm => "add_norm",
            Self::TwoShot => "two_shot",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
        }
    }

    /// The path that it serves.
    pub(super) const fn path(self) -> Path {
        Path::PeerMemory(match self {
            Self::TwoShot => PeerAlgorithm::TwoShot,
            _ => PeerAlgorithm::OneShot,
        })
    }

    /// Which slots and states it uses.
    pub(super) const fn region(self) -> Region {
        match self {
            Self::OneShot | Self::AddNorm => Region::Arrays,
            Self::TwoShot | Self::ReduceScatter | Self::AllGather => Region::Chunks,
        }
    }
}

/// What a part of the slots holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Region {
    /// Whole arrays.
    Arrays,
    /// Chunks: those that are scattered, and those that are gathered.
    Chunks,
}
