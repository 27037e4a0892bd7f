//! The measured paths.

use ryzanstein_process_group::paths::Path;
use ryzanstein_process_group::{Error, ProcessGroup};

use crate::measure::{Case, Collective};

/// Returns the paths that `--path` selects on a group. `None` is the backend's own choice.
pub(super) fn paths_of(names: &[String], group: &ProcessGroup) -> Result<Vec<Option<Path>>, Error> {
    choose_paths(names, &group.paths(), &group.describe_paths())
}

/// Selects paths by name from those of a group. `described` explains these, and those that the group lacks.
fn choose_paths(
    names: &[String],
    there: &[Path],
    described: &[(Path, String)],
) -> Result<Vec<Option<Path>>, Error> {
    let mut chosen: Vec<Option<Path>> = Vec::new();
    for name in names {
        match name.as_str() {
            "auto" => chosen.push(None),
            "all" => {
                chosen.push(None);
                chosen.extend(there.iter().copied().map(Some));
            }
            name => {
                // `ring` is short for `tcp/ring` or `shared_memory/ring`.
                let is_it = |full: &str| full == name || full.rsplit('/').next() == Some(name);
                let path = there.iter().find(|path| is_it(&path.to_string()));
                chosen.push(Some(*path.ok_or_else(|| {
                    let names: Vec<String> = there.iter().map(ToString::to_string).collect();
                    let told = described.iter().find(|(path, _)| is_it(&path.to_string()));
                    // Links that the group lacks are described by one of their schedules.
                    let links = |path: &str| path.split('/').next().map(str::to_owned);
                    let has_links = |(path, _): &&(Path, String)| links(&path.to_string()) == links(name);
                    let told = told.or_else(|| described.iter().find(has_links));
                    let why = told.and_then(|(_, told)| told.strip_prefix("never: "));
                    let why = why.map_or_else(String::new, |why| format!(": {why}"));
                    Error::Configuration(format!(
                        "--path {name}: there is no such path here{why}; expected auto, all, or some of {}, separated by commas",
                        names.join(", ")
                    ))
                })?));
            }
        }
    }
    let mut kept = Vec::new();
    chosen.retain(|path| {
        !kept.contains(path) && {
            kept.push(*path);
            true
        }
    });
    Ok(chosen)
}

/// Returns the path that the first rank's calls will take.
pub(super) fn expected_path(group: &ProcessGroup, case: &Case) -> Result<Option<Path>, Error> {
    let world_size = group.world_size();
    if case.what == Collective::SendRecv && world_size == 1 {
        // A single rank has one path, and no peer.
        return Ok(group.paths().first().copied());
    }
    let operation = case.what.operation(case.reduction);
    Ok(Some(group.explain(operation, case.dtype, case.count(world_size))?.path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ryzanstein_process_group::schedule::Algorithm;

    #[test]
    fn paths_are_named_in_full_or_by_their_last_word() {
        let mut there: Vec<Path> = Algorithm::ALL.into_iter().map(Path::Tcp).collect();
        there.retain(|path| *path != Path::Tcp(Algorithm::Hierarchical));
        let told = [
            (Path::SharedMemory(Algorithm::Direct), "never: the ranks are on several hosts".to_owned()),
            (Path::Tcp(Algorithm::Hierarchical), "never: each rank has a host of its own".to_owned()),
        ];
        let choose = |names: &[&str]| {
            choose_paths(&names.iter().map(ToString::to_string).collect::<Vec<_>>(), &there, &told)
        };
        let ring = Some(Path::Tcp(Algorithm::Ring));
        assert_eq!(choose(&["auto"]).unwrap(), [None]);
        assert_eq!(choose(&["ring", "tcp/ring", "auto"]).unwrap(), [ring, None]);
        assert_eq!(choose(&["all"]).unwrap().len(), there.len() + 1);
        let error = choose(&["rign"]).unwrap_err().to_string();
        assert!(error.contains("--path rign") && error.contains("tcp/ring"), "{error}");
        let error = choose(&["shared_memory/ring"]).unwrap_err().to_string();
        assert!(error.contains("no such path here: the ranks are on several hosts;"), "{error}");
        for name in ["hierarchical", "tcp/hierarchical"] {
            let error = choose(&[name]).unwrap_err().to_string();
            assert!(error.contains("no such path here: each rank has a host of its own;"), "{error}");
        }
    }
}
