//! Why calls took their path.

use std::fmt::Write as _;

use crate::table::{Screen, wrap};
use ryzanstein_process_group::paths::PathChoice;
use ryzanstein_process_group::units;
use serde::Serialize;

use super::Row;

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

/// The reasons of all rows that have them, for people.
pub(super) fn text(rows: &[Row], screen: Screen) -> String {
    let mut text = String::new();
    for row in rows {
        let Some(why) = &row.why else { continue };
        let size = units::bytes(row.bytes as f64);
        let taken = format!("{} of {size} took {}: {}", row.op, row.path, why.reason);
        let _ = writeln!(text, "{}", wrap(&taken, 2, screen));
        for Rejected { path, reason } in &why.rejected {
            let _ = writeln!(text, "{}", wrap(&format!("  not {path}: {reason}"), 4, screen));
        }
    }
    text
}
