//! Where a value came from.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The default: nobody set it.
    Default,
    /// This configuration file.
    File(PathBuf),
    /// The environment variable of this name.
    Environment(String),
    /// This command-line flag, as the user typed it.
    Flag(String),
    /// The embedding program assigned it.
    Code,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
            Self::Code => f.write_str("code"),
        }
    }
}

/// One line of `ryz config show`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The dotted key.
    pub key: &'static str,
    /// The value, in the syntax of the file; empty for an optional setting that is unset.
    pub value: String,
    /// Where it came from.
    pub source: Source,
}

/// The origin of each loaded value; empty in a configuration built in code.
///
/// A public field of [`Config`](crate::Config) only so that other crates can write `..Config::default()`. Comparison ignores
/// it: the same values from other sources are the same configuration.
#[derive(Clone, Debug, Default)]
pub struct Provenance {
    recorded: BTreeMap<&'static str, (String, Source)>,
}

impl Provenance {
    pub(crate) fn record(&mut self, key: &'static str, value: String, source: Source) {
        self.recorded.insert(key, (value, source));
    }

    /// The origin of `value`, the current value of `key`. Fields may have been assigned since loading, so the recorded origin
    /// counts only while the value is the recorded one.
    pub(crate) fn of(&self, key: &str, value: &str, default: &str) -> Source {
        match self.recorded.get(key) {
            Some((recorded, source)) if recorded == value => source.clone(),
            None if value == default => Source::Default,
            _ => Source::Code,
        }
    }
}

impl PartialEq for Provenance {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
