//! Writes what was found: the table of paths, and settings into a configuration file.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use ryzanstein_process_group::Error;
use toml_edit::{DocumentMut, Item, Table, value};

use crate::output_file;

/// Replaces a file at once, so that nobody reads half of it. Makes the folder that it is in.
///
/// # Errors
/// What the system says, with the file's name.
pub fn store_table(file: &Path, text: &str) -> anyhow::Result<()> {
    let what = file.display().to_string();
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot write {what}"))?;
    output_file::replace(file, text, &what)
}

/// The text of a configuration file with these settings, dotted key and value; all else stays as it is, comments included.
///
/// # Errors
/// [`Error::Configuration`] for a text that is no TOML, or a section that is none.
pub fn edit_config(text: &str, settings: &[(&str, &str)]) -> anyhow::Result<String> {
    let wrong = |why: String| anyhow!(Error::Configuration(why));
    let mut document: DocumentMut =
        text.parse().map_err(|error| wrong(format!("the configuration file is no TOML: {error}")))?;
    for (key, text) in settings {
        let (sections, name) = key.rsplit_once('.').unwrap_or(("", key));
        let mut table: &mut Table = document.as_table_mut();
        for section in sections.split('.').filter(|section| !section.is_empty()) {
            let item = table.entry(section).or_insert_with(|| Item::Table(Table::new()));
            table = item.as_table_mut().ok_or_else(|| {
                wrong(format!(
                    "`{section}` in the configuration file is no section; write it as [{sections}]"
                ))
            })?;
        }
        table[name] = match text.parse::<i64>() {
            Ok(number) if number.to_string() == *text => value(number),
            _ => text.parse::<bool>().map_or_else(|_| value(*text), value),
        };
    }
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_added_and_changed_and_all_else_stays() {
        let before = "# mine\n[process_group]\ntimeout = \"30s\" # long\n\n[nccl]\nmax_ctas = 4\n";
        let after =
            edit_config(before, &[("nccl.max_ctas", "8"), ("nccl.profile", "inference")]).expect("TOML");
        assert_eq!(
            after,
            "# mine\n[process_group]\ntimeout = \"30s\" # long\n\n[nccl]\nmax_ctas = 8\nprofile = \"inference\"\n"
        );
        let new =
            edit_config("", &[("nccl.infiniband", "true"), ("process_group.tcp.spin", "0s")]).expect("TOML");
        assert!(
            new.contains("[nccl]\ninfiniband = true\n")
                && new.contains("[process_group.tcp]\nspin = \"0s\"\n"),
            "{new}"
        );
        let refused = |text: &str| edit_config(text, &[("nccl.max_ctas", "8")]).unwrap_err().to_string();
        assert!(refused("[nccl").contains("no TOML"));
        assert!(refused("nccl = 3").contains("no section"));
    }

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
