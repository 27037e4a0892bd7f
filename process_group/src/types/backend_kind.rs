//! The names of backends.

use std::fmt;

use ryzanstein_config::BackendChoice;
use serde::{Deserialize, Serialize};

/// An implementation of the collectives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    /// NVIDIA's library, for GPUs.
    Nccl,
    /// The CPU collectives of this crate, through shared memory and sockets.
    Tcp,
}

impl BackendKind {
    /// All kinds; `auto` takes the first that every rank can use.
    pub const BY_PREFERENCE: [Self; 2] = [Self::Nccl, Self::Tcp];

    /// Returns the kinds that a choice allows, the preferred one first.
    pub fn allowed_by(choice: BackendChoice) -> &'static [Self] {
        match choice {
            BackendChoice::Auto => &Self::BY_PREFERENCE,
            BackendChoice::Nccl => &[Self::Nccl],
            BackendChoice::Tcp => &[Self::Tcp],
        }
    }

    /// Returns the name used in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
