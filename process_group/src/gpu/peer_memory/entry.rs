//! The list of kernels.

use crate::paths::{Path, PeerAlgorithm};

/// The entry points of the kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Entry {
    OneShot,
    AddNorm,
    TwoShot,
    TwoShotAddNorm,
    ReduceScatter,
    AllGather,
    Broadcast,
    ScatterGather,
}

impl Entry {
    /// In the order of their numbers.
    pub(super) const ALL: [Self; 8] = [
        Self::OneShot,
        Self::AddNorm,
        Self::TwoShot,
        Self::TwoShotAddNorm,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::ScatterGather,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "one_shot",
            Self::AddNorm => "add_norm",
            Self::TwoShot => "two_shot",
            Self::TwoShotAddNorm => "two_shot_add_norm",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::ScatterGather => "scatter_gather",
        }
    }

    /// Returns the path that it serves.
    pub(super) const fn path(self) -> Path {
        Path::PeerMemory(match self {
            Self::TwoShot | Self::TwoShotAddNorm | Self::ScatterGather => PeerAlgorithm::TwoShot,
            Self::OneShot | Self::AddNorm | Self::ReduceScatter | Self::AllGather | Self::Broadcast => {
                PeerAlgorithm::OneShot
            }
        })
    }

    /// Returns true if it adds to a residual and normalises rows.
    pub(super) const fn has_norm(self) -> bool {
        matches!(self, Self::AddNorm | Self::TwoShotAddNorm)
    }

    /// Returns the region of slots and states that it uses.
    pub(super) const fn region(self) -> Region {
        match self {
            Self::OneShot | Self::AddNorm => Region::Arrays,
            _ => Region::Chunks,
        }
    }
}

/// The content of a part of the slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Region {
    /// Whole arrays.
    Arrays,
    /// Chunks: both the scattered and the gathered ones.
    Chunks,
}
