//! Errors in weight files.

/// An error in a weight file or in one of its tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A folder without weights.
    #[error(
        "there is neither {single} nor {index} in this folder; {}",
        .instead.as_deref().unwrap_or("name the folder of a model whose weights are safetensors")
    )]
    NoFiles {
        /// The file name of a small model's weights.
        single: &'static str,
        /// The file name of the index of a large model.
        index: &'static str,
        /// What there is instead, and what to do.
        instead: Option<String>,
    },
    /// An adapter, which changes the weights of a model and would not be applied.
    #[error(
        "this is an adapter of {}, and adapters are not applied; merge the two with `{command}`, or remove this file to run the \
         model without it", .base.as_deref().unwrap_or("a model")
    )]
    Adapter {
        /// The model that the adapter is for, if the file says so.
        base: Option<String>,
        /// A command that writes the merged model to another folder.
        command: String,
    },
    /// An empty file.
    #[error("the file is empty; download it again")]
    Empty,
    /// A file that is shorter than the length field of the header.
    #[error(
        "{bytes} bytes are no safetensors file, whose first 8 are the length of its header; download it again"
    )]
    TooShort {
        /// Size of the file in bytes.
        bytes: usize,
    },
    /// A header that is longer than the format allows.
    #[error(
        "the first 8 bytes claim a header of {claimed} bytes, and no safetensors file has so long a header; download the file again, or \
         convert it to safetensors"
    )]
    HeaderTooLong {
        /// Length of the header according to the file, in bytes.
        claimed: u64,
    },
    /// A header that is longer than the file.
    #[error("the header claims {claimed} bytes and the file ends before: it is truncated; download it again")]
    HeaderTruncated {
        /// Length of the header according to the file, in bytes.
        claimed: u64,
    },
    /// A header that is not a JSON object.
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
        /// First byte, relative to the end of the header.
        start: usize,
        /// End of the range, exclusive.
        end: usize,
    },
    /// A byte range beyond the end of the file.
    #[error(
        "its bytes end at {end} and the file has {data} bytes of data: it is truncated; download it again"
    )]
    DataTruncated {
        /// End of the range, exclusive, relative to the end of the header.
        end: usize,
        /// Number of bytes after the header.
        data: usize,
    },
    /// A byte range whose length does not match type and shape.
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
        /// First byte, relative to the start of the file.
        start: usize,
        /// The end of the preceding tensor.
        expected: usize,
    },
    /// Unused bytes after the last tensor.
    #[error("{bytes} bytes at the end belong to no tensor; the file is corrupt: download it again")]
    TrailingBytes {
        /// Number of bytes.
        bytes: usize,
    },
    /// A file with two tensors of the same name.
    #[error("the header has this name twice; the file is corrupt: download it again")]
    DuplicateName,
    /// Two different tensors of one name of the model.
    #[error(
        "{file} has it too, as `{name}`, and the two differ; remove the file that does not belong to the model, or one of the two \
         tensors"
    )]
    Duplicate {
        /// The name of the other one.
        name: String,
        /// The name of its file.
        file: String,
    },
    /// An index of weights that cannot be parsed.
    #[error("this is no index of weights: {0}; download it again")]
    Index(#[source] serde_json::Error),
    /// An index that names a file outside of its folder.
    #[error("`{name}` is no plain file name; an index may only name files in its own folder")]
    FileName {
        /// The name as written.
        name: String,
    },
    /// An entry of an index that names no file.
    #[error("expected the name of a file in `weight_map`, found {found}; download the index again")]
    IndexEntry {
        /// The value as written.
        found: String,
    },
    /// A file that the index names and the folder does not have.
    #[error(
        "`{name}` is not in this folder, and `weight_map` names it; download it, or the whole model again"
    )]
    NoSuchFile {
        /// The name of the file.
        name: String,
    },
    /// A tensor that is not in the file that the index names, and in none of the others.
    #[error("it is not in `{name}`, where this index says it is; download both again")]
    NotInFile {
        /// The file that the index names.
        name: String,
    },
    /// A tensor that the model needs and no file contains.
    #[error(
        "it is in none of the weight files, and config.json says that the model has it; are both of the same model?{}",
        listed(" Files of this folder that were not read: ", .unread)
    )]
    Missing {
        /// The names of further safetensors files in the folder.
        unread: Vec<String>,
    },
    /// A tensor whose name in the file has a further prefix, as wrappers of models add one.
    #[error(
        "the weights have it as `{found}`; remove the prefix{}",
        .command.as_ref().map(|command| format!(" with `{command}`")).unwrap_or_default()
    )]
    Prefixed {
        /// The name in the file.
        found: String,
        /// A command that removes the prefix from all names of the folder.
        command: Option<String>,
    },
    /// A model without a head.
    #[error(
        "the weights have no head, and `tie_word_embeddings` of config.json is not true: a base model computes no tokens; \
         download the model with its head, or set the key to true if the embedding is the head"
    )]
    NoHead,
    /// A tensor of a type that is not supported.
    #[error("expected type F32, F16 or BF16, found {found}; convert the weights to one of these")]
    DType {
        /// The type as written in the file.
        found: String,
    },
    /// A tensor whose shape is not that of the model.
    #[error("expected shape {expected:?}, found {found:?}; is config.json that of these weights?")]
    Shape {
        /// The shape according to `config.json`.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
}

/// Returns a list of the first names after a text, or nothing if there are none.
fn listed(before: &str, names: &[String]) -> String {
    const SHOWN: usize = 3;
    match names {
        [] => String::new(),
        names if names.len() > SHOWN => format!("{before}{}, …", names[..SHOWN].join(", ")),
        names => format!("{before}{}", names.join(", ")),
    }
}
