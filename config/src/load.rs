//! Merges the layers: defaults < file < environment < flags.

use crate::error::toml_error;
use crate::keys::{KeyInfo, environment_variable, keys, nearest};
use crate::{ByteSize, Config, ConfigError, SECTIONS, Source, file};
use figment::providers::{Format, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use std::path::{Path, PathBuf};

/// Variables that begin with `RYZ_` but are not settings: those that a launcher passes to its ranks, and the path of the file.
pub const RESERVED_ENVIRONMENT: [&str; 6] =
    ["RYZ_RENDEZVOUS", "RYZ_EPOCH", "RYZ_SECRET_FD", "RYZ_SECRET_FILE", "RYZ_CONFIG", "RYZ_DIRECT"];

/// Limit of the file's size, far more than all settings with comments need.
const LARGEST_FILE: ByteSize = ByteSize::mib(1);

/// The sources that [`Config::load`] reads, from the weakest layer to the strongest. The default is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// The file that the user named. It must exist, and replaces `default_file`.
    pub file: Option<PathBuf>,
    /// The file to read if the user named none. It need not exist.
    pub default_file: Option<PathBuf>,
    /// The environment of the process. Collect it with `std::env::vars_os()`, since `vars()` panics on a value that is not
    /// Unicode, and convert the values with `to_string_lossy()`: those with U+FFFD are refused. Names that do not begin with
    /// `RYZ_`, those of [`RESERVED_ENVIRONMENT`], and those that Kubernetes sets for a Service called `ryz`, are ignored; any other
    /// name must be a setting.
    pub environment: Vec<(String, String)>,
    /// Dotted keys, values, and the flags as the user typed them, such as `--world-size`. The last entry of a key takes
    /// precedence. Values with U+FFFD are refused.
    pub flags: Vec<(String, String, String)>,
}

impl Config {
    /// Merges the layers and parses the result.
    ///
    /// Every name in every layer must be known. Only effective values are parsed, so a flag can override a bad value in a
    /// file.
    ///
    /// # Errors
    /// Returns all problems in one [`ConfigError`].
    pub fn load(sources: &Sources) -> Result<Config, ConfigError> {
        let (layers, mut problems) = layers(sources);
        let merged = layers.into_iter().fold(Figment::new(), Figment::merge);

        let mut config = Config::default();
        for key in keys() {
            let Ok(value) = merged.find_value(key.key) else { continue };
            let origin = merged.get_metadata(value.tag()).map_or(Source::Code, origin);
            let text = match &value {
                Value::Dict(_, table) if key.is_table => lines(table),
                value => text(value),
            };
            // A NUL would end a variable or a path.
            let text =
                text.and_then(|text| if text.contains('\0') { Err("text with a NUL") } else { Ok(text) });
            let outcome = match text {
                Ok(text) => config.set(key.key, &text),
                Err(kind) => Err(crate::ValueError {
                    found: kind.to_string(),
                    expected: key.expected,
                    example: key.example,
                    why: None,
                }),
            };
            match outcome {
                Ok(()) => config.provenance.record(key.key, config.value(key.key), origin),
                // A flag may set several settings; an invalid value is reported once.
                Err(error) if is_known(&problems, &origin, &error) => {}
                Err(error) => {
                    let source = Box::new(error);
                    problems.push(ConfigError::BadValue { key: key.key.into(), origin, source });
                }
            }
        }
        // A rejected value is replaced by its default, whose conflicts are not the user's.
        if problems.is_empty() {
            problems.extend(conflict(&config));
        }

        match problems.len() {
            0 => Ok(config),
            1 => Err(problems.remove(0)),
            _ => Err(ConfigError::Several(problems)),
        }
    }
}

/// Returns true if this flag was already rejected for the same reason.
fn is_known(problems: &[ConfigError], flag: &Source, cause: &crate::ValueError) -> bool {
    let same = |problem: &ConfigError| matches!(problem, ConfigError::BadValue { origin, source: other, .. } if origin == flag && **other == *cause);
    matches!(flag, Source::Flag(_)) && problems.iter().any(same)
}

/// The settings of one source, for figment.
struct Layer {
    source: Source,
    settings: Dict,
}

impl Provider for Layer {
    // figment tags each value with this, so that a merged value keeps its source.
    fn metadata(&self) -> Metadata {
        match &self.source {
            Source::File(path) => Metadata::from(FILE, path.as_path()),
            Source::Environment(name) => Metadata::from(ENVIRONMENT, figment::Source::Custom(name.clone())),
            Source::Flag(name) => Metadata::from(FLAG, figment::Source::Custom(name.clone())),
            Source::Default | Source::Code => Metadata::default(),
        }
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}

const FILE: &str = "file";
const ENVIRONMENT: &str = "environment";
const FLAG: &str = "flag";

/// Returns the source from which [`Layer::metadata`] was made.
fn origin(metadata: &Metadata) -> Source {
    match (metadata.name.as_ref(), &metadata.source) {
        (FILE, Some(figment::Source::File(path))) => Source::File(path.clone()),
        (ENVIRONMENT, Some(figment::Source::Custom(name))) => Source::Environment(name.clone()),
        (FLAG, Some(figment::Source::Custom(name))) => Source::Flag(name.clone()),
        _ => Source::Code,
    }
}

/// Returns the layers from the weakest to the strongest, and all errors in their names.
fn layers(sources: &Sources) -> (Vec<Layer>, Vec<ConfigError>) {
    let mut layers = Vec::new();
    let mut problems = Vec::new();

    match read_file(sources) {
        Ok(Some((path, settings))) => {
            let source = Source::File(path);
            check_names("", &settings, &source, &mut problems);
            layers.push(Layer { source, settings });
        }
        Ok(None) => {}
        Err(error) => problems.push(error),
    }
    for (name, value) in &sources.environment {
        let is_reserved = RESERVED_ENVIRONMENT.contains(&name.as_str());
        if !name.starts_with("RYZ_") || is_reserved || is_of_a_service(name, value) {
            continue;
        }
        let source = Source::Environment(name.clone());
        if value.contains(char::REPLACEMENT_CHARACTER) {
            problems.push(ConfigError::NotText(source));
            continue;
        }
        match keys().find(|key| key.environment_variable() == *name) {
            Some(key) => layers.push(Layer { source, settings: nest(key.key, value) }),
            None => problems.push(unknown(name, source, environment_variable)),
        }
    }
    for (key, value, flag) in &sources.flags {
        let source = Source::Flag(flag.clone());
        if value.contains(char::REPLACEMENT_CHARACTER) {
            problems.push(ConfigError::NotText(source));
        } else if keys().any(|known| known.key == key) {
            layers.push(Layer { source, settings: nest(key, value) });
        } else {
            problems.push(unknown(key, source, str::to_owned));
        }
    }
    (layers, problems)
}

/// Returns true if Kubernetes sets this variable, for a Service in the same namespace whose name begins with `ryz`.
fn is_of_a_service(name: &str, value: &str) -> bool {
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // `…_PORT_80_TCP`, perhaps with one of three ends.
    let is_of_port = || {
        let (number, rest) =
            name.rsplit_once("_PORT_").and_then(|(_, rest)| rest.split_once('_')).unwrap_or_default();
        let (protocol, end) = rest.split_once('_').unwrap_or((rest, "ADDR"));
        is_number(number)
            && ["TCP", "UDP", "SCTP"].contains(&protocol)
            && ["ADDR", "PORT", "PROTO"].contains(&end)
    };
    name.ends_with("_SERVICE_HOST")
        || (name.ends_with("_SERVICE_PORT") || name.contains("_SERVICE_PORT_")) && is_number(value)
        || name.ends_with("_PORT") && is_url
        || is_of_port()
}

/// Returns the path and contents of the file, or `None` if the user named none and there is no default file.
fn read_file(sources: &Sources) -> Result<Option<(PathBuf, Dict)>, ConfigError> {
    let (path, required): (&Path, bool) = match (&sources.file, &sources.default_file) {
        (Some(path), _) => (path, true),
        (None, Some(path)) => (path, false),
        (None, None) => return Ok(None),
    };
    // It may name libraries to load.
    let read = file::read_trusted(path, LARGEST_FILE).and_then(file::text);
    let text = match read {
        Ok(text) => text,
        Err(error) if !required && error.is_not_found() => return Ok(None),
        Err(source) => return Err(ConfigError::Unreadable { path: path.into(), source }),
    };
    match Toml::from_str(&text) {
        Ok(settings) => Ok(Some((path.into(), settings))),
        Err(error) => {
            let reason = toml_error(&text, error.span().map_or(0, |span| span.start), error.message());
            Err(ConfigError::IllFormed { path: path.into(), reason })
        }
    }
}

/// Walks a file's tables down to the settings and collects unknown names.
fn check_names(prefix: &str, table: &Dict, source: &Source, problems: &mut Vec<ConfigError>) {
    for (name, value) in table {
        // A quoted name with a dot is a single name, and no setting has such a name.
        let name = if name.contains('.') { format!("\"{name}\"") } else { name.clone() };
        let path = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        let is_section = SECTIONS.iter().any(|section| section.name == path);
        match value {
            Value::Dict(_, inner) if is_section => check_names(&path, inner, source, problems),
            Value::Dict(_, _) | Value::Array(_, _) if !is_section && !is_setting(&path) => {
                problems.push(unknown_table(path, source));
            }
            _ if is_setting(&path) => {}
            _ => problems.push(unknown(&path, source.clone(), str::to_owned)),
        }
    }
}

fn is_setting(key: &str) -> bool {
    keys().any(|known| known.key == key)
}

fn unknown_table(key: String, source: &Source) -> ConfigError {
    let tables = keys().filter(|key| key.is_table).map(|key| key.key.to_owned());
    let near = nearest(&key, SECTIONS.iter().map(|section| section.name.to_owned()).chain(tables));
    ConfigError::UnknownKey { key, origin: source.clone(), nearest: near }
}

/// Creates the error for a `name` that is not a setting. `spelling` turns a dotted key into this source's spelling.
fn unknown(name: &str, origin: Source, spelling: fn(&str) -> String) -> ConfigError {
    if let Some(section) = SECTIONS.iter().find(|section| spelling(section.name) == name) {
        let members: Vec<_> = section.keys.iter().map(|key| format!("`{}`", spelling(key.key))).collect();
        return ConfigError::Section { key: name.into(), origin, members: members.join(", ") };
    }
    // A name in the section's table, written as a setting of the section.
    let of_table = |key: &&KeyInfo| {
        let section = key.key.rsplit_once('.').map_or("", |(section, _)| section);
        key.is_table
            && name.starts_with(&spelling(&format!("{section}.x")).trim_end_matches(['x', 'X']).to_owned())
    };
    let is_typing_error = |key: &&KeyInfo| strsim::damerau_levenshtein(name, &spelling(key.key)) <= 2;
    if let Some(meant) = keys().find(is_typing_error).or_else(|| keys().find(of_table)) {
        return ConfigError::UnknownKey { key: name.into(), origin, nearest: Some(spelling(meant.key)) };
    }
    let near = nearest(name, keys().map(|key| spelling(key.key))).or_else(|| {
        // The last part is right, but the section is wrong or missing.
        let last = name.rsplit_once('.').map_or(name, |(_, last)| last);
        let mut namesakes = keys().filter(|key| key.key.rsplit_once('.').is_some_and(|(_, own)| own == last));
        namesakes.next().filter(|_| namesakes.next().is_none()).map(|key| spelling(key.key))
    });
    ConfigError::UnknownKey { key: name.into(), origin, nearest: near }
}

fn nest(key: &str, text: &str) -> Dict {
    match figment::util::nest(key, Value::from(text)) {
        Value::Dict(_, settings) => settings,
        _ => unreachable!("the key of a setting is never empty"),
    }
}

/// Returns a table as `name=value` lines, or what it contains that cannot be written as text outside TOML.
fn lines(table: &Dict) -> Result<String, &'static str> {
    table.iter().map(|(name, value)| Ok(format!("{name}={}\n", text(value)?))).collect()
}

/// Returns a value as a user would write it outside TOML.
fn text(value: &Value) -> Result<String, &'static str> {
    match value {
        Value::String(_, text) => Ok(text.clone()),
        Value::Char(_, char) => Ok(char.to_string()),
        Value::Bool(_, bool) => Ok(bool.to_string()),
        Value::Num(_, number) => {
            let integer =
                number.to_i128().map(|n| n.to_string()).or_else(|| number.to_u128().map(|n| n.to_string()));
            integer.or_else(|| number.to_f64().map(|n| n.to_string())).ok_or("a number")
        }
        Value::Empty(..) => Ok(String::new()),
        // As the crate `toml` hands dates over.
        Value::Dict(_, table) if table.contains_key("$__toml_private_datetime") => Err("a date"),
        Value::Dict(..) => Err("a table"),
        Value::Array(..) => Err("a list"),
    }
}

/// Returns the conflict between values that are valid individually.
fn conflict(config: &Config) -> Option<ConfigError> {
    let (node_rank, nnodes) = (config.launch.node_rank, config.launch.nnodes.get());
    let origin = |key| config.source_of(key).unwrap_or(Source::Code);
    (node_rank >= nnodes).then(|| {
        ConfigError::Conflict(format!(
            "`launch.node_rank` is {node_rank} ({}), but `launch.nnodes` is {nnodes} ({}): nodes are counted from 0, so the last \
             is {}",
            origin("launch.node_rank"),
            origin("launch.nnodes"),
            nnodes - 1
        ))
    })
}
