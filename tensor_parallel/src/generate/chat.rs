//! Chat templates: from messages to the text that a model was trained on.

use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use ryzanstein_config::ByteSize;
use ryzanstein_config::file::FileError;
use serde::{Deserialize, Serialize};

/// The name under which the one template is known to the engine.
const NAME: &str = "chat_template";
/// Larger files are no templates.
const LARGEST_FILE: ByteSize = ByteSize::mib(4);

/// One message of a chat.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Message {
    /// Who says it: `system`, `user` or `assistant`, as the template knows them.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }

    /// What the model is told before the user speaks.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }
}

/// Why messages did not become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The folder has no template: the model was not trained for chats.
    #[error(
        "{} has no chat template (`chat_template` in tokenizer_config.json, or chat_template.jinja): the model continues \
         text and does not chat; give the prompt as text", .0.display()
    )]
    NoTemplate(PathBuf),
    /// A file cannot be read.
    #[error("{}: {source}", .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: FileError,
    },
    /// `tokenizer_config.json` is not what it should be.
    #[error("{}: {source}", .file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The template is wrong, or refuses these messages.
    #[error("the chat template of {}: {source}", .file.display())]
    Template {
        /// The file with the template.
        file: PathBuf,
        /// What is wrong.
        source: minijinja::Error,
    },
}

/// The part of `tokenizer_config.json` that templates need.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    bos_token: Option<SpecialToken>,
    eos_token: Option<SpecialToken>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// Old files have a whole object in place of the text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Object { content: String },
}

impl SpecialToken {
    fn text(self) -> String {
        let (Self::Text(text) | Self::Object { content: text }) = self;
        text
    }
}

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    file: PathBuf,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Reads the template of a model folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, of
    /// several the one called `default`.
    ///
    /// # Errors
    /// [`ChatError::NoTemplate`] where there is none; otherwise the file that is wrong.
    pub fn open(folder: &Path) -> Result<Self, ChatError> {
        let config_file = folder.join("tokenizer_config.json");
        let config: TokenizerConfig = match read(&config_file)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|source| ChatError::Config { file: config_file.clone(), source })?,
            None => TokenizerConfig::default(),
        };
        let own_file = folder.join("chat_template.jinja");
        let (file, template) = match (read(&own_file)?, config.chat_template) {
            (Some(text), _) => (own_file, text),
            (None, Some(Templates::One(text))) => (config_file, text),
            (None, Some(Templates::Several(all))) => {
                let mut named = all.into_iter();
                let default = named.find(|one| one.name == "default");
                (config_file, default.ok_or_else(|| ChatError::NoTemplate(folder.into()))?.template)
            }
            (None, None) => return Err(ChatError::NoTemplate(folder.into())),
        };
        let mut environment = Environment::new();
        let broken = |source| ChatError::Template { file: file.clone(), source };
        // As transformers sets up Jinja.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(broken)?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, template).map_err(broken)?;
        let text = |token: Option<SpecialToken>| token.map(SpecialToken::text).unwrap_or_default();
        Ok(Self { environment, file, bos_token: text(config.bos_token), eos_token: text(config.eos_token) })
    }

    /// The prompt for the model's answer to these messages. It has all special tokens as text: encode it with
    /// [`Tokenizer::encode_raw`](super::Tokenizer::encode_raw), which adds none.
    ///
    /// # Errors
    /// [`ChatError::Template`], with the template's own words where it refuses the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String, ChatError> {
        let context = minijinja::context! {
            messages => Serde(messages),
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
        };
        let template = self.environment.get_template(NAME);
        let text = template.and_then(|template| template.render(context));
        text.map_err(|source| ChatError::Template { file: self.file.clone(), source })
    }
}

/// The text of a file; `None` if there is no such file.
fn read(file: &Path) -> Result<Option<String>, ChatError> {
    match ryzanstein_config::file::read_text(file, LARGEST_FILE) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(source) => Err(ChatError::Read { file: file.into(), source }),
    }
}

/// What templates call to refuse messages.
fn raise_exception(text: &str) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, text.to_owned()))
}

/// The date of today; templates of Llama 3 put it into the system message.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    use std::fmt::Write as _;
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("`{format}` is not a format of dates"))
    })?;
    Ok(text)
}

/// JSON as Python writes it: with a space behind commas and colons, and nothing escaped for HTML.
#[expect(clippy::needless_pass_by_value, reason = "the engine hands filters their arguments so")]
fn to_json(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let wrong = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::InvalidOperation, "the value is not JSON").with_source(error)
    };
    let mut text = Vec::new();
    let spaces = " ".repeat(indent.unwrap_or(0));
    if indent.is_some() {
        let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, pretty)).map_err(wrong)?;
    } else {
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)).map_err(wrong)?;
    }
    Ok(Value::from_safe_string(String::from_utf8_lossy(&text).into_owned()))
}

/// On one line, as Python's `json.dumps`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}
