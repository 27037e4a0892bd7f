//! Errors, classified by cause.

use std::fmt;
use std::path::{Path, PathBuf};

use ryzanstein_config::FileError;
use ryzanstein_process_group::{self as process_group, DType, Rank};
use serde::{Deserialize, Serialize};

use crate::compute::PAGE_SIZE;
use crate::float::UnsupportedDType;
use crate::generate::chat_error::ChatError;
use crate::model::Stage;
use crate::shard::ShardError;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting does not fit the model, the layer or this host.
    #[error("configuration: {0}")]
    Configuration(#[from] ConfigurationError),

    /// A file of the model folder is invalid, or requires something that this crate does not support.
    #[error("{}: {reason}", .file.display())]
    Model {
        /// The file.
        file: PathBuf,
        /// The error in the file, and what to do.
        reason: String,
    },

    /// A weight file is damaged, incomplete, or does not fit its `config.json`.
    #[error("{}: {}{reason}", .file.display(), .tensor.as_ref().map(|t| format!("tensor `{t}`: ")).unwrap_or_default())]
    Checkpoint {
        /// The file.
        file: PathBuf,
        /// The tensor, if the error concerns one.
        tensor: Option<String>,
        /// The error in the file, and what to do.
        reason: String,
    },

    /// A file cannot be read: the operating system returned an error, it is not a regular file, or it is too large.
    #[error("{}: {source}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The error of reading it.
        source: FileError,
    },

    /// The chat template did not render messages to a prompt.
    #[error(transparent)]
    Chat(#[from] ChatError),

    /// A request is not possible with this model, cache or decoder. Another request may succeed.
    #[error("invalid input: {0}")]
    Request(#[from] RequestError),

    /// The caller passed tensors or values that do not fit an operation.
    #[error("invalid input: {0}")]
    Input(String),

    /// The caller requested a tensor of an unsupported type.
    #[error(transparent)]
    DType(#[from] UnsupportedDType),

    /// Another rank failed.
    #[error("rank {rank} failed: {source}")]
    Peer {
        /// The global rank of the failed one.
        rank: Rank,
        /// The error of that rank.
        source: RemoteError,
    },

    /// The GPU of this rank, or a library for it, failed.
    #[error(transparent)]
    Device(#[from] process_group::device::DeviceError),

    /// The process group failed.
    #[error(transparent)]
    Group(#[from] process_group::Error),

    /// The engine's own [`Communicator`](crate::Communicator) failed.
    #[error("communicator: {0}")]
    Communicator(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Prints the message, so that `fn main() -> Result<(), Error>` shows it in full.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A setting that does not fit.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigurationError {
    /// A layer that cannot be sharded over this number of ranks.
    #[error(transparent)]
    Sharding(#[from] ShardError),
    /// A model that cannot be sharded over this number of ranks.
    #[error("{source}; legal sizes for this model: {}", list(.legal))]
    WorldSize {
        /// The dimension that does not fit.
        source: ShardError,
        /// World sizes that the model can run on.
        legal: Vec<usize>,
    },
    /// More pipeline stages than layers.
    #[error(
        "a pipeline of {stages} stages does not fit the {layers} layers of this model (`num_hidden_layers`): each stage needs \
         one; set layout.pipeline_parallel to at most {layers}"
    )]
    Stages {
        /// Number of stages.
        stages: usize,
        /// Number of layers.
        layers: usize,
    },
    /// A call with groups other than those that the model was loaded with.
    #[error(
        "this rank holds {loaded} and is called as {called}; pass the groups that the model was loaded with"
    )]
    OtherStage {
        /// The stage that was loaded.
        loaded: Stage,
        /// The stage according to the groups of the call.
        called: Stage,
    },
    /// A call with a tensor-parallel group other than the one that the weights were loaded for.
    #[error(
        "this rank holds shard {rank} of {world_size} and is called with a group in which it is rank {called_rank} of \
         {called_world_size}; pass the group that the weights were loaded for"
    )]
    OtherGroup {
        /// The rank that the shard is of.
        rank: usize,
        /// Number of shards.
        world_size: usize,
        /// This rank in the group of the call.
        called_rank: usize,
        /// Number of ranks of the group of the call.
        called_world_size: usize,
    },
    /// An array that is larger than the memory of this host.
    #[error(
        "this host has no memory for an array of shape {shape:?} in {dtype}; give it fewer positions (a smaller \
         --max-new-tokens), or share the model among more ranks"
    )]
    NoMemory {
        /// Length of each dimension.
        shape: Vec<usize>,
        /// The element type.
        dtype: DType,
    },
    /// A temperature that is not a valid divisor.
    #[error("temperature {0} must be positive")]
    Temperature(f64),
    /// A `top_p` that is out of range.
    #[error("top-p {0} must be above 0 and at most 1")]
    TopP(f64),
    /// A repetition penalty that is not a valid divisor.
    #[error("repetition penalty {0} must be positive and finite; 1 is none")]
    RepetitionPenalty(f32),
    /// A presence or frequency penalty that is out of range.
    #[error("{name} penalty {value} must be from -2 to 2; 0 is none")]
    Penalty {
        /// The name of the penalty.
        name: &'static str,
        /// Its value.
        value: f32,
    },
    /// A bias that the sum over ranks would contain once per rank.
    #[error(
        "`{layer}` has a bias and its results are not reduced; load it without a bias, and add the bias once, after the sum"
    )]
    UnreducedBias {
        /// The layer.
        layer: String,
    },
    /// A root rank without a model folder.
    #[error("the root was given no model folder; pass the folder on the root")]
    NoFolder,
    /// Invariant numerics in arithmetic that adds in other orders.
    #[error(
        "this arithmetic does not add sums as the tree of model.numerics = invariant; set it to fast, or compute with \
         `Host::with_numerics` or `Cuda::with_numerics`"
    )]
    FastOnly,
    /// Ranks that compute in different ways, so that sums differ in their last bits.
    #[error(
        "rank {rank} computes with {theirs} and rank {other} with {mine}; all must use the same: set `model.numerics` alike; on CPUs, \
         set `model.instruction_set` to one that `ryz doctor` lists on every host; on GPUs, use GPUs of one compute capability"
    )]
    DifferentArithmetic {
        /// One rank.
        rank: Rank,
        /// Its numerics, and its instruction set or compute capability.
        theirs: String,
        /// Another rank.
        other: Rank,
        /// Those of that one.
        mine: String,
    },
    /// Ranks that opened different models.
    #[error(
        "rank {rank} has another model, tokenizer, chat template or type than rank {other}; all must load the same folder"
    )]
    DifferentModels {
        /// One rank.
        rank: Rank,
        /// Another rank.
        other: Rank,
    },
}

/// An error in a request for tokens or logits.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A request without tokens.
    #[error("there are no tokens; pass at least one")]
    NoTokens,
    /// A decode pass without sequences.
    #[error("no sequence gets a token; pass at least one")]
    NoSequences,
    /// A token that is not in the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// The number of a sequence that the cache does not have.
    #[error("there is no sequence {sequence}: the KV cache is for {sequences}, which count from 0")]
    UnknownSequence {
        /// The sequence.
        sequence: usize,
        /// Number of sequences of the cache.
        sequences: usize,
    },
    /// A sequence that occurs twice in one pass.
    #[error("sequence {sequence} is given twice in one pass; give it once, with all its tokens")]
    RepeatedSequence {
        /// The sequence.
        sequence: usize,
    },
    /// A sequence that is to get a chosen token, but the previous pass chose none for it.
    #[error("the previous pass chose no token for sequence {sequence}; pass its tokens")]
    NothingChosen {
        /// The sequence.
        sequence: usize,
    },
    /// A fork of more positions than a sequence has cached.
    #[error("cannot fork the first {length} positions of sequence {sequence}: it holds {held}")]
    ShortSequence {
        /// The sequence.
        sequence: usize,
        /// Number of requested positions.
        length: usize,
        /// Number of cached positions.
        held: usize,
    },
    /// More positions than a sequence has room for.
    #[error(
        "{more} more positions do not fit sequence {sequence} of the KV cache, which holds {length} of {capacity}"
    )]
    CacheFull {
        /// The sequence.
        sequence: usize,
        /// Number of requested positions.
        more: usize,
        /// Number of cached positions.
        length: usize,
        /// Capacity of the sequence in positions.
        capacity: usize,
    },
    /// More tokens than the cache has pages for.
    #[error(
        "this pass needs {needed} free page{} of {PAGE_SIZE} positions, and of the {pages} of the KV cache {free} are free; clear or \
         truncate a sequence, pass fewer tokens, or make a cache with more pages",
        if *.needed == 1 { "" } else { "s" }
    )]
    NoFreePages {
        /// Number of pages that the pass needs.
        needed: usize,
        /// Number of pages that no sequence holds.
        free: usize,
        /// Number of pages of the cache.
        pages: usize,
    },
    /// A sequence that is longer than the model supports.
    #[error(
        "{positions} positions are more than the {max_positions} of `max_position_embeddings` and rope scaling"
    )]
    TooLong {
        /// Number of requested positions.
        positions: usize,
        /// The maximum sequence length of the model.
        max_positions: usize,
    },
    /// A request that differs between ranks.
    #[error(
        "rank{} {} passed {what} other than rank {first}'s; pass the same on every rank",
        if .ranks.len() == 1 { "" } else { "s" }, list(.ranks)
    )]
    Different {
        /// The part that differs: a prompt, or options.
        what: &'static str,
        /// The first rank of the group.
        first: Rank,
        /// The ranks whose request differs.
        ranks: Vec<Rank>,
    },
}

fn list<T: ToString>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The error of another rank as text, because the error itself cannot leave its process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct RemoteError(String);

impl From<&Error> for RemoteError {
    fn from(error: &Error) -> Self {
        Self(error.to_string())
    }
}

impl From<ShardError> for Error {
    fn from(error: ShardError) -> Self {
        Self::Configuration(error.into())
    }
}

impl Error {
    /// Returns true if another attempt with the same settings and files would fail in the same way: settings do not fit, or the
    /// model's files are missing, damaged or not supported.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Configuration(_)
            | Self::Request(_)
            | Self::Input(_)
            | Self::DType(_)
            | Self::Chat(_)
            | Self::Model { .. }
            | Self::Checkpoint { .. } => true,
            Self::File { source, .. } => source.is_permanent(),
            // The rank that failed reports whether the error is permanent.
            Self::Peer { .. } | Self::Device(_) | Self::Communicator(_) => false,
            Self::Group(error) => error.is_permanent(),
        }
    }

    pub(crate) fn model(file: &Path, reason: impl Into<String>) -> Self {
        Self::Model { file: file.into(), reason: reason.into() }
    }

    pub(crate) fn checkpoint(file: &Path, tensor: Option<&str>, reason: impl Into<String>) -> Self {
        Self::Checkpoint { file: file.into(), tensor: tensor.map(Into::into), reason: reason.into() }
    }

    /// Returns what was read from a file, or `None` if there is no such file.
    pub(crate) fn unless_missing<T>(file: &Path, read: Result<T, FileError>) -> Result<Option<T>> {
        match read {
            Err(error) if error.is_not_found() => Ok(None),
            read => read.map(Some).map_err(|error| Self::file(file, error)),
        }
    }

    pub(crate) fn file(file: &Path, source: impl Into<FileError>) -> Self {
        Self::File { file: file.into(), source: source.into() }
    }

    pub(crate) fn input(reason: impl Into<String>) -> Self {
        Self::Input(reason.into())
    }
}
