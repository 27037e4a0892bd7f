use std::fs;

use tempfile::TempDir;

use super::*;
use crate::device::symbols::{Unusable, functions};

/// Creates a file that is no library.
fn file(tree: &TempDir, path: &str) -> PathBuf {
    let path = tree.path().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, b"no library").unwrap();
    path
}

const NAMES: [&str; 2] = ["libx.so.13", "libx.so.12"];

fn inside(tree: &TempDir, candidates: &[Candidate]) -> Vec<PathBuf> {
    candidates.iter().map(|p| p.path.clone()).filter(|p| p.starts_with(tree.path())).collect()
}

#[test]
fn both_layouts_of_a_python_environment_are_found_after_the_loader() {
    let tree = tempfile::tempdir().unwrap();
    let old = file(&tree, "venv/lib/python3.12/site-packages/nvidia/x/lib/libx.so.12");
    let new = file(&tree, "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libx.so.13");
    file(&tree, "venv/lib/python3.12/site-packages/other/x/lib/libx.so.13");
    let around = LibrarySearch { virtual_env: Some(tree.path().join("venv")), ..LibrarySearch::default() };
    let found = candidates("device.x", None, &NAMES, &around);
    assert_eq!(found[0], Candidate { path: "libx.so.13".into(), origin: Origin::Loader });
    assert_eq!(found[1], Candidate { path: "libx.so.12".into(), origin: Origin::Loader });
    assert_eq!(inside(&tree, &found), [new, old]);
    assert_eq!(found[2].origin, Origin::Python(tree.path().join("venv")));
}

#[test]
fn the_python_on_the_path_is_followed_through_its_link() {
    let tree = tempfile::tempdir().unwrap();
    let library = file(&tree, "real/lib/python3.11/dist-packages/nvidia/x/lib/libx.so.12");
    file(&tree, "real/bin/python3");
    fs::create_dir_all(tree.path().join("bin")).unwrap();
    std::os::unix::fs::symlink(tree.path().join("real/bin/python3"), tree.path().join("bin/python3"))
        .unwrap();
    let around = LibrarySearch {
        path: vec![tree.path().join("nowhere"), tree.path().join("bin")],
        ..LibrarySearch::default()
    };
    let found = candidates("device.x", None, &NAMES, &around);
    assert_eq!(inside(&tree, &found).len(), 1);
    assert!(library.canonicalize().unwrap() == inside(&tree, &found)[0].canonicalize().unwrap());
}

#[test]
fn a_configured_path_is_the_only_candidate() {
    let tree = tempfile::tempdir().unwrap();
    let file = file(&tree, "here/libx.so.12");
    let around = LibrarySearch { virtual_env: Some(tree.path().to_owned()), ..LibrarySearch::default() };
    let by_file = candidates("device.x", Some(&file), &NAMES, &around);
    assert_eq!(by_file, [Candidate { path: file, origin: Origin::Configured("device.x") }]);
    let by_folder = candidates("device.x", Some(&tree.path().join("here")), &NAMES, &around);
    let paths: Vec<_> = by_folder.iter().map(|p| p.path.strip_prefix(tree.path()).unwrap()).collect();
    assert_eq!(paths, [Path::new("here/libx.so.13"), Path::new("here/libx.so.12")]);
}

functions! {
    /// A library that every Linux has.
    Mathematics { cos }
}

impl Table for Mathematics {
    const NAME: &'static str = "mathematics";
    const MINIMUM: Version = Version(3, 0, 0);

    fn version(&self) -> Result<Version, Unusable> {
        Ok(Version(1, 0, 0))
    }
}

#[test]
fn what_is_absent_broken_too_old_or_lacks_functions_is_told_with_its_location() {
    let tree = tempfile::tempdir().unwrap();
    let broken = file(&tree, "libx.so.12");
    let by = |path: &Path| Candidate { path: path.into(), origin: Origin::Loader };
    let tried = [
        by(Path::new("libnosuch.so.1")),
        by(&broken),
        by(Path::new("libm.so.6")),
        by(Path::new("libc.so.6")),
    ];
    let missing = open::<Mathematics>("device.x", tried.to_vec()).unwrap_err();
    let why: Vec<String> = missing.looked.iter().map(|l| l.why.to_string()).collect();
    assert_eq!(why[0], "not there");
    assert!(why[1].contains("file too short") || why[1].contains("invalid ELF header"), "{}", why[1]);
    assert_eq!(why[2], "it is version 1.0.0, older than 3.0.0");
    assert_eq!(why[3], "it has no function cos");
    let text = missing.to_string();
    for word in ["mathematics (3.0.0 or newer) was not found", "libm.so.6 by the loader", "set device.x"] {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn the_file_behind_an_address_is_known() {
    assert_eq!(file_of(file_of as *const () as usize), std::env::current_exe().ok());
}

#[test]
fn a_search_takes_what_is_absolute_and_not_empty() {
    let around = LibrarySearch::from_variables(|name| match name {
        "PATH" => Some("/a:b:/c".into()),
        "VIRTUAL_ENV" => Some(String::new()),
        "HOME" => Some("/home/x".into()),
        _ => None,
    });
    assert_eq!(around.path, [Path::new("/a"), Path::new("/c")]);
    assert_eq!((around.virtual_env, around.cache), (None, Some("/home/x/.cache".into())));
}
