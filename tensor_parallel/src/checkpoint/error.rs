//! What can be wrong with weight files.

/// What is wrong with a weight file, or with a tensor in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A folder without weights.
    #[error(
        "there is neither {single} nor {index} in this folder; name the folder of a model whose weights are safetensors"
    )]
    NoFiles {
        /// The name of the one file of a small model.
        single: &'static str,
        /// The name of the index of a large one.
        index: &'static str,
    },
    /// A file of no bytes.
    #[error("the file is empty; download it again")]
    Empty,
    /// Fewer bytes than the length of a header takes.
    #[error(
        "{bytes} bytes are no safetensors file, whose first 8 are the length of its header; download it again"
    )]
    TooShort {
        /// Bytes of the file.
        bytes: usize,
    },
    /// A header beyond the limit of the format.
    #[error(
        "the first 8 bytes claim a header of {claimed} bytes, and no safetensors file has so long a header; download the file again, or \
         convert it to safetensors"
    )]
    HeaderTooLong {
        /// Bytes that the file claims for its header.
        claimed: u64,
    },
    /// A header longer than the file.
    #[error("the header claims {claimed} bytes and the file ends before: it is truncated; download it again")]
    HeaderTruncated {
        /// Bytes that the file claims for its header.
        claimed: u64,
    },
    /// A header that is no JSON object.
    #[error("the header is not valid: {0}; download the file again")]
    Header(#[source] serde_json::Error),
    /// A header entry without type, shape or range.
    #[error("the header entry is not valid: {0}; download the file again")]
    HeaderEntry(#[source] serde_json::Error),
    /// A byte range that ends before it starts.
    #[error(
        "its bytes end at {end}, before they start at {start}; the header is corrupt: download the file again"
    )]
    ReversedRange {
        /// First byte, counted from the end of the header.
        start: usize,
        /// The byte after the last.
        end: usize,
    },
    /// A byte range beyond the end of the file.
    #[error(
        "its bytes end at {end} and the file has {data} bytes of data: it is truncated; download it again"
    )]
    DataTruncated {
        /// The byte after the last, counted from the end of the header.
        end: usize,
        /// Bytes behind the header.
        data: usize,
    },
    /// A byte range that is not as long as type and shape say.
    #[error(
        "{dtype} {shape:?} does not fill its {bytes} bytes; the header is corrupt: download the file again"
    )]
    WrongLength {
        /// The type as written in the file.
        dtype: String,
        /// Length of each dimension.
        shape: Vec<usize>,
        /// Length of the byte range.
        bytes: usize,
    },
    /// A gap between tensors, or an overlap.
    #[error(
        "its bytes start at {start} and should start at {expected}, where those before it end; the header is corrupt: download the \
         file again"
    )]
    NotContiguous {
        /// First byte, counted from the start of the file.
        start: usize,
        /// Where the tensor before it ends.
        expected: usize,
    },
    /// Bytes behind the last tensor.
    #[error("{bytes} bytes at the end belong to no tensor; the file is corrupt: download it again")]
    TrailingBytes {
        /// How many.
        bytes: usize,
    },
    /// One file with two tensors of one name.
    #[error("the header has this name twice; the file is corrupt: download it again")]
    DuplicateName,
    /// Two files with a tensor of one name.
    #[error("another file has a tensor of this name too; remove the file that does not belong to the model")]
    Duplicate,
    /// An index of weights that cannot be parsed.
    #[error("this is no index of weights: {0}; download it again")]
    Index(#[source] serde_json::Error),
    /// An index that names a file outside its folder.
    #[error("`{name}` is no plain file name; an index may only name files in its own folder")]
    FileName {
        /// The name as written.
        name: String,
    },
    /// A tensor that is not in the file that the index names.
    #[error("it is not in `{name}`, where this index says it is; download both again")]
    NotInFile {
        /// The file that the index names.
        name: String,
    },
    /// A tensor that the model needs and no file has.
    #[error(
        "it is in none of the weight files, and config.json says that the model has it; are both of the same model?"
    )]
    Missing,
    /// A tensor of a type that is not supported.
    #[error("expected type F32, F16 or BF16, found {found}; convert the weights to one of these")]
    DType {
        /// The type as written in the file.
        found: String,
    },
    /// A tensor of another shape than the model's.
    #[error("expected shape {expected:?}, found {found:?}; is config.json that of these weights?")]
    Shape {
        /// What `config.json` leads to.
        expected: Vec<usize>,
        /// What the file has.
        found: Vec<usize>,
    },
}
