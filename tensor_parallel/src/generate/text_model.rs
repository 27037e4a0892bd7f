//! A model with its tokenizer: from text to text.

use std::path::Path;
use std::sync::Arc;

use ryzanstein_process_group::{DType, ProcessGroup};

use super::{ChatError, ChatTemplate, GenerateOptions, Message, Tokenizer};
use crate::error::{Error, Result};
use crate::model::Llama;

/// One rank's share of a model, with the tokenizer and the chat template of its folder.
#[derive(Debug)]
pub struct TextModel {
    model: Arc<Llama>,
    tokenizer: Tokenizer,
    chat: Result<ChatTemplate, ChatError>,
}

impl TextModel {
    /// Loads a folder; see [`Llama::load`].
    ///
    /// # Errors
    /// As [`Llama::load`], and when the folder has no tokenizer.
    pub fn load(folder: &Path, dtype: Option<DType>, group: &mut ProcessGroup) -> Result<Self> {
        let tokenizer = Tokenizer::open(folder)?.ok_or_else(|| {
            Error::input(format!(
                "{} has no tokenizer.json, so the model knows no text; use `Llama::load` and token ids",
                folder.display()
            ))
        })?;
        let model = Arc::new(Llama::load(folder, dtype, group)?);
        Ok(Self { model, tokenizer, chat: ChatTemplate::open(folder) })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Llama> {
        &self.model
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Its chat template.
    ///
    /// # Errors
    /// Why there is none.
    pub fn chat_template(&self) -> Result<&ChatTemplate, &ChatError> {
        self.chat.as_ref()
    }

    /// The text that follows `prompt`. Every rank passes the same arguments and gets the same text.
    ///
    /// # Errors
    /// As [`Llama::generate`], and when the tokenizer fails.
    pub fn complete(
        &self,
        prompt: &str,
        options: &GenerateOptions,
        group: &mut ProcessGroup,
    ) -> Result<String> {
        self.follow(&self.tokenizer.encode(prompt)?, options, group)
    }

    /// The answer to the messages of a chat. Every rank passes the same arguments and gets the same text.
    ///
    /// # Errors
    /// As [`complete`](Self::complete), and when the model has no chat template or refuses the messages.
    pub fn chat(
        &self,
        messages: &[Message],
        options: &GenerateOptions,
        group: &mut ProcessGroup,
    ) -> Result<String> {
        let template = self.chat.as_ref().map_err(|error| Error::input(error.to_string()))?;
        self.follow(&self.tokenizer.encode_raw(&template.render(messages)?)?, options, group)
    }

    fn follow(&self, prompt: &[u32], options: &GenerateOptions, group: &mut ProcessGroup) -> Result<String> {
        self.tokenizer.decode(&self.model.generate(prompt, options, group)?.tokens)
    }
}
