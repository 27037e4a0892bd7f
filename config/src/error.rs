//! Errors in a configuration, for the person who wrote it.

use crate::{FileError, Source};
use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

/// An error in a configuration. Its cause is always the configuration, never the cluster.
///
/// Each message is complete: it includes that of `source()`.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file that the user named, or the default one, cannot be read.
    #[error("cannot read the configuration file {}: {source}", shown(path))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of reading it.
        source: FileError,
    },
    /// The file is not TOML.
    #[error("{} is not well-formed TOML: {reason}", path.display())]
    IllFormed {
        /// The file.
        path: PathBuf,
        /// The parser's error, with the line.
        reason: String,
    },
    /// A name that is not a setting.
    #[error("{}", unknown_key(key, origin, nearest.as_deref()))]
    UnknownKey {
        /// The name as the user wrote it: a dotted key or the name of an environment variable.
        key: String,
        /// The place where it was written.
        origin: Source,
        /// The nearest known name in the same form, if one is similar enough.
        nearest: Option<String>,
    },
    /// The name of a section instead of a setting.
    #[error("{} is a section, not a setting; the settings in it are {members}", place(key, origin))]
    Section {
        /// The section, as the user wrote it.
        key: String,
        /// The place where it was written.
        origin: Source,
        /// Its settings, in the spelling of this source.
        members: String,
    },
    /// A value that the setting does not accept.
    #[error("`{key}` ({origin}): {source}")]
    BadValue {
        /// The dotted key.
        key: String,
        /// The place where the value was written.
        origin: Source,
        /// The value, and what was expected instead.
        source: Box<ValueError>,
    },
    /// A value that is not text, by its source.
    #[error("the {0} is not UTF-8 text; change it, or leave it out")]
    NotText(Source),
    /// Two values that are valid individually but not together.
    #[error("{0}")]
    Conflict(String),
    /// Several of the above: all problems, in the order of the layers.
    #[error("{} problems in the configuration:{}", .0.len(), list(.0))]
    Several(Vec<ConfigError>),
}

/// Prints the message, so that `fn main() -> Result<(), ConfigError>` shows it in full.
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl ConfigError {
    /// Returns the problems, one by one. Only [`ConfigError::Several`] has more than one.
    pub fn problems(&self) -> &[ConfigError] {
        match self {
            Self::Several(problems) => problems,
            one => std::slice::from_ref(one),
        }
    }
}

/// Describes a syntax error at the byte `at` of a TOML file, and quotes its line.
pub(crate) fn toml_error(text: &str, at: usize, reason: &str) -> String {
    /// The maximum number of characters that are quoted on each side of the error.
    const QUOTED: usize = 40;
    let before = text.get(..at).unwrap_or(text);
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let (line, column) = (before.matches('\n').count() + 1, before[start..].chars().count() + 1);
    let left_out = column.saturating_sub(QUOTED);
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    let quoted = text[start..].lines().next().unwrap_or_default().chars().skip(left_out).take(2 * QUOTED);
    let (quoted, reason) = (quoted.map(printable).collect::<String>(), reason.trim_end().replace('\n', ": "));
    format!(
        "line {line}, column {column}: {reason}; a line is `[section]` or `key = value`, with text in quotes\n    {quoted}\n    \
         {:>width$}",
        '^',
        width = column - left_out
    )
}

/// Text that is not a value of the expected kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ValueError {
    pub(crate) found: String,
    pub(crate) expected: &'static str,
    pub(crate) example: &'static str,
    pub(crate) why: Option<String>,
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, such as `{}`, not {}", self.expected, self.example, self.found)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

fn shown(path: &Path) -> Cow<'_, str> {
    let is_empty = path.as_os_str().is_empty();
    if is_empty {
        "`` (RYZ_CONFIG or --config is empty: name a file, or leave it out)".into()
    } else {
        path.to_string_lossy()
    }
}

fn unknown_key(key: &str, origin: &Source, nearest: Option<&str>) -> String {
    let place = place(key, origin);
    match nearest {
        Some(nearest) => format!("unknown setting: {place}; did you mean `{nearest}`?"),
        None => format!("unknown setting: {place}; `ryz config show` lists those there are"),
    }
}

/// Returns a name and its location. If the name is that of an environment variable, it is written once.
fn place(key: &str, origin: &Source) -> String {
    match origin {
        Source::Environment(name) if name == key => format!("environment variable `{name}`"),
        _ => format!("`{key}` ({origin})"),
    }
}

fn list(problems: &[ConfigError]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| problem.to_string().replace('\n', "\n    ")).collect();
    format!("\n  - {}", lines.join("\n  - "))
}
