//! Errors as people paste them are explained by the right entries.

use ryzanstein_orchestrator::catalogue::{find, scan};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pasted {
    entry: String,
    source: String,
    text: String,
}

#[derive(Deserialize)]
struct Texts {
    texts: Vec<Pasted>,
}

fn texts() -> Vec<Pasted> {
    let Texts { texts } = toml::from_str(include_str!("texts.toml")).expect("well formed");
    assert!(texts.iter().all(|text| text.source.starts_with("https://")), "a text has no source");
    texts
}

#[test]
fn pasted_texts_are_explained_by_their_entries() {
    let texts = texts();
    let wrong: Vec<_> = texts
        .iter()
        .map(|Pasted { entry, text, .. }| (entry, find(text).map(|found| &found.id), text))
        .filter(|(entry, found, _)| *found != Some(*entry))
        .collect();
    assert!(wrong.is_empty() && texts.len() > 60, "of {} texts: {wrong:#?}", texts.len());
}

#[test]
fn what_a_terminal_and_a_launcher_add_to_a_text_changes_no_explanation() {
    for Pasted { entry, text, .. } in texts() {
        let line = |line: &str| format!("\x1b[36m[rank 3]\x1b[0m {}", line.to_ascii_uppercase());
        let lines: Vec<_> = text.lines().map(line).collect();
        let found = scan(lines.join("\n").as_bytes()).expect("memory");
        assert!(found.iter().any(|found| found.entry.id == entry), "{entry} is not in {found:#?}");
        assert!(found.iter().all(|found| !found.text.contains('\x1b')), "{found:#?}");
    }
}
