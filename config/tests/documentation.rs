//! The page of the book that lists the settings says what the code does.

use ryzanstein_config::{KeyInfo, SECTIONS, SectionInfo};
use std::fmt::Write as _;

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/configuration.md"));

/// A section as the page must have it.
fn written(section: &SectionInfo) -> String {
    let mut text = format!("### `[{}]`\n\n{}\n\n", section.name, section.doc);
    text.push_str("| setting, variable | default | takes | meaning |\n|---|---|---|---|\n");
    for key in section.keys {
        let KeyInfo { key: name, default, expected, doc, .. } = key;
        let variable = key.environment_variable();
        let default = if default.is_empty() { "unset".into() } else { format!("`{default}`") };
        let _ = writeln!(text, "| `{name}`<br>`{variable}` | {default} | {expected} | {doc} |");
    }
    text
}

#[test]
fn the_page_on_configuration_has_every_setting_with_its_default_variable_and_meaning() {
    for section in SECTIONS {
        let wanted = written(section);
        assert!(PAGE.contains(&wanted), "docs/src/configuration.md must have this:\n\n{wanted}");
    }
}

#[test]
fn the_page_on_configuration_names_no_setting_that_there_is_not() {
    let known: Vec<String> = ryzanstein_config::keys().map(KeyInfo::environment_variable).collect();
    let words = PAGE.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    for name in words.filter(|word| word.starts_with("RYZ_") && word.contains("__")) {
        assert!(known.iter().any(|variable| variable == name), "docs/src/configuration.md names `{name}`");
    }
}
