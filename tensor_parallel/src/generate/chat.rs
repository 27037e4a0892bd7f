//! Chat templates, which render messages to the prompt format that a model was trained on.

mod python;
mod source;
mod special_tokens;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use chrono::format::{Fixed, Item, Numeric, StrftimeItems};
use chrono::{FixedOffset, Local, TimeZone as _};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use ryzanstein_config::ByteSize;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use self::python::invalid;
use self::special_tokens::SpecialTokens;
pub(super) use self::special_tokens::added as added_tokens;
use super::chat_error::ChatError;
use super::panics::caught;
use crate::digest::digest;
use crate::error::{Error, Result};
use crate::python_json;

/// The name of the template in the template engine.
const NAME: &str = "chat_template";
/// The name of the template for chats without tools.
const DEFAULT: &str = "default";
/// The folder of further templates.
const ADDITIONAL: &str = "additional_chat_templates";
/// The maximum size of a file with a template or special tokens; `tokenizer.json` is the largest.
const LARGEST_FILE: ByteSize = ByteSize::mib(64);
/// The maximum size of a template.
const LARGEST_TEMPLATE: ByteSize = ByteSize::mib(4);
/// The maximum size of a prompt.
const LARGEST_PROMPT: ByteSize = ByteSize::mib(256);
/// Number of characters of a template's message that are shown.
const LONGEST_REASON: usize = 1000;
/// Number of steps that a template may take, and those for each byte of the messages in addition.
const STEPS: u64 = 20_000_000;
const STEPS_PER_BYTE: u64 = 100;
/// Stack of the thread that parses and renders a template, for the deepest nesting that the parser accepts.
const STACK: ByteSize = ByteSize::mib(64);

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
        let items = StrftimeItems::new(format).map(|item| match item {
            // The time of transformers has no zone.
            Item::Fixed(Fixed::TimezoneName | Fixed::TimezoneOffset | Fixed::TimezoneOffsetColon) => {
                Item::Literal("")
            }
            // This time has whole seconds, and that of Python microseconds.
            Item::Numeric(Numeric::Nanosecond, _) => Item::Literal("000000"),
            item => item,
        });
        let mut text = String::new();
        match time.map(|time| write!(text, "{}", time.format_with_items(items))) {
            Some(Ok(())) => Ok(text),
            Some(Err(_)) => Err(invalid(format!("`{format}` is not a format of dates"))),
            None => Err(invalid(format!("{self:?} is not a time"))),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "`chat_template`: expected a string, or a list of {name, template}; mend it, or save the template as \
                 chat_template.jinja in the same folder"
)]
enum Templates {
    One(String),
    Several(Vec<NamedTemplate>),
    ByName(BTreeMap<String, String>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// The chat template of a model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatTemplate {
    file: PathBuf,
    source: String,
    special_tokens: SpecialTokens,
}

impl ChatTemplate {
    /// Reads the template of a model folder, as transformers chooses it without tools: of several templates, the one with the
    /// name `default`. `chat_template.jinja`, which has this name, and those in `additional_chat_templates` replace all of
    /// `tokenizer_config.json`. Also reads the special tokens that a template may use.
    ///
    /// # Errors
    /// Returns [`ChatError::NoTemplate`] if there is none; otherwise an error that names the file that is invalid or cannot be
    /// read.
    pub fn open(folder: &Path) -> Result<Self> {
        let config_file = folder.join("tokenizer_config.json");
        let mut config: Map<_, _> = read_json(&config_file)?.unwrap_or_default();
        let templates = config.remove("chat_template").filter(|value| !value.is_null());
        let own_files = own_files(folder)?;
        let (file, source) = if !own_files.is_empty() {
            let file = default_of(own_files, &folder.join(ADDITIONAL))?;
            let text = ryzanstein_config::file::read_text(&file, LARGEST_TEMPLATE);
            let text = text.map_err(|error| Error::file(&file, error))?;
            (file, text)
        } else if let Some(templates) = templates {
            let templates = serde_json::from_value(templates);
            let templates = templates
                .map_err(|source| ChatError::Config { file: config_file.clone(), source: source.into() })?;
            let template = match templates {
                Templates::One(template) => template,
                Templates::Several(all) => {
                    let all = all.into_iter().map(|one| (one.name, one.template)).collect();
                    default_of(all, &config_file)?
                }
                Templates::ByName(all) => default_of(all, &config_file)?,
            };
            (config_file, template)
        } else {
            return Err(ChatError::NoTemplate(folder.into()).into());
        };
        let special_tokens = special_tokens::collect(folder, config)?;
        Ok(Self { file, source, special_tokens })
    }

    /// Returns the file that the template was read from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Renders the prompt for the model's answer to messages. It contains all special tokens as text: encode it with
    /// [`Tokenizer::encode_raw`](super::Tokenizer::encode_raw), which adds none.
    ///
    /// A template is a program. Its time, its nesting and the prompt are limited here, but not the memory for its variables:
    /// render the template of a model that you do not trust in a process with a limit, as `ryz generate` does. For this, a
    /// template can be serialized.
    ///
    /// # Errors
    /// Returns [`ChatError::Template`], with the message of the template if it rejects the messages.
    pub fn render(&self, messages: &[Message], now: ChatTime) -> Result<String, ChatError> {
        let size = messages.iter().map(|message| (message.role.len() + message.content.len()) as u64).sum();
        self.render_values(Value::from(Serde(messages)), Value::from(()), size, now)
    }

    /// Renders messages of `size` bytes, with tools.
    fn render_values(
        &self,
        messages: Value,
        tools: Value,
        size: u64,
        now: ChatTime,
    ) -> Result<String, ChatError> {
        let text = std::thread::scope(|scope| {
            let work = || caught(|| self.render_here(messages, tools, size, now));
            let thread = std::thread::Builder::new().stack_size(STACK.get() as usize);
            let thread = thread.name(NAME.into()).spawn_scoped(scope, work);
            let thread = thread.map_err(|error| format!("cannot start a thread to render it: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("its thread panicked".into()))?
        });
        text.map_err(|reason| {
            let reason = match reason.char_indices().nth(LONGEST_REASON) {
                Some((end, _)) => format!("{}…", &reason[..end]),
                None => reason,
            };
            ChatError::Template { file: self.file.clone(), reason }
        })
    }

    fn render_here(&self, messages: Value, tools: Value, size: u64, now: ChatTime) -> Result<String, String> {
        // The same variables as transformers sets.
        let context = minijinja::context! {
            messages,
            tools,
            documents => (),
            add_generation_prompt => true,
            strftime_now => Value::from_function(move |format: &str| now.text(format)),
            ..Value::from_pairs(self.special_tokens.iter().map(|(name, token)| (name.as_str(), token.as_str())))
        };
        let steps = STEPS.saturating_add(size.saturating_mul(STEPS_PER_BYTE));
        let mut prompt = Prompt(Vec::new());
        let rendered = environment(source::rewrite(&self.source)?).and_then(|mut environment| {
            environment.set_fuel(Some(steps));
            environment.get_template(NAME)?.render_captured_to(context, &mut prompt).map(drop)
        });
        match rendered {
            Ok(()) => String::from_utf8(prompt.0).map_err(|error| error.to_string()),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => {
                Err(format!("it takes more than {steps} steps, so it may have a loop that does not end"))
            }
            Err(error) if prompt.0.len() as u64 > LARGEST_PROMPT.get() => {
                Err(format!("the prompt is larger than {LARGEST_PROMPT} ({error})"))
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns a hash of the template, whatever file it was read from.
    pub(crate) fn digest(&self) -> u64 {
        let tokens = self.special_tokens.iter().flat_map(|(name, token)| ["\0", name, "\0", token]);
        digest(std::iter::once(self.source.as_str()).chain(tokens).flat_map(str::bytes))
    }
}

/// The prompt up to its limit.
struct Prompt(Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() as u64 > LARGEST_PROMPT.get() {
            return Err(io::Error::other("no more is written"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the files with a template of their own, by the template's name.
fn own_files(folder: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    let single = folder.join("chat_template.jinja");
    if single.symlink_metadata().is_ok() {
        files.insert(DEFAULT.into(), single);
    }
    let folder = folder.join(ADDITIONAL);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries.collect::<io::Result<Vec<_>>>(),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(vec![])
        }
        Err(error) => Err(error),
    };
    for entry in entries.map_err(|error| Error::file(&folder, error))? {
        let (name, path) = (entry.file_name(), entry.path());
        if let Some(name) =
            name.to_str().and_then(|name| name.strip_suffix(".jinja")).filter(|_| path.is_file())
        {
            files.insert(name.into(), path);
        }
    }
    Ok(files)
}

/// Returns the template with the name `default`.
fn default_of<T>(mut templates: BTreeMap<String, T>, file: &Path) -> Result<T, ChatError> {
    templates.remove(DEFAULT).ok_or_else(|| {
        let names = templates.into_keys().collect();
        ChatError::NoDefault { file: file.into(), names }
    })
}

/// Creates a Jinja environment with the same settings as transformers.
fn environment(template: String) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    python::add_to(&mut environment);
    environment.add_template_owned(NAME, template)?;
    Ok(environment)
}

/// Reads the text of a file. Returns `None` if there is no such file.
fn read(file: &Path, limit: ByteSize) -> Result<Option<String>> {
    Error::unless_missing(file, ryzanstein_config::file::read_text(file, limit))
}

/// Reads a JSON file. Returns `None` if there is no such file.
pub(super) fn read_json<T: DeserializeOwned>(file: &Path) -> Result<Option<T>> {
    let parse = |text: String| {
        python_json::parse(&text)
            .map_err(|source| ChatError::Config { file: file.into(), source: source.into() }.into())
    };
    read(file, LARGEST_FILE)?.map(parse).transpose()
}

#[cfg(test)]
mod tests;
