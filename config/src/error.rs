//! What can be wrong with a configuration, for the person who wrote it.

use crate::{FileError, Source};
use std::fmt;
use std::path::PathBuf;

/// Why a configuration was refused. Always the fault of whoever wrote it, never of the cluster.
///
/// Each message is complete: it quotes its `source()`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file that the user named, or the default one, cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: FileError,
    },
    /// The file is not TOML.
    #[error("{} is not well-formed TOML: {source}", path.display())]
    IllFormed {
        /// The file.
        path: PathBuf,
        /// The parser's error; it quotes the line.
        source: TomlError,
    },
    /// A name that is not a setting.
    #[error("{}", unknown_key(key, origin, nearest.as_deref()))]
    UnknownKey {
        /// The name as the user wrote it: a dotted key or the name of an environment variable.
        key: String,
        /// Where it was written.
        origin: Source,
        /// The nearest known name in the same form, if one is near enough.
        nearest: Option<String>,
    },
    /// The name of a section instead of a setting.
    #[error("{} is a section, not a setting; the settings in it are {members}", place(key, origin))]
    Section {
        /// The section, as the user wrote it.
        key: String,
        /// Where it was written.
        origin: Source,
        /// Its settings, as this source spells them.
        members: String,
    },
    /// A value that the setting does not accept.
    #[error("`{key}` ({origin}): {source}")]
    BadValue {
        /// The dotted key.
        key: String,
        /// Where the value was written.
        origin: Source,
        /// The value, and what was expected instead.
        source: Box<ValueError>,
    },
    /// Two values that are valid by themselves, but not together.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// More than one of the above: all problems, in the order of the layers.
    #[error("{} problems in the configuration:{}", .0.len(), list(.0))]
    Several(Vec<ConfigError>),
}

impl ConfigError {
    /// The problems, one by one. Only [`ConfigError::Several`] has more than one.
    pub fn problems(&self) -> &[ConfigError] {
        match self {
            Self::Several(problems) => problems,
            one => std::slice::from_ref(one),
        }
    }
}

/// A file's text that is not TOML. The message quotes the line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line}, column {column}: {reason}; a line is `[section]` or `key = value`, with text in quotes\n    {quoted}\n    {:>width$}", '^',
    width = self.caret
)]
pub struct TomlError {
    line: usize,
    column: usize,
    reason: String,
    quoted: String,
    /// The column in the quoted text.
    caret: usize,
}

impl TomlError {
    /// The most characters that are quoted on either side of the mistake.
    const QUOTED: usize = 40;

    /// What is wrong with `text` at the byte `at`.
    pub(crate) fn new(text: &str, at: usize, reason: &str) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let column = before[start..].chars().count() + 1;
        let left_out = column.saturating_sub(Self::QUOTED);
        let line = text[start..].lines().next().unwrap_or_default();
        let printable = |c: char| if c.is_control() { ' ' } else { c };
        Self {
            line: before.matches('\n').count() + 1,
            column,
            reason: reason.trim_end().replace('\n', ": "),
            quoted: line.chars().skip(left_out).take(2 * Self::QUOTED).map(printable).collect(),
            caret: column - left_out,
        }
    }
}

/// Two values that contradict each other, with the source of each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Conflict {
    /// `launch.node_rank` is not below `launch.nnodes`.
    #[error(
        "`launch.node_rank` is {node_rank} ({}), but `launch.nnodes` is {nnodes} ({}): nodes are counted from 0, so the last \
         is {}", .origins[0], .origins[1], .nnodes - 1
    )]
    NodeRank {
        /// The value of `launch.node_rank`.
        node_rank: u32,
        /// The value of `launch.nnodes`.
        nnodes: u32,
        /// Where the two were written, in this order.
        origins: [Source; 2],
    },
}

/// A text that is not a value of the expected kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ValueError {
    pub(crate) found: String,
    pub(crate) expected: &'static str,
    pub(crate) example: &'static str,
    pub(crate) why: Option<String>,
}

impl ValueError {
    /// The offending value, quoted; or a description of one that is not a scalar, such as `a table`.
    pub fn found(&self) -> &str {
        &self.found
    }

    /// What was expected: completes the sentence "expected …".
    pub fn expected(&self) -> &'static str {
        self.expected
    }

    /// An example of a valid value.
    pub fn example(&self) -> &'static str {
        self.example
    }
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, such as `{}`, not {}", self.expected, self.example, self.found)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
    }
}

fn unknown_key(key: &str, origin: &Source, nearest: Option<&str>) -> String {
    let place = place(key, origin);
    match nearest {
        Some(nearest) => format!("unknown setting: {place}; did you mean `{nearest}`?"),
        None => format!("unknown setting: {place}; `ryz config show` lists those there are"),
    }
}

/// A name and where it stands. A variable's name is both, and once is enough.
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
