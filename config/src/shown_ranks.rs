//! The setting for the ranks whose output a launcher shows.

use std::collections::BTreeSet;

use crate::setting::{Setting, public_setting};

/// The ranks whose output a launcher shows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ShownRanks {
    /// Every rank.
    All,
    /// No rank.
    None,
    /// These ranks.
    Some(BTreeSet<u32>),
}

impl ShownRanks {
    /// Returns true if the output of this rank is shown.
    pub fn includes(&self, rank: u32) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Some(ranks) => ranks.contains(&rank),
        }
    }
}

impl Setting for ShownRanks {
    const EXPECTED: &'static str = "all, none, or ranks with commas between";
    const EXAMPLE: &'static str = "0,2";

    fn read(text: &str) -> Result<Self, Option<String>> {
        match text.trim() {
            "all" => Ok(Self::All),
            "none" => Ok(Self::None),
            ranks => {
                let rank = |text: &str| text.trim().parse().map_err(|_| Some(format!("`{text}` is no rank")));
                ranks.split(',').map(rank).collect::<Result<_, _>>().map(Self::Some)
            }
        }
    }

    fn show(&self) -> String {
        match self {
            Self::All => "all".into(),
            Self::None => "none".into(),
            Self::Some(ranks) => ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        }
    }
}

public_setting!(ShownRanks);
