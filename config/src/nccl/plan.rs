//! The variables that NCCL reads: the user's own variables, then `nccl.env`, then the profile.

use std::fmt;
use std::path::PathBuf;

use crate::{Config, NcclProfile, Source};

/// A variable that the user has set: in the process's environment, or in one of NCCL's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserVariable {
    /// Its name, such as `NCCL_DEBUG`.
    pub name: String,
    /// Its value.
    pub value: String,
    /// The file that sets it; `None` for the environment, which overrides every file.
    pub file: Option<PathBuf>,
}

impl UserVariable {
    /// Returns the variables of an environment whose names begin with `NCCL_`.
    pub fn of_environment<'a>(environment: impl IntoIterator<Item = (&'a String, &'a String)>) -> Vec<Self> {
        let of_nccl = environment.into_iter().filter(|(name, _)| name.starts_with("NCCL_"));
        of_nccl.map(|(name, value)| Self { name: name.clone(), value: value.clone(), file: None }).collect()
    }
}

/// Returns the variables of a file such as `/etc/nccl.conf`, parsed as NCCL does: one `NAME=value` per line, split at the first
/// `=`, without trimming. Lines that begin with `#` are ignored, and so are names with a space, which NCCL sets but never reads.
pub fn conf_file(text: &str) -> Vec<(String, String)> {
    text.split('\n')
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        .filter(|(name, _)| name.starts_with("NCCL_") && !name.contains(char::is_whitespace))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// The source of an NCCL variable.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NcclSource {
    /// The user's environment.
    Environment,
    /// One of NCCL's own files.
    File(PathBuf),
    /// `nccl.env`, and its source.
    Setting(Source),
    /// This profile, and the source of `nccl.profile`.
    Profile(NcclProfile, Source),
}

impl NcclSource {
    /// Returns true if the user has set the variable, so that no setting may change it.
    pub const fn is_user_set(&self) -> bool {
        matches!(self, Self::Environment | Self::File(_))
    }
}

impl fmt::Display for NcclSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment => f.write_str("the user's environment"),
            Self::File(path) => write!(f, "NCCL's file {}", path.display()),
            Self::Setting(source) => write!(f, "nccl.env ({source})"),
            Self::Profile(profile, source) => write!(f, "nccl.profile = {profile} ({source})"),
        }
    }
}

/// One variable that NCCL reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclVariable {
    /// Its name, such as `NCCL_DEBUG`.
    pub name: String,
    /// Its value, in NCCL's syntax.
    pub value: String,
    /// Its source.
    pub source: NcclSource,
    /// The overridden value: that of a setting or the profile, or `NAME=value` of another variable that contradicts this one.
    pub overridden: Option<(String, NcclSource)>,
}

/// Other variables that control the same thing as a variable of a profile.
const EQUIVALENTS: &[(&str, &[&str])] = &[
    ("NCCL_MIN_CTAS", &["NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS"]),
    ("NCCL_MAX_CTAS", &["NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS"]),
];

/// Returns true if a known variable contradicts this one: a minimum above the maximum, or the reverse.
fn contradicts(known: &NcclVariable, name: &str, value: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().ok();
    let (Some(known_value), Some(wanted)) = (number(&known.value), number(value)) else { return false };
    match (known.name.as_str(), name) {
        ("NCCL_MAX_CTAS" | "NCCL_MAX_NCHANNELS" | "NCCL_MAX_NRINGS", "NCCL_MIN_CTAS") => wanted > known_value,
        ("NCCL_MIN_CTAS" | "NCCL_MIN_NCHANNELS" | "NCCL_MIN_NRINGS", "NCCL_MAX_CTAS") => wanted < known_value,
        _ => false,
    }
}

/// Returns the variables of a profile.
fn profile(profile: NcclProfile) -> &'static [(&'static str, &'static str)] {
    match profile {
        NcclProfile::None => &[],
        NcclProfile::Inference => &[("NCCL_DEBUG", "WARN"), ("NCCL_MAX_CTAS", "16")],
        // The maximum that NCCL accepts.
        NcclProfile::Bandwidth => &[("NCCL_DEBUG", "WARN"), ("NCCL_MIN_CTAS", "64")],
        NcclProfile::Debug => &[
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT,ENV,NET,GRAPH,TUNING"),
            ("NCCL_CHECK_POINTERS", "1"),
        ],
    }
}

/// Returns all NCCL variables that are set, sorted by name.
///
/// In descending order of precedence: the user's own variables, first from the environment, then from files; `nccl.env`; the
/// profile. A variable is left out if a source of higher precedence sets it. A variable of the profile is also left out if such a
/// source sets another variable that controls the same thing.
///
/// ```
/// use ryzanstein_config::nccl::{UserVariable, plan};
/// use ryzanstein_config::{Config, NcclConfig, NcclProfile};
///
/// let config = Config {
///     nccl: NcclConfig { profile: NcclProfile::Inference, ..NcclConfig::default() },
///     ..Config::default()
/// };
/// let own = [UserVariable { name: "NCCL_DEBUG".into(), value: "INFO".into(), file: None }];
/// let plan = plan(&config, &own);
/// assert_eq!((plan[0].name.as_str(), plan[0].value.as_str()), ("NCCL_DEBUG", "INFO"));
/// assert!(plan[0].source.is_user_set());
/// assert_eq!((plan[1].name.as_str(), plan[1].value.as_str()), ("NCCL_MAX_CTAS", "16"));
/// ```
pub fn plan(config: &Config, own: &[UserVariable]) -> Vec<NcclVariable> {
    let mut plan: Vec<NcclVariable> = Vec::new();
    // The environment overrides files, and the first file overrides the second.
    let (environment, files): (Vec<_>, Vec<_>) = own.iter().partition(|own| own.file.is_none());
    for own in environment.into_iter().chain(files) {
        if plan.iter().all(|known| known.name != own.name) {
            let source = own.file.clone().map_or(NcclSource::Environment, NcclSource::File);
            let (name, value) = (own.name.clone(), own.value.clone());
            plan.push(NcclVariable { name, value, source, overridden: None });
        }
    }
    let origin = |key| config.source_of(key).unwrap_or(Source::Code);
    let chosen = config.nccl.profile;
    let set =
        config.nccl.env.iter().map(|(name, value)| (name, value, NcclSource::Setting(origin("nccl.env"))));
    let ours = set.chain(
        profile(chosen)
            .iter()
            .map(|(name, value)| (*name, *value, NcclSource::Profile(chosen, origin("nccl.profile")))),
    );
    for (name, value, source) in ours {
        let also = EQUIVALENTS.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, also)| also);
        let is_profile = matches!(source, NcclSource::Profile(..));
        let contradicted = plan.iter().position(|known| is_profile && contradicts(known, name, value));
        let stronger =
            |known: &NcclVariable| known.name == name || is_profile && also.contains(&known.name.as_str());
        if let Some(bound) = contradicted {
            plan[bound].overridden.get_or_insert((format!("{name}={value}"), source));
        } else if let Some(known) = plan.iter_mut().find(|known| stronger(known)) {
            known.overridden.get_or_insert((value.to_owned(), source));
        } else {
            let (name, value) = (name.to_owned(), value.to_owned());
            plan.push(NcclVariable { name, value, source, overridden: None });
        }
    }
    plan.sort_by(|a, b| a.name.cmp(&b.name));
    plan
}

/// Returns the variables that the settings require and that the user's environment and files lack. A launcher sets them in the
/// processes that it starts, and a process needs them before it loads NCCL.
pub fn missing(config: &Config, own: &[UserVariable]) -> Vec<(String, String)> {
    let ours = plan(config, own).into_iter().filter(|variable| !variable.source.is_user_set());
    ours.map(|variable| (variable.name, variable.value)).collect()
}
