//! From flags, a file and the environment to the configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use ryzanstein_config::{Config, ConfigError, Source, Sources};

/// Flags that are settings: dotted key, value, flag.
pub(crate) type Flags = Vec<(String, String, String)>;

/// The flag that names the file; it goes with every command that reads settings.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ConfigFile {
    /// The file of settings; without it, RYZ_CONFIG, or ryzanstein.toml if there is one here
    #[arg(long, value_name = "F")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    /// Puts all layers together.
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

/// The variables of this process. Those that are not Unicode are nothing that is read here.
pub(crate) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// Notes a flag that was given as the setting it stands for.
pub(crate) fn set_flag(flags: &mut Flags, key: &str, flag: &str, value: Option<impl ToString>) {
    if let Some(value) = value {
        flags.push((key.into(), value.to_string(), flag.into()));
    }
}

/// Whether a launcher, ours or another, started this process as a rank. `MASTER_ADDR` alone does not say so: it is exported
/// for a launcher that is yet to be called. `RANK` alone does, and joining then says what is missing: each rank would
/// start all of them anew otherwise.
pub(crate) fn is_launched(environment: &BTreeMap<String, String>) -> bool {
    environment.contains_key("RYZ_RENDEZVOUS") || environment.contains_key("RANK")
}

/// For commands that call what is slow on purpose, and have a table of their own for it: no warning of slow calls unless the
/// user set when to warn.
pub(crate) fn silence_slow_call_warnings(config: &mut Config) {
    if config.source_of("profile.slow_call") == Some(Source::Default) {
        config.profile.slow_call = Duration::MAX;
    }
}
