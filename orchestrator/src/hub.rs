//! Models by their name on the Hugging Face hub, from the cache that Hugging Face's tools fill. This module downloads nothing.

use std::io;
use std::path::{Path, PathBuf};

use crate::rendezvous::Environment;

/// The reason why a name has no folder.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HubError {
    /// The cache does not have the model.
    #[error(
        "{name} is neither a folder nor in the Hugging Face cache ({}); download it with `hf download {name}{}`, or pass the \
         folder of a model", .cache.display(), .revision.as_ref().map(|r| format!(" --revision {r}")).unwrap_or_default()
    )]
    NotCached {
        /// The model's name.
        name: String,
        /// The branch, tag or commit, if one was given.
        revision: Option<String>,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// A part of the cache cannot be read.
    #[error("cannot read {} in the Hugging Face cache: {error}", .path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        error: String,
    },
    /// The environment does not give the location of the cache.
    #[error("{0} is not a folder, and without HOME or HF_HOME there is no Hugging Face cache to look into")]
    NoCache(String),
}

/// Returns the folder of a model: `model` itself if it exists, else, for `org/name` or `org/name@revision`, the snapshot in the
/// cache. Anything else is returned unchanged.
///
/// # Errors
/// [`HubError`] when a name is not in the cache.
pub fn resolve(model: &Path, environment: &Environment) -> Result<PathBuf, HubError> {
    let Some((name, revision)) = model.to_str().filter(|_| !model.exists()).and_then(parse) else {
        return Ok(model.into());
    };
    let cache = cache(environment).ok_or_else(|| HubError::NoCache(name.into()))?;
    let repository = cache.join(format!("models--{}", name.replace('/', "--")));
    let reference = repository.join("refs").join(revision.unwrap_or("main"));
    // A reference contains the commit that it points to; a commit points to itself.
    let commit =
        if_there(&reference, std::fs::read_to_string(&reference))?.map(|text| text.trim().to_owned());
    let commit = commit.or_else(|| revision.map(str::to_owned));
    let snapshot = commit.map(|commit| repository.join("snapshots").join(commit));
    let is_there = match &snapshot {
        Some(folder) => if_there(folder, std::fs::metadata(folder))?.is_some_and(|found| found.is_dir()),
        None => false,
    };
    snapshot.filter(|_| is_there).ok_or_else(|| HubError::NotCached {
        name: name.into(),
        revision: revision.map(str::to_owned),
        cache,
    })
}

/// No such path; or a part of it is no folder, or the whole is one: another reference begins with its name.
const ABSENT: [io::ErrorKind; 3] =
    [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory, io::ErrorKind::IsADirectory];

/// Returns what was read of a path of the cache, or `None` if there is no such path.
fn if_there<T>(path: &Path, read: io::Result<T>) -> Result<Option<T>, HubError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if ABSENT.contains(&error.kind()) => Ok(None),
        Err(error) => Err(HubError::Unreadable { path: path.into(), error: error.to_string() }),
    }
}

/// Splits a name into `org/name`, and the revision after an `@`.
fn parse(text: &str) -> Option<(&str, Option<&str>)> {
    let (name, revision) = match text.split_once('@') {
        Some((name, revision)) => (name, Some(revision)),
        None => (text, None),
    };
    let is_word = |word: &str| {
        !word.is_empty()
            && !word.starts_with('.')
            && word.chars().all(|c| c.is_ascii_alphanumeric() || ".-_+".contains(c))
    };
    let (organization, model) = name.split_once('/')?;
    // A branch may have several parts, such as `refs/pr/1`.
    let is_revision = revision.is_none_or(|revision| revision.split('/').all(is_word));
    (is_word(organization) && is_word(model) && is_revision).then_some((name, revision))
}

/// Returns the folder where Hugging Face's tools keep models.
fn cache(environment: &Environment) -> Option<PathBuf> {
    let value = |name: &str| environment.get(name).filter(|text| !text.is_empty());
    // A file such as /etc/environment sets variables as they are, and Hugging Face's tools then expand them.
    let part = |part: &str| {
        let name = if part == "~" { Some("HOME") } else { part.strip_prefix('$') };
        let name = name.map(|name| name.strip_prefix('{').and_then(|n| n.strip_suffix('}')).unwrap_or(name));
        name.and_then(value).cloned().unwrap_or_else(|| part.to_owned())
    };
    let folder = |name: &str| {
        value(name).map(|text| text.split('/').map(part).collect::<Vec<_>>().join("/")).map(PathBuf::from)
    };
    folder("HF_HUB_CACHE")
        .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| folder("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cached(root: &Path) -> Environment {
        let repository = root.join("hub/models--acme--tiny-llama");
        std::fs::create_dir_all(repository.join("snapshots/abc123")).unwrap();
        std::fs::create_dir_all(repository.join("refs")).unwrap();
        std::fs::write(repository.join("refs/main"), "abc123\n").unwrap();
        [("HF_HOME".to_owned(), root.display().to_string())].into()
    }

    #[test]
    fn a_name_stands_for_the_snapshot_that_its_reference_points_to() {
        let root = tempfile::tempdir().unwrap();
        let environment = cached(root.path());
        let snapshot = root.path().join("hub/models--acme--tiny-llama/snapshots/abc123");
        for name in ["acme/tiny-llama", "acme/tiny-llama@main", "acme/tiny-llama@abc123"] {
            assert_eq!(resolve(name.as_ref(), &environment), Ok(snapshot.clone()), "{name}");
        }
    }

    #[test]
    fn revisions_and_folders_are_those_of_hugging_face() {
        let root = tempfile::tempdir().unwrap();
        cached(root.path());
        let repository = root.path().join("hub/models--acme--tiny-llama");
        for revision in ["refs/pr/1", "feature/x", "v1.0+cpu"] {
            let reference = repository.join("refs").join(revision);
            std::fs::create_dir_all(reference.parent().unwrap()).unwrap();
            std::fs::write(reference, "abc123").unwrap();
            for (name, value) in [
                ("HF_HOME", "~"),
                ("HF_HOME", "$HOME"),
                ("HF_HOME", "${HOME}"),
                ("HF_HUB_CACHE", "~/hub"),
                ("HUGGINGFACE_HUB_CACHE", "$HOME/hub"),
            ] {
                let home = ("HOME".to_owned(), root.path().display().to_string());
                let environment = [home, (name.to_owned(), value.to_owned())].into();
                let found = resolve(format!("acme/tiny-llama@{revision}").as_ref(), &environment);
                assert_eq!(found, Ok(repository.join("snapshots/abc123")), "{revision} {name}={value}");
            }
        }
        for outside in ["acme/tiny-llama@../x", "acme/tiny-llama@a//b", "acme/tiny-llama@.."] {
            assert_eq!(parse(outside), None, "{outside}");
        }
    }

    #[test]
    fn a_cache_that_cannot_be_read_is_not_called_empty() {
        let root = tempfile::tempdir().unwrap();
        let environment = cached(root.path());
        let reference = root.path().join("hub/models--acme--tiny-llama/refs/main");
        // Nobody can read a link to itself, not even root.
        std::fs::remove_file(&reference).unwrap();
        std::os::unix::fs::symlink(&reference, &reference).unwrap();
        let error = resolve("acme/tiny-llama".as_ref(), &environment).unwrap_err().to_string();
        assert!(error.contains("cannot read") && error.contains("refs/main"), "{error}");
    }

    #[test]
    fn what_the_cache_lacks_is_told_with_the_command_that_gets_it() {
        let root = tempfile::tempdir().unwrap();
        let environment = cached(root.path());
        std::fs::create_dir_all(root.path().join("hub/models--acme--tiny-llama/refs/feature/x")).unwrap();
        let error = resolve("acme/tiny-llama@feature".as_ref(), &environment).unwrap_err();
        assert!(matches!(error, HubError::NotCached { .. }), "{error}");
        let error = resolve("acme/other@v2".as_ref(), &environment).unwrap_err().to_string();
        assert!(error.contains("`hf download acme/other --revision v2`"), "{error}");
        let error = resolve("acme/other".as_ref(), &Environment::new()).unwrap_err();
        assert_eq!(error, HubError::NoCache("acme/other".into()));
    }

    #[test]
    fn folders_and_paths_are_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let environment = cached(root.path());
        for path in [root.path().to_str().unwrap(), "models/a/b", "/no/where", "../model", "model"] {
            assert_eq!(resolve(path.as_ref(), &environment), Ok(path.into()));
        }
    }
}
