//! Text to tokens and back, where the model folder has a `tokenizer.json`.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::model::ModelFileError;

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer {
    file: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a folder; `None` if there is none.
    ///
    /// # Errors
    /// When it cannot be read or is not a tokenizer.
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        let file = directory.join("tokenizer.json");
        let text = match std::fs::read(&file) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&file, e)),
        };
        match tokenizers::Tokenizer::from_bytes(text) {
            Ok(inner) => Ok(Some(Self { file, inner })),
            Err(e) => Err(Error::model(&file, ModelFileError::Tokenizer(e))),
        }
    }

    /// The tokens of a text, with the special tokens that the model expects around it.
    ///
    /// # Errors
    /// When the text has something that the tokenizer cannot express.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, true)
    }

    /// The tokens of a text that has its special tokens already, as that of a [`ChatTemplate`](super::ChatTemplate) does.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        self.encoded(text, false)
    }

    fn encoded(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        match self.inner.encode(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::model(&self.file, ModelFileError::Tokenizer(e))),
        }
    }

    /// The text of some tokens, without special tokens.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|e| Error::model(&self.file, ModelFileError::Tokenizer(e)))
    }
}
