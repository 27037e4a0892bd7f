//! What is wrong with a chat template.

use std::path::PathBuf;
use std::sync::Arc;

/// Why there is no prompt for some messages.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The folder has no template: the model was not trained for chats.
    #[error(
        "{} has no chat template (`chat_template` in tokenizer_config.json, or chat_template.jinja): the model continues \
         text and does not chat; give the prompt as text", .0.display()
    )]
    NoTemplate(PathBuf),
    /// The folder has several templates, and none is the default.
    #[error(
        "{}: `chat_template` has several templates ({}) and none is called `default`; put the one to use into \
         chat_template.jinja in the same folder", .file.display(), .names.join(", ")
    )]
    NoDefault {
        /// The file with the templates.
        file: PathBuf,
        /// Their names.
        names: Vec<String>,
    },
    /// `tokenizer_config.json` is not what it should be.
    #[error("{}: {source}", .file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: Arc<serde_json::Error>,
    },
    /// The template is wrong, or refuses these messages.
    #[error("the chat template of {}: {source}", .file.display())]
    Template {
        /// The file with the template.
        file: PathBuf,
        /// What is wrong.
        source: Arc<minijinja::Error>,
    },
}
