//! Where a measured table of paths comes from.

use std::path::PathBuf;

use crate::setting::{Setting, public_setting};

/// Which measured table of paths a job uses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TuningChoice {
    /// The table that `ryz tune --apply` wrote for this user, if it is there and fits the machine.
    Auto,
    /// None: the built-in table decides.
    Off,
    /// The table in this file, which must be there and fit.
    File(PathBuf),
}

impl Setting for TuningChoice {
    const EXPECTED: &'static str = "auto, off, or the path of a file";
    const EXAMPLE: &'static str = "auto";

    fn read(text: &str) -> Result<Self, Option<String>> {
        match text.trim() {
            "" => Err(None),
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            path => Ok(Self::File(path.into())),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Auto => "auto".into(),
            Self::Off => "off".into(),
            Self::File(path) => path.display().to_string(),
        }
    }
}

public_setting!(TuningChoice);
