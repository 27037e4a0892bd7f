//! Chat templates, which render messages to the prompt format that a model was trained on.

use std::path::{Path, PathBuf};

use chrono::{FixedOffset, Local, TimeZone as _};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value};
use ryzanstein_config::ByteSize;
use serde::{Deserialize, Serialize};

use super::chat_error::ChatError;
use super::python_json;
use crate::digest::digest;
use crate::error::{Error, Result};

/// The name of the template in the template engine.
const NAME: &str = "chat_template";
/// The maximum size of a template file.
const LARGEST_FILE: ByteSize = ByteSize::mib(4);

/// One message of a chat.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Message {
    /// The role of the author, usually `system`, `user` or `assistant`. The template defines the roles.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// Creates a message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }

    /// Creates a system message, which comes first.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }
}

/// The time that a template may insert into the prompt: templates of Llama 3 include the date.
///
/// Ranks have their own clocks and time zones, but must render the same prompt: broadcast the time of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChatTime {
    /// Seconds since 1970-01-01 00:00 UTC.
    seconds: i64,
    /// Offset of local time from UTC in seconds.
    offset: i32,
}

impl ChatTime {
    /// Returns the current time in the time zone of this process.
    pub fn now() -> Self {
        let now = Local::now();
        Self { seconds: now.timestamp(), offset: now.offset().local_minus_utc() }
    }

    /// Formats the date. Templates call this function.
    fn text(self, format: &str) -> Result<String, minijinja::Error> {
        use std::fmt::Write as _;
        let zone = FixedOffset::east_opt(self.offset);
        let time = zone.and_then(|zone| zone.timestamp_opt(self.seconds, 0).single());
        let mut text = String::new();
        match time.map(|time| write!(text, "{}", time.format(format))) {
            Some(Ok(())) => Ok(text),
            Some(Err(_)) => Err(invalid(format!("`{format}` is not a format of dates"))),
            None => Err(invalid(format!("{self:?} is not a time"))),
        }
    }
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

/// A token as text, or as an object in old files.
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
    digest: u64,
}

impl ChatTemplate {
    /// Reads the template of a model folder: `chat_template.jinja`, otherwise `chat_template` of `tokenizer_config.json`; of
    /// several templates, the one with the name `default`.
    ///
    /// # Errors
    /// Returns [`ChatError::NoTemplate`] if there is none; otherwise an error that names the file that is invalid or cannot be
    /// read.
    pub fn open(folder: &Path) -> Result<Self> {
        let config_file = folder.join("tokenizer_config.json");
        let config: TokenizerConfig = match read(&config_file)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|source| ChatError::Config { file: config_file.clone(), source: source.into() })?,
            None => TokenizerConfig::default(),
        };
        let own_file = folder.join("chat_template.jinja");
        let (file, template) = match (read(&own_file)?, config.chat_template) {
            (Some(text), _) => (own_file, text),
            (None, Some(Templates::One(text))) => (config_file, text),
            (None, Some(Templates::Several(all))) => {
                let template = default_of(all, &config_file)?;
                (config_file, template)
            }
            (None, None) => return Err(ChatError::NoTemplate(folder.into()).into()),
        };
        let text = |token: Option<SpecialToken>| token.map(SpecialToken::text).unwrap_or_default();
        let (bos_token, eos_token) = (text(config.bos_token), text(config.eos_token));
        let digest = digest([&template, "\0", &bos_token, "\0", &eos_token].concat().into_bytes());
        let environment = environment(template)
            .map_err(|source| ChatError::Template { file: file.clone(), source: source.into() })?;
        Ok(Self { environment, file, bos_token, eos_token, digest })
    }

    /// Renders the prompt for the model's answer to messages. It contains all special tokens as text: encode it with
    /// [`Tokenizer::encode_raw`](super::Tokenizer::encode_raw), which adds none.
    ///
    /// # Errors
    /// Returns [`ChatError::Template`], with the message of the template if it rejects the messages.
    pub fn render(&self, messages: &[Message], now: ChatTime) -> Result<String, ChatError> {
        // The same variables as transformers sets for a chat without tools and documents.
        let context = minijinja::context! {
            messages => Serde(messages),
            tools => (),
            documents => (),
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            strftime_now => Value::from_function(move |format: &str| now.text(format)),
        };
        let template = self.environment.get_template(NAME);
        let text = template.and_then(|template| template.render(context));
        text.map_err(|source| ChatError::Template { file: self.file.clone(), source: source.into() })
    }

    /// Returns a hash of the template, whatever file it was read from.
    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }
}

/// Returns the template with the name `default`.
fn default_of(templates: Vec<NamedTemplate>, file: &Path) -> Result<String, ChatError> {
    let names = templates.iter().map(|one| one.name.clone()).collect();
    let default = templates.into_iter().find(|one| one.name == "default");
    Ok(default.ok_or_else(|| ChatError::NoDefault { file: file.into(), names })?.template)
}

/// Creates a Jinja environment with the same settings as transformers.
fn environment(template: String) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_filter("tojson", to_json);
    environment.add_template_owned(NAME, template)?;
    Ok(environment)
}

/// Reads the text of a file. Returns `None` if there is no such file.
fn read(file: &Path) -> Result<Option<String>> {
    match ryzanstein_config::file::read_text(file, LARGEST_FILE) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(Error::file(file, error)),
    }
}

fn invalid(text: impl Into<String>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, text.into())
}

/// Returns an error with this text. Templates call this function to reject messages.
fn raise_exception(text: &str) -> Result<Value, minijinja::Error> {
    Err(invalid(text))
}

/// Serializes to JSON with the options of transformers' `tojson`.
#[expect(clippy::needless_pass_by_value, reason = "the engine hands filters their arguments so")]
fn to_json(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let separators = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("`separators` of tojson must be two texts")),
    };
    let style = python_json::Style { indent, separators, ensure_ascii: ensure_ascii.unwrap_or(false) };
    let text = if sort_keys == Some(true) {
        serde_json::to_value(&value).and_then(|value| python_json::text(&python_json::sorted(value), style))
    } else {
        python_json::text(&value, style)
    };
    let text = text.map_err(|error| invalid("the value is not JSON").with_source(error))?;
    Ok(Value::from_safe_string(text))
}

#[cfg(test)]
mod tests;
