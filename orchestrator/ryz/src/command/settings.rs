//! Builds the configuration from flags, a file and the environment.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ryzanstein_config::{Config, ConfigError, Source, Sources, WorldSize};
use ryzanstein_orchestrator::rendezvous::placement;
pub(crate) use ryzanstein_orchestrator::rendezvous::process_environment as environment;
use ryzanstein_process_group::Error;
use ryzanstein_process_group::device::{Libraries, LibrarySearch};

/// The file that is read if none is named and it exists.
const DEFAULT_FILE: &str = "ryzanstein.toml";

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
        Config::load(&Sources {
            file: self.chosen(),
            default_file: Some(DEFAULT_FILE.into()),
            environment: environment().into_iter().collect(),
            flags,
        })
    }

    /// Returns the file that [`load`](Self::load) reads, if there is one.
    pub(crate) fn used(&self) -> Option<PathBuf> {
        self.chosen().or_else(|| Path::new(DEFAULT_FILE).exists().then(|| DEFAULT_FILE.into()))
    }

    /// Returns the file that a flag or the environment names.
    fn chosen(&self) -> Option<PathBuf> {
        self.named().or_else(|| std::env::var_os("RYZ_CONFIG").map(PathBuf::from))
    }

    /// Returns the file that was named by flag.
    pub(crate) fn named(&self) -> Option<PathBuf> {
        self.config.clone()
    }
}

/// Adds a flag, if it was given, as the setting that it represents.
pub(crate) fn set_flag(flags: &mut Flags, key: &str, flag: &str, value: Option<impl ToString>) {
    if let Some(value) = value {
        flags.push((key.into(), value.to_string(), flag.into()));
    }
}

/// Returns true if a launcher, ours or another, started this process as a rank. `MASTER_ADDR` alone does not count: users
/// export it before they call a launcher. `RANK` alone does, and joining then reports the missing variables; otherwise each
/// rank would launch a whole job of its own.
///
/// # Errors
/// Fails when a flag demands another number of ranks than the launcher has started.
pub(crate) fn is_launched(config: &Config) -> anyhow::Result<bool> {
    let environment = placement::translated(config, &environment())?;
    if !environment.contains_key("RYZ_RENDEZVOUS") && !environment.contains_key("RANK") {
        return Ok(false);
    }
    let started = environment.get("WORLD_SIZE").and_then(|ranks| ranks.parse::<u32>().ok());
    let demanded = config.job.world_size.map(WorldSize::get);
    if let (Some(started), Some(demanded)) = (started, demanded)
        && started != demanded
        && let Some(source @ Source::Flag(_)) = config.source_of("job.world_size")
    {
        return Err(Error::Configuration(format!(
            "{source} demands {demanded} ranks, but a launcher has started this process as one of {started} (WORLD_SIZE); omit the \
             flag, or give the launcher the same number"
        ))
        .into());
    }
    Ok(true)
}

/// Returns the number of GPUs that CUDA shows to this process; 0 without CUDA.
pub(crate) fn visible_gpus(config: &Config) -> u32 {
    let environment = environment();
    let search = LibrarySearch::from_variables(|name| environment.get(name).cloned());
    Libraries::find(&config.device, &search).device_count().unwrap_or(0)
}

/// Turns off warnings of slow calls, unless the user has set `profile.slow_call`. For commands whose result is a table of calls or a
/// text.
pub(crate) fn silence_slow_call_warnings(config: &mut Config) {
    if config.source_of("profile.slow_call") == Some(Source::Default) {
        config.profile.slow_call = Duration::MAX;
    }
}
