//! Errors in chat templates.

use std::path::PathBuf;
use std::sync::Arc;

/// An error of rendering messages to a prompt.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The folder has no template, because the model was not trained for chats.
    #[error(
        "{} has no chat template (`chat_template` in tokenizer_config.json, or chat_template.jinja): the model continues \
         text and does not chat; give the prompt as text", .0.display()
    )]
    NoTemplate(PathBuf),
    /// The folder has several templates, and none is the default.
    #[error(
        "{}: of its chat templates ({}) none is called `default`; save the one to use as chat_template.jinja in the folder \
         of the model", .file.display(), .names.join(", ")
    )]
    NoDefault {
        /// The file or folder with the templates.
        file: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
    /// A file with the template or with special tokens does not have the expected structure.
    #[error("{}: {source}", .file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// The parser's error.
        source: Arc<serde_json::Error>,
    },
    /// The template is invalid, rejects these messages or exceeds a limit.
    #[error("the chat template of {}: {reason}", .file.display())]
    Template {
        /// The file with the template.
        file: PathBuf,
        /// The message of the template or of the template engine, or the limit.
        reason: String,
    },
}
