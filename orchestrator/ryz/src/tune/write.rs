//! Writes the results: the table of paths, and settings into a configuration file.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use ryzanstein_process_group::Error;
use toml_edit::{DocumentMut, Item, Table, TableLike, value};

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

/// Returns the text of a configuration file with these settings, dotted key and value; all else stays unchanged, comments
/// included.
///
/// # Errors
/// [`Error::Configuration`] for a text that is not TOML, or a section that is not a table.
pub fn edit_config(text: &str, settings: &[(&str, &str)]) -> anyhow::Result<String> {
    let wrong = |why: String| anyhow!(Error::Configuration(why));
    let mut document: DocumentMut =
        text.parse().map_err(|error| wrong(format!("the configuration file is no TOML: {error}")))?;
    for (key, text) in settings {
        let (sections, name) = key.rsplit_once('.').unwrap_or(("", key));
        let mut table: &mut dyn TableLike = document.as_table_mut();
        for section in sections.split('.').filter(|section| !section.is_empty()) {
            let item = table.entry(section).or_insert_with(|| Item::Table(Table::new()));
            table = item.as_table_like_mut().ok_or_else(|| {
                wrong(format!(
                    "`{section}` in the configuration file is no section; write it as [{sections}]"
                ))
            })?;
        }
        table.insert(
            name,
            match text.parse::<i64>() {
                Ok(number) if number.to_string() == *text => value(number),
                _ => text.parse::<bool>().map_or_else(|_| value(*text), value),
            },
        );
    }
    Ok(document.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_added_and_changed_and_all_else_stays() {
        let before = "# mine\n[process_group]\ntimeout = \"30s\" # long\n\n[nccl.env]\nNCCL_MAX_CTAS = 4\n";
        let settings = [("nccl.env.NCCL_MAX_CTAS", "8"), ("nccl.env.NCCL_ALGO", "Ring;allreduce:Tree")];
        let after = edit_config(before, &settings).expect("TOML");
        let head = "# mine\n[process_group]\ntimeout = \"30s\" # long\n\n[nccl.env]\n";
        assert_eq!(after, format!("{head}NCCL_MAX_CTAS = 8\nNCCL_ALGO = \"Ring;allreduce:Tree\"\n"));
        let inline = edit_config("nccl.env = { NCCL_MAX_CTAS = 4 }\n", &settings[..1]).expect("TOML");
        assert!(inline.contains("NCCL_MAX_CTAS = 8"), "{inline}");
        let settings = [("process_group.peer_memory", "false"), ("nccl.profile", "inference"), settings[1]];
        let new = edit_config("", &settings).expect("TOML");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("ryzanstein.toml");
        std::fs::write(&file, &new).expect("written");
        let sources = ryzanstein_config::Sources { file: Some(file), ..Default::default() };
        let config = ryzanstein_config::Config::load(&sources).expect("what is written loads");
        assert!(!config.process_group.peer_memory, "{new}");
        assert_eq!(config.nccl.env.get("NCCL_ALGO"), Some("Ring;allreduce:Tree"), "{new}");
        let refused =
            |text: &str| edit_config(text, &[("nccl.env.NCCL_MAX_CTAS", "8")]).unwrap_err().to_string();
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
