//! NCCL's variables as this process finds them: its environment, and the files that NCCL reads besides.
//!
//! A program that embeds the engine and does not run under `ryz launch` sets what [`missing`] says first thing in `main`,
//! before any thread is there: NCCL reads its variables when it is loaded, and changing the environment is sound only
//! while nobody else can read it.

use std::path::{Path, PathBuf};

use ryzanstein_config::Config;
use ryzanstein_config::nccl::{self, Own, conf_file};
use ryzanstein_process_group::Error;

use crate::rendezvous::Environment;

/// The file of the whole host.
const OF_HOST: &str = "/etc/nccl.conf";

/// The user's own variables of NCCL: those of `environment`, of the file `NCCL_CONF_FILE` or else `~/.nccl.conf`, and of
/// `/etc/nccl.conf`, from the strongest. A file that cannot be read has none, for NCCL neither.
pub fn own(environment: &Environment) -> Vec<Own> {
    let mut all = Own::of_environment(environment);
    for path in files(environment) {
        all.extend(of_file(&path));
    }
    all
}

/// The files that NCCL looks for, the stronger first.
pub fn files(environment: &Environment) -> Vec<PathBuf> {
    let users = environment
        .get("NCCL_CONF_FILE")
        .map(PathBuf::from)
        .or_else(|| environment.get("HOME").map(|home| Path::new(home).join(".nccl.conf")));
    users.into_iter().chain([OF_HOST.into()]).collect()
}

fn of_file(path: &Path) -> Vec<Own> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let pairs = conf_file(&text).into_iter();
    pairs.map(|(name, value)| Own { name, value, file: Some(path.to_owned()) }).collect()
}

/// The variables that `[nccl]` asks for and that neither `environment` nor NCCL's files have.
pub fn missing(config: &Config, environment: &Environment) -> Vec<(String, String)> {
    nccl::missing(config, &own(environment))
}

/// Refuses an environment that lacks what `[nccl]` asks for.
///
/// # Errors
/// [`Error::Configuration`] naming the variables, and the ways to have them set in time.
pub fn require(config: &Config, environment: &Environment) -> Result<(), Error> {
    let missing = missing(config, environment);
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<_> = missing.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Err(Error::Configuration(format!(
        "the section [nccl] asks for {}, which this process was not started with, and NCCL reads its variables only when \
         it is loaded: start the program with `ryz launch`, export them, write them into ~/.nccl.conf, or set them \
         before the program's first thread starts",
        list.join(" ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn what_is_missing_is_refused_by_name_with_what_to_do() {
        let mut config = Config::default();
        assert!(require(&config, &Environment::new()).is_ok());
        config.nccl.max_ctas = ryzanstein_config::Ctas::new(4).ok();
        let error = require(&config, &Environment::new()).expect_err("refused").to_string();
        assert!(error.contains("NCCL_MAX_CTAS=4") && error.contains("ryz launch"), "{error}");
        assert!(require(&config, &environment(&[("NCCL_MAX_CTAS", "8")])).is_ok());
    }

    #[test]
    fn a_file_of_nccl_counts_as_the_users_own() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join(".nccl.conf"), "NCCL_MAX_CTAS=2\n").expect("written");
        let home = folder.path().to_str().expect("text");
        let mut config = Config::default();
        config.nccl.max_ctas = ryzanstein_config::Ctas::new(4).ok();
        assert_eq!(missing(&config, &environment(&[("HOME", home)])), []);
        let other = folder.path().join("other.conf");
        std::fs::write(&other, "NCCL_DEBUG=WARN\n").expect("written");
        let named = environment(&[("HOME", home), ("NCCL_CONF_FILE", other.to_str().expect("text"))]);
        assert_eq!(missing(&config, &named), [("NCCL_MAX_CTAS".to_owned(), "4".to_owned())]);
    }
}
