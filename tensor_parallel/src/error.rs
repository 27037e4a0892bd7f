//! Errors that say whose fault it was.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ryzanstein_process_group as process_group;

use crate::float::UnsupportedDType;
use crate::tensor::Tensor;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was asked for does not fit the model: a world size, a length, a type.
    #[error("configuration: {0}")]
    Configuration(String),

    /// A file of the model folder says something that this crate does not support, or nonsense.
    #[error("{}: {reason}", .file.display())]
    Model {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A weight file is damaged, incomplete, or does not fit its `config.json`.
    #[error("{}: {}{reason}", .file.display(), .tensor.as_ref().map(|t| format!("tensor `{t}`: ")).unwrap_or_default())]
    Checkpoint {
        /// The file.
        file: PathBuf,
        /// The tensor, where it is about one.
        tensor: Option<String>,
        /// What is wrong.
        reason: String,
    },

    /// The operating system would not let a file be read.
    #[error("{}: {source}", .file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What it said.
        source: std::io::Error,
    },

    /// The caller passed what no model can take: a token that is not in the vocabulary, a tensor of another shape.
    #[error("invalid input: {0}")]
    Input(String),

    /// The caller asked for a tensor of a type that tensors do not have.
    #[error(transparent)]
    DType(#[from] UnsupportedDType),

    /// Another rank could not do its part.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// Which one, as a global rank.
        rank: process_group::Rank,
        /// Its own error.
        reason: String,
    },

    /// This rank's GPU, or a library of it, refused something.
    #[error(transparent)]
    Device(#[from] process_group::device::DeviceError),

    /// The process group failed.
    #[error(transparent)]
    Group(#[from] process_group::Error),
}

impl Error {
    /// Whether another try with the same settings and files would fail alike, so that there is no point in it: what was
    /// asked for cannot be, or the model's files are not there, damaged or of a kind that is not supported.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Configuration(_)
            | Self::Input(_)
            | Self::DType(_)
            | Self::Model { .. }
            | Self::Checkpoint { .. } => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                ErrorKind::NotFound
                    | ErrorKind::NotADirectory
                    | ErrorKind::IsADirectory
                    | ErrorKind::PermissionDenied
            ),
            // The rank that could not do its part says it for all.
            Self::Peer { .. } | Self::Device(_) => false,
            Self::Group(error) => error.is_permanent(),
        }
    }

    pub(crate) fn configuration(reason: impl Into<String>) -> Self {
        Self::Configuration(reason.into())
    }

    pub(crate) fn model(file: &Path, reason: impl Into<String>) -> Self {
        Self::Model { file: file.into(), reason: reason.into() }
    }

    pub(crate) fn checkpoint(file: &Path, tensor: Option<&str>, reason: impl Into<String>) -> Self {
        Self::Checkpoint { file: file.into(), tensor: tensor.map(Into::into), reason: reason.into() }
    }

    pub(crate) fn io(file: &Path, source: std::io::Error) -> Self {
        Self::Io { file: file.into(), source }
    }

    pub(crate) fn input(reason: impl Into<String>) -> Self {
        Self::Input(reason.into())
    }

    pub(crate) fn shape_mismatch(operation: &str, a: &Tensor, b: &Tensor) -> Self {
        let describe = |t: &Tensor| format!("{:?} of {}", t.shape(), t.dtype());
        Self::Input(format!("{operation}: {} and {} do not fit", describe(a), describe(b)))
    }
}
