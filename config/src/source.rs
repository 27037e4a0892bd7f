//! Sources of values.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// The source of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The default, because no layer set the value.
    Default,
    /// This configuration file.
    File(PathBuf),
    /// The environment variable of this name.
    Environment(String),
    /// This command-line flag, as the user typed it.
    Flag(String),
    /// The application assigned it.
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
    /// Its source.
    pub source: Source,
}

/// The source of each loaded value; empty in a configuration that was built in code.
///
/// It is a public field of [`Config`](crate::Config) only so that other crates can write `..Config::default()`. Comparison
/// ignores it: configurations with the same values are equal, whatever their sources.
#[derive(Clone, Debug, Default)]
pub struct Provenance {
    recorded: BTreeMap<&'static str, (String, Source)>,
}

impl Provenance {
    pub(crate) fn record(&mut self, key: &'static str, value: String, source: Source) {
        self.recorded.insert(key, (value, source));
    }

    /// Returns the source of `value`, the current value of `key`. Fields may have been assigned since loading, so the recorded
    /// source applies only if the value is the recorded one.
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
