//! What can be wrong with a configuration, told to the person who wrote it.

use crate::Source;
use std::fmt;
use std::path::PathBuf;

/// Why a configuration was refused. Always the fault of whoever wrote it, never of the cluster.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file that was named, or that is there, could not be read.
    #[error("cannot read the configuration file {}: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        cause: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not well-formed TOML: {message}", path.display())]
    IllFormed {
        /// The file.
        path: PathBuf,
        /// The parser's message; it quotes the line.
        message: String,
    },
    /// A name that no setting has.
    #[error("{}", unknown_key(key, origin, nearest.as_deref()))]
    UnknownKey {
        /// The name as the user wrote it: a dotted key or the name of an environment variable.
        key: String,
        /// Where it was written.
        origin: Source,
        /// The known name nearest to it, in the same form, if one is near.
        nearest: Option<String>,
    },
    /// The name of a section where the name of a setting was needed.
    #[error("`{key}` ({origin}) is a section, not a setting; the settings in it are {members}")]
    Section {
        /// The section, as the user wrote it.
        key: String,
        /// Where it was written.
        origin: Source,
        /// Its settings, in the form in which this source spells them.
        members: String,
    },
    /// A value that the setting cannot take.
    #[error("`{key}` ({origin}): {cause}")]
    BadValue {
        /// The dotted key.
        key: String,
        /// Where the value was written.
        origin: Source,
        /// The value, and what was expected in its place.
        #[source]
        cause: Box<ValueError>,
    },
    /// Two values, each right by itself, that cannot both hold.
    #[error("{0}")]
    Conflict(String),
    /// More than one of the above: everything found in one pass, in the order of the layers.
    #[error("{} problems in the configuration:{}", .0.len(), list(.0))]
    Several(Vec<ConfigError>),
}

impl ConfigError {
    /// Every problem by itself: one, unless this is [`ConfigError::Several`].
    pub fn problems(&self) -> &[ConfigError] {
        match self {
            Self::Several(problems) => problems,
            one => std::slice::from_ref(one),
        }
    }
}

/// A text that is not a value of the wanted kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ValueError {
    pub(crate) found: String,
    pub(crate) expected: &'static str,
    pub(crate) example: &'static str,
    pub(crate) why: Option<String>,
}

impl ValueError {
    /// The offending value, quoted; or words for one that is no text, such as `a table`.
    pub fn found(&self) -> &str {
        &self.found
    }

    /// What was expected, to finish the sentence "expected …".
    pub fn expected(&self) -> &'static str {
        self.expected
    }

    /// A value that would do.
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
    // The variable's name is both the key and the place: once is enough.
    let what = match origin {
        Source::Environment(_) => format!("unknown setting: environment variable `{key}`"),
        _ => format!("unknown setting `{key}` ({origin})"),
    };
    match nearest {
        Some(nearest) => format!("{what}; did you mean `{nearest}`?"),
        None => format!("{what}; `ryz config show` lists those there are"),
    }
}

fn list(problems: &[ConfigError]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| problem.to_string().replace('\n', "\n    ")).collect();
    format!("\n  - {}", lines.join("\n  - "))
}
