//! Locations of libraries, and the libraries found there.
//!
//! If a path is configured, only that path is tried. Otherwise the loader is tried first, then Python environments, whose packages
//! contain NVIDIA's libraries in folders that no loader knows, and last the usual folders of CUDA toolkits.

use std::fmt;
use std::path::{Path, PathBuf};

use super::symbols::{Table, Unusable, Version};

/// Locations of libraries and user files, from variables that the caller reads: this crate reads none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibrarySearch {
    /// `VIRTUAL_ENV`: the folder of the active Python environment.
    pub virtual_env: Option<PathBuf>,
    /// `PATH`, which is searched for a `python3`.
    pub path: Vec<PathBuf>,
    /// The user's cache folder: `XDG_CACHE_HOME`, or `.cache` in `HOME`.
    pub cache: Option<PathBuf>,
    /// The user's state folder: `XDG_STATE_HOME`, or `.local/state` in `HOME`.
    pub state: Option<PathBuf>,
}

impl LibrarySearch {
    /// Takes the needed values from the variables that `variable` looks up.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let folder = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let path = variable("PATH").unwrap_or_default();
        Self {
            virtual_env: folder("VIRTUAL_ENV"),
            path: std::env::split_paths(&path).filter(|p| p.is_absolute()).collect(),
            cache: folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache"))),
            state: folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state"))),
        }
    }
}

/// The way in which a library was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The user configured this key.
    Configured(&'static str),
    /// The dynamic loader knows it by name.
    Loader,
    /// A package of the Python environment in this folder.
    Python(PathBuf),
    /// A CUDA toolkit's folder.
    Toolkit,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured(key) => write!(f, "{key}"),
            Self::Loader => f.write_str("the loader"),
            Self::Python(folder) => write!(f, "the Python environment {}", folder.display()),
            Self::Toolkit => f.write_str("a CUDA toolkit"),
        }
    }
}

/// A possible location of a library: a file, or a name for the loader.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Candidate {
    pub(super) path: PathBuf,
    pub(super) origin: Origin,
}

/// A location that was tried, and the reason why its library cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Looked {
    /// The file, or the name that the loader was asked for.
    pub path: PathBuf,
    /// The reason why this location was tried.
    pub origin: Origin,
    /// The error.
    pub why: Unusable,
}

/// A library that cannot be used, and all locations that were tried.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    /// Its usual name.
    pub library: &'static str,
    /// The oldest supported version.
    pub minimum: Version,
    /// The setting that can name its path.
    pub key: &'static str,
    /// All locations, in the order in which they were tried.
    pub looked: Vec<Looked>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} or newer) was not found", self.library, self.minimum)?;
        for (i, looked) in self.looked.iter().enumerate() {
            let lead = if i == 0 { ": " } else { "; " };
            write!(f, "{lead}{} by {}: {}", looked.path.display(), looked.origin, looked.why)?;
        }
        write!(f, ". Install it, or set {} to its path", self.key)
    }
}

impl std::error::Error for Missing {}

/// A library in use.
#[derive(Clone, Debug)]
pub struct Found<T> {
    /// Its functions.
    pub functions: T,
    /// Its version.
    pub version: Version,
    /// Its file, if the system reports it.
    pub path: PathBuf,
    /// The way in which it was found.
    pub origin: Origin,
}

/// Returns every location of a library with these file names, best first.
pub(super) fn candidates(
    key: &'static str,
    configured: Option<&Path>,
    names: &[&str],
    search: &LibrarySearch,
) -> Vec<Candidate> {
    if let Some(path) = configured {
        let origin = Origin::Configured(key);
        if path.is_dir() {
            return names.iter().map(|n| Candidate { path: path.join(n), origin: origin.clone() }).collect();
        }
        return vec![Candidate { path: path.into(), origin }];
    }
    let mut all: Vec<Candidate> =
        names.iter().map(|n| Candidate { path: n.into(), origin: Origin::Loader }).collect();
    let mut seen = Vec::new();
    for environment in python_environments(search) {
        for folder in package_folders(&environment) {
            for name in names {
                let path = folder.join(name);
                if path.is_file() && !seen.contains(&path) {
                    seen.push(path.clone());
                    all.push(Candidate { path, origin: Origin::Python(environment.clone()) });
                }
            }
        }
    }
    for folder in ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/opt/cuda/lib64"] {
        for name in names {
            let path = Path::new(folder).join(name);
            if path.is_file() {
                all.push(Candidate { path, origin: Origin::Toolkit });
            }
        }
    }
    all
}

/// Returns the active environment, then that of the first `python3` on the path, as a link and as the target of the link.
fn python_environments(search: &LibrarySearch) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = search.virtual_env.iter().cloned().collect();
    if let Some(python) = search.path.iter().map(|p| p.join("python3")).find(|p| p.is_file()) {
        let real = python.canonicalize().ok();
        for file in [Some(python), real].into_iter().flatten() {
            if let Some(prefix) = file.parent().and_then(Path::parent) {
                all.push(prefix.to_owned());
                // Debian's own Python keeps system-wide packages of pip here.
                all.push(prefix.join("local"));
            }
        }
    }
    let mut unique: Vec<PathBuf> = Vec::new();
    for folder in all {
        if !unique.contains(&folder) {
            unique.push(folder);
        }
    }
    unique
}

/// Returns `lib/python3*/{site,dist}-packages/nvidia/*/lib` of an environment, in the order of their names, newest last.
fn package_folders(environment: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for python in folders_in(&environment.join("lib")) {
        if !python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
            continue;
        }
        for packages in ["site-packages", "dist-packages"] {
            for package in folders_in(&python.join(packages).join("nvidia")) {
                all.push(package.join("lib"));
            }
        }
    }
    all
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    all.sort();
    all
}

/// Opens the first usable library, and never closes it.
pub(super) fn open<T: Table>(key: &'static str, candidates: Vec<Candidate>) -> Result<Found<T>, Missing> {
    let mut looked = Vec::new();
    for Candidate { path, origin } in candidates {
        match try_open::<T>(&path) {
            Ok((functions, version)) => {
                let file = file_of(functions.address()).unwrap_or(path);
                return Ok(Found { functions, version, path: file, origin });
            }
            Err(why) => looked.push(Looked { path, origin, why }),
        }
    }
    Err(Missing { library: T::NAME, minimum: T::MINIMUM, key, looked })
}

fn try_open<T: Table>(path: &Path) -> Result<(T, Version), Unusable> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: what runs on opening is NVIDIA's start-up code, in a file that the loader, an installed package or the
    // user named; it has no preconditions.
    let library =
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| refusal(&error, path))?;
    let functions = T::load(&library)?;
    // Its functions are kept and its threads may continue to run: it must stay until the process exits.
    std::mem::forget(library);
    let version = functions.version()?;
    if version < T::MINIMUM {
        return Err(Unusable::TooOld { found: version, minimum: T::MINIMUM });
    }
    functions.refuse()?;
    Ok((functions, version))
}

/// Returns the message of the loader, without the path at its beginning.
fn refusal(error: &libloading::Error, path: &Path) -> Unusable {
    let source = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    let text = if source.is_empty() { error.to_string() } else { source };
    match text.strip_prefix(&format!("{}: ", path.display())) {
        Some(rest) if rest.starts_with("cannot open shared object file") => Unusable::NotThere,
        Some(rest) => Unusable::Loader(rest.to_owned()),
        None => Unusable::Loader(text),
    }
}

/// Returns the file that is mapped at an address of this process.
pub(super) fn file_of(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        range.and_then(|(a, b)| Some(number(a)?..number(b)?)).is_some_and(|r| r.contains(&address))
    })?;
    line.find('/').map(|at| PathBuf::from(&line[at..]))
}

#[cfg(test)]
mod tests;
