//! NCCL's variables in this process: from its environment, and from the files that NCCL reads.
//!
//! An application that does not run under `ryz launch` sets the variables that [`missing`] returns at the start of
//! `main`, before any other thread starts: NCCL reads its variables when it is loaded, and changing the environment is sound
//! only while no other thread can read it.

use std::path::{Path, PathBuf};

use ryzanstein_config::nccl::{self, UserVariable, conf_file};
use ryzanstein_config::{ByteSize, Config, file};
use ryzanstein_process_group::Error;

use crate::rendezvous::Environment;

/// The host-wide file.
const OF_HOST: &str = "/etc/nccl.conf";

/// Returns the user's own NCCL variables, strongest first: from `environment`, from the file that `NCCL_CONF_FILE` names
/// (otherwise `.nccl.conf` in the home folder of the password database), and from `/etc/nccl.conf`. Files that cannot be read
/// are ignored, as NCCL ignores them.
#[doc(hidden)]
pub fn user_variables(environment: &Environment) -> Vec<UserVariable> {
    user_variables_in(environment, home().as_deref())
}

fn user_variables_in(environment: &Environment, home: Option<&Path>) -> Vec<UserVariable> {
    let mut all = UserVariable::of_environment(environment);
    for path in files(environment, home) {
        all.extend(of_file(&path));
    }
    all
}

/// Upper bound of the file size: far more than all of NCCL's variables take.
const LARGEST_FILE: ByteSize = ByteSize::mib(1);

/// Returns the files that NCCL reads, the stronger first; `home` is the user's home folder.
fn files(environment: &Environment, home: Option<&Path>) -> Vec<PathBuf> {
    let named = environment.get("NCCL_CONF_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
    let users = named.or_else(|| home.map(|home| home.join(".nccl.conf")));
    users.into_iter().chain([OF_HOST.into()]).collect()
}

/// Returns the user's home folder according to the password database, where NCCL looks: it ignores `HOME`.
fn home() -> Option<PathBuf> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::current()).ok().flatten();
    user.map(|user| user.dir)
}

fn of_file(path: &Path) -> Vec<UserVariable> {
    let text = file::read_text(path, LARGEST_FILE).unwrap_or_default();
    let pairs = conf_file(&text).into_iter();
    pairs.map(|(name, value)| UserVariable { name, value, file: Some(path.to_owned()) }).collect()
}

/// Returns the variables that `[nccl]` requires and that neither `environment` nor NCCL's files set.
pub fn missing(config: &Config, environment: &Environment) -> Vec<(String, String)> {
    nccl::missing(config, &user_variables(environment))
}

/// Checks that the environment has the variables that `[nccl]` requires.
///
/// # Errors
/// [`Error::Configuration`] names the missing variables, and how to set them in time.
pub fn require(config: &Config, environment: &Environment) -> Result<(), Error> {
    let missing = missing(config, environment);
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<_> = missing.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Err(Error::Configuration(format!(
        "the section [nccl] requires {}, but these variables were not set when this process started; start the program \
         with `ryz launch`, export them, write them to {}, or set them before the program's first thread starts",
        list.join(" "),
        files(environment, home().as_deref())[0].display()
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
        config.nccl.env.insert("NCCL_MAX_CTAS", "4").expect("a variable");
        let error = require(&config, &Environment::new()).expect_err("refused").to_string();
        assert!(error.contains("NCCL_MAX_CTAS=4") && error.contains("ryz launch"), "{error}");
        assert!(require(&config, &environment(&[("NCCL_MAX_CTAS", "8")])).is_ok());
    }

    #[test]
    fn a_file_of_nccl_counts_as_the_users_own() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join(".nccl.conf"), "NCCL_MAX_CTAS=2\n").expect("written");
        let other = folder.path().join("other.conf");
        std::fs::write(&other, "NCCL_DEBUG=WARN\n").expect("written");
        let other = other.to_str().expect("text");
        let nowhere = Path::new("/nowhere");
        let of_file = |variables: &[(&str, &str)], home: &Path| -> Vec<String> {
            let all = user_variables_in(&environment(variables), Some(home)).into_iter();
            all.filter(|own| own.file.as_deref().is_some_and(|file| file.starts_with(folder.path())))
                .map(|own| own.name)
                .collect()
        };
        assert_eq!(of_file(&[], folder.path()), ["NCCL_MAX_CTAS"]);
        assert_eq!(of_file(&[("NCCL_CONF_FILE", other)], folder.path()), ["NCCL_DEBUG"]);
        // As in NCCL: an empty name is ignored, and HOME is not read.
        assert_eq!(of_file(&[("NCCL_CONF_FILE", "")], folder.path()), ["NCCL_MAX_CTAS"]);
        let home = folder.path().to_str().expect("text");
        assert_eq!(of_file(&[("HOME", home)], nowhere), Vec::<String>::new());
    }
}
