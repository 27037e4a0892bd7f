//! Why calls took their path.

use ryzanstein_process_group::paths::PathChoice;
use serde::Serialize;

/// Why a row's path was taken, and why no other.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Why {
    /// Why this one.
    pub reason: String,
    /// Every other path of the group.
    pub rejected: Vec<Rejected>,
}

/// A path that was not taken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Rejected {
    /// Its name.
    pub path: String,
    /// Why not.
    pub reason: String,
}

impl From<PathChoice> for Why {
    fn from(choice: PathChoice) -> Self {
        let rejected = choice.rejected.into_iter();
        let rejected = rejected.map(|(path, reason)| Rejected { path: path.to_string(), reason });
        Self { reason: choice.reason, rejected: rejected.collect() }
    }
}
