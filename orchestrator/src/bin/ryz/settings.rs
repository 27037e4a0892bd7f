//! Builds the configuration from flags, a file and the environment.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ryzanstein_config::{Config, ConfigError, Source, Sources};

/// Flags that are settings: dotted key, value, flag.
pub(crate) type Flags = Vec<(String, String, String)>;

/// The flag that names the file; every command that reads settings has it.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ConfigFile {
    /// Configuration file [default: RYZ_CONFIG, or ryzanstein.toml in this folder if it exists]
    #[arg(long, value_name = "F")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    /// Merges all layers.
    pub(crate) fn load(&self, flags: Flags) -> Result<Config, ConfigError> {
        let environment = environment();
        let file = self.named().or_else(|| environment.get("RYZ_CONFIG").map(PathBuf::from));
        Config::load(&Sources {
            file,
            default_file: Some("ryzanstein.toml".into()),
            environment: environment.into_iter().collect(),
            flags,
        })
    }

    /// The file that was named by flag.
    pub(crate) fn named(&self) -> Option<PathBuf> {
        self.config.clone()
    }
}

/// The environment of this process, without variables that are not Unicode.
pub(crate) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Adds a flag, if it was given, as the setting it stands for.
pub(crate) fn set_flag(flags: &mut Flags, key: &str, flag: &str, value: Option<impl ToString>) {
    if let Some(value) = value {
        flags.push((key.into(), value.to_string(), flag.into()));
    }
}

/// Whether a launcher, ours or another, started this process as a rank. `MASTER_ADDR` alone does not count: users export it
/// before they call a launcher. `RANK` alone does, and joining then reports what is missing; otherwise each rank would
/// launch a whole job of its own.
pub(crate) fn is_launched(environment: &BTreeMap<String, String>) -> bool {
    environment.contains_key("RYZ_RENDEZVOUS") || environment.contains_key("RANK")
}

/// For commands that make slow calls on purpose and report them in a table: turns off warnings of slow calls, unless the user
/// has set `profile.slow_call`.
pub(crate) fn silence_slow_call_warnings(config: &mut Config) {
    if config.source_of("profile.slow_call") == Some(Source::Default) {
        config.profile.slow_call = Duration::MAX;
    }
}
