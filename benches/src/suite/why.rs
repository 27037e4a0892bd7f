//! The reasons for the path of calls.

use ryzanstein_process_group::paths::PathChoice;
use serde::Serialize;

/// The reasons for a row's path, and against each other path.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Why {
    /// The reason for this path.
    pub reason: String,
    /// The rejected paths: every other path of the group.
    pub rejected: Vec<Rejected>,
}

/// A path that was not taken.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Rejected {
    /// Name of the path.
    pub path: String,
    /// The reason against it.
    pub reason: String,
}

impl From<PathChoice> for Why {
    fn from(choice: PathChoice) -> Self {
        let rejected = choice.rejected.into_iter();
        let rejected = rejected.map(|(path, reason)| Rejected { path: path.to_string(), reason });
        Self { reason: choice.reason, rejected: rejected.collect() }
    }
}
