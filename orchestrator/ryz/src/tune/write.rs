//! Writes the table of paths.

use std::path::Path;

use anyhow::Context as _;

use crate::output_file;

/// Replaces a file atomically, so that no reader sees half of it. Creates its folder.
///
/// # Errors
/// Returns the system's error, with the file's name.
pub fn store_table(file: &Path, text: &str) -> anyhow::Result<()> {
    let what = file.display().to_string();
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot write {what}"))?;
    output_file::replace(file, text, &what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_written_into_a_folder_that_is_made() {
        let outside = tempfile::tempdir().expect("a folder");
        let file = outside.path().join("a/b/paths.json");
        store_table(&file, "one").expect("written");
        store_table(&file, "two").expect("written again");
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "two");
        let error = store_table(&file.join("below"), "three").unwrap_err().to_string();
        assert!(error.contains("cannot write") && error.contains("below"), "{error}");
    }
}
