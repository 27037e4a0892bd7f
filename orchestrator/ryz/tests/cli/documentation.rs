//! The README and the book name the flags that `ryz` has, quote what it says, and link to files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::support::{Run, text};
use ryzanstein_config::{SECTIONS, keys};
use ryzanstein_orchestrator::catalogue::entries;

type Flags = BTreeSet<String>;

const COMMANDS: [&str; 12] = [
    "launch",
    "check",
    "generate",
    "bench",
    "plan",
    "tune",
    "doctor",
    "explain",
    "topo",
    "trace",
    "status",
    "config show",
];

/// The top of the repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(page: &Path) -> String {
    std::fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
}

/// The pages at the top of the repository and those of the book.
fn pages() -> Vec<PathBuf> {
    let folders = ["docs/src", "docs/src/decisions"].map(|folder| repository().join(folder));
    let entries = folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).expect("the book"));
    let book = entries.map(|entry| entry.expect("an entry").path());
    let is_page = |page: &PathBuf| page.extension().is_some_and(|extension| extension == "md");
    let top =
        ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(|page| repository().join(page));
    top.into_iter().chain(book.filter(is_page)).collect()
}

/// The flags that `ryz COMMAND --help` lists, long and short.
fn flags_of(command: &str) -> Flags {
    let arguments: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
    let output = Run::new(&arguments, &[]).finish();
    let help = text(&output.stdout);
    // Explanations stand further to the right.
    let is_flag =
        |line: &&str| line.trim_start().starts_with('-') && line.len() - line.trim_start().len() <= 6;
    let flags: Flags = help.lines().filter(is_flag).flat_map(flags_in).collect();
    assert!(flags.contains("--help"), "{help}");
    flags
}

/// The words of a text that are flags, as far as the first one that is no part of the flags: their explanation.
fn flags_in(text: &str) -> Vec<String> {
    let of_flags = text.trim().split("  ").next().unwrap_or_default();
    let words = of_flags.split(|c: char| c.is_whitespace() || "`,.;:()[]'\"|\\=".contains(c));
    words.filter(|word| is_flag(word)).map(str::to_owned).collect()
}

fn is_flag(word: &str) -> bool {
    let name = word.trim_start_matches('-');
    matches!(word.len() - name.len(), 1 | 2)
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Each command with a flag that it is given in this text, on command lines and in code.
fn used(page: &str) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    for piece in page.replace("cargo run --release -- ", "ryz ").split(['\n', '`']) {
        for command in COMMANDS {
            let Some((_, rest)) = piece.split_once(&format!("ryz {command} ")) else { continue };
            // `--` and `|` begin another program.
            let ours = rest.split("-- ").next().and_then(|ours| ours.split("| ").next()).unwrap_or_default();
            let ours = ours.split_whitespace().flat_map(flags_in);
            all.extend(ours.map(|flag| (command, flag)));
        }
    }
    all
}

#[test]
fn commands_in_the_readme_and_the_book_have_the_flags_they_are_given() {
    let real: BTreeMap<&str, Flags> = COMMANDS.iter().map(|command| (*command, flags_of(command))).collect();
    let mut checked = 0;
    for page in pages() {
        for (command, flag) in used(&read(&page)) {
            assert!(real[command].contains(&flag), "{}: `ryz {command}` has no {flag}", page.display());
            checked += 1;
        }
    }
    assert!(checked > 50, "only {checked} flags were found");
}

/// Returns the launcher's own lines in this text, with `N` for numbers.
fn told(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with("ryz: ")).map(|line| {
        let words = line.split(' ').map(|word| if word.parse::<u32>().is_ok() { "N" } else { word });
        words.collect::<Vec<_>>().join(" ")
    })
}

#[test]
fn the_readme_and_the_book_quote_the_launcher_as_it_speaks() {
    let commands: [&[&str]; 3] =
        [&["launch", "-n", "2"], &["launch", "-n", "2", "--", "true"], &["launch", "-n", "2", "--", "false"]];
    let real: BTreeSet<String> = commands
        .into_iter()
        .flat_map(|command| told(&text(&Run::new(command, &[]).finish().stderr)).collect::<Vec<_>>())
        .collect();
    assert_eq!(real.len(), commands.len(), "{real:?}");
    let quoted: BTreeSet<String> =
        pages().iter().flat_map(|page| told(&read(page)).collect::<Vec<_>>()).collect();
    assert_eq!(quoted, real, "the pages quote each of these lines, and no other");
}

/// Ends of words such as `job.log` and `model.generate()`, which are no settings.
const FILES_AND_METHODS: [&str; 13] = [
    "cc",
    "conf",
    "json",
    "log",
    "md",
    "rs",
    "safetensors",
    "secret",
    "toml",
    "yaml",
    "complete",
    "decoder",
    "generate",
];

/// The words of a text that read like settings: a section, a dot and a name.
fn settings_in(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '.');
    words.map(|word| word.trim_end_matches('.')).filter(|word| {
        word.rsplit_once('.').is_some_and(|(section, name)| {
            SECTIONS.iter().any(|known| known.name == section)
                && name.starts_with(|c: char| c.is_ascii_lowercase())
                // Files, and methods of a variable of the same name.
                && !FILES_AND_METHODS.contains(&name)
        })
    })
}

#[test]
fn every_setting_that_an_explanation_or_a_page_names_exists() {
    let known: BTreeSet<&str> = keys().map(|key| key.key).collect();
    let is_known = |word: &str| known.contains(word) || SECTIONS.iter().any(|section| section.name == word);
    let (mut checked, mut wrong) = (0, Vec::new());
    let explained = entries().map(|entry| (entry.id.clone(), format!("{}\n{}", entry.cause, entry.remedy)));
    let written = pages().into_iter().map(|page| (page.display().to_string(), read(&page)));
    for (place, text) in explained.chain(written) {
        for word in settings_in(&text) {
            checked += 1;
            if !is_known(word) {
                wrong.push(format!("{place}: {word}"));
            }
        }
    }
    assert!(wrong.is_empty() && checked > 100, "{checked} checked; {wrong:#?}");
}

#[test]
fn every_link_of_the_readme_and_the_book_leads_to_a_file() {
    let mut checked = 0;
    for page in pages() {
        let folder = page.parent().expect("a page is in a folder");
        let text = read(&page);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if target.is_empty() || target.contains("://") {
                continue;
            }
            assert!(folder.join(target).exists(), "{}: {target} is not there", page.display());
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} links were found");
}
