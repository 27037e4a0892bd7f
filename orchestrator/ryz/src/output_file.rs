//! Result files that are replaced atomically, so that no reader sees half of one, and a run that fails leaves the earlier one.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tempfile::NamedTempFile;

/// Refuses a file that [`replace`] could not write. `what` names it in errors.
///
/// # Errors
/// Returns the system's error, or an error if it is a folder or a device.
pub fn check(file: &Path, what: &str) -> anyhow::Result<()> {
    temporary_file_for(file, what).map(drop)
}

/// Writes a whole file. It keeps the permissions of the file that it replaces, and the links that point to it.
///
/// # Errors
/// Returns the errors of [`check`], and the system's error.
pub fn replace(file: &Path, text: &str, what: &str) -> anyhow::Result<()> {
    let context = || format!("cannot write {what}");
    let mut unfinished = temporary_file_for(file, what)?;
    unfinished.write_all(text.as_bytes()).with_context(context)?;
    unfinished.persist(target(file)).with_context(context)?;
    Ok(())
}

/// Refuses a file that [`store`] could not write. Creates its folder if necessary.
///
/// # Errors
/// Returns the errors of [`check`].
pub fn prepare(file: &Path) -> anyhow::Result<()> {
    let what = file.display().to_string();
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot write {what}"))?;
    check(file, &what)
}

/// Writes a whole file as [`replace`] does, in a folder that is created if necessary.
///
/// # Errors
/// Returns the errors of [`replace`].
pub fn store(file: &Path, text: &str) -> anyhow::Result<()> {
    prepare(file)?;
    replace(file, text, &file.display().to_string())
}

/// Creates a temporary file in the same folder.
fn temporary_file_for(file: &Path, what: &str) -> anyhow::Result<NamedTempFile> {
    if file.is_dir() {
        bail!("cannot write {what}: it is a folder; name a file in it");
    }
    if file.exists() && !file.is_file() {
        bail!("cannot write {what}: it is not a regular file; name another one");
    }
    let file = target(file);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The permissions of the file that it replaces, or of a new one; both less the umask.
    let permissions = std::fs::metadata(&file)
        .map_or_else(|_| Permissions::from_mode(0o666), |metadata| metadata.permissions());
    tempfile::Builder::new()
        .prefix(".ryz-")
        .permissions(permissions)
        .tempfile_in(folder)
        .with_context(|| format!("cannot write {what}"))
}

/// Returns the file that a link points to.
fn target(file: &Path) -> PathBuf {
    file.canonicalize().unwrap_or_else(|_| file.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_keeps_its_permissions_and_the_links_to_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "old").expect("written");
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("set");
        std::os::unix::fs::symlink(&file, &link).expect("linked");
        replace(&link, "new", "the file").expect("replaced");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "new");
        assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o640);
        assert!(link.is_symlink());
        let refused = |file: &Path| check(file, "--out x").unwrap_err().to_string();
        assert!(refused(folder.path()).contains("cannot write --out x: it is a folder"));
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
    }

    #[test]
    fn a_file_is_stored_in_a_folder_that_is_made() {
        let outside = tempfile::tempdir().expect("a folder");
        let file = outside.path().join("a/b/paths.json");
        store(&file, "one").expect("written");
        store(&file, "two").expect("written again");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "two");
        let error = store(&file.join("below"), "three").unwrap_err().to_string();
        assert!(error.contains("cannot write") && error.contains("below"), "{error}");
    }
}
