//! What a Ryzanstein user may set, and where each value came from.

use serde::{Deserialize, Serialize};

/// Which backend carries the collectives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// The best that every rank can use.
    #[default]
    Auto,
    /// NVIDIA's library.
    Nccl,
    /// Our own collectives over TCP.
    #[serde(alias = "gloo")]
    Tcp,
    /// Ranks as threads of one process.
    Loopback,
}

impl std::fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Nccl => "nccl",
            Self::Tcp => "tcp",
            Self::Loopback => "loopback",
        })
    }
}
