//! The setting for the ranks whose output a launcher shows.

use std::collections::BTreeSet;

use crate::setting::{Setting, public_setting};

/// The ranks whose output a launcher shows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShownRanks(Shown);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Shown {
    All,
    /// These ranks; none if it is empty.
    Only(BTreeSet<u32>),
}

impl ShownRanks {
    /// Returns true if the output of this rank is shown.
    pub fn includes(&self, rank: u32) -> bool {
        match &self.0 {
            Shown::All => true,
            Shown::Only(ranks) => ranks.contains(&rank),
        }
    }

    /// Returns the first rank that a job of this size does not have.
    pub fn beyond(&self, world_size: u32) -> Option<u32> {
        match &self.0 {
            Shown::All => None,
            Shown::Only(ranks) => ranks.range(world_size..).next().copied(),
        }
    }
}

impl Setting for ShownRanks {
    const EXPECTED: &'static str = "all, none, or ranks separated by commas";
    const EXAMPLE: &'static str = "0,2";

    fn read(text: &str) -> Result<Self, Option<String>> {
        match text.trim() {
            "all" => Ok(Self(Shown::All)),
            "none" => Ok(Self(Shown::Only(BTreeSet::new()))),
            ranks => {
                let rank = |text: &str| {
                    text.trim().parse().map_err(|_| Some(format!("`{text}` is not a rank number")))
                };
                ranks.split(',').map(rank).collect::<Result<_, _>>().map(|ranks| Self(Shown::Only(ranks)))
            }
        }
    }

    fn show(&self) -> String {
        match &self.0 {
            Shown::All => "all".into(),
            Shown::Only(ranks) if ranks.is_empty() => "none".into(),
            Shown::Only(ranks) => ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        }
    }
}

public_setting!(ShownRanks);
