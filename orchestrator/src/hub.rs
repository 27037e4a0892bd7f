//! Models by their name on the Hugging Face hub, from the cache that Hugging Face's tools fill. This module downloads nothing.

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
    let commit = std::fs::read_to_string(reference).ok().map(|text| text.trim().to_owned());
    let commit = commit.or_else(|| revision.map(str::to_owned));
    let snapshot = commit.map(|commit| repository.join("snapshots").join(commit));
    snapshot.filter(|folder| folder.is_dir()).ok_or_else(|| HubError::NotCached {
        name: name.into(),
        revision: revision.map(str::to_owned),
        cache,
    })
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
            && word.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c))
    };
    let (organization, model) = name.split_once('/')?;
    let is_name = is_word(organization) && is_word(model) && revision.is_none_or(is_word);
    is_name.then_some((name, revision))
}

/// Returns the folder where Hugging Face's tools keep models.
fn cache(environment: &Environment) -> Option<PathBuf> {
    let folder = |name: &str| environment.get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
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
    fn what_the_cache_lacks_is_told_with_the_command_that_gets_it() {
        let root = tempfile::tempdir().unwrap();
        let environment = cached(root.path());
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
