//! The setting for the measured table of paths.

use std::path::PathBuf;

use crate::setting::{Setting, public_setting};

/// The measured table of paths that a job uses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TuningChoice {
    /// The table that `ryz tune --apply` wrote for this user, if it exists and fits the machine.
    Auto,
    /// No table: the built-in one applies.
    Off,
    /// The table in this file, which must exist and fit.
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
