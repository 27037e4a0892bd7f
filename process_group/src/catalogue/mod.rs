//! Known errors: maps a message to its cause and its remedy.
//!
//! The entries are data, in `catalogue.toml`: those of this library, of NCCL, CUDA, InfiniBand, PyTorch, schedulers and the
//! operating system. The orchestrator explains texts with them, and prints them in the troubleshooting page of the book.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;
use regex::bytes::{RegexSet, RegexSetBuilder};
use serde::Deserialize;

/// A known error.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name, which never changes: `nccl-duplicate-gpu`.
    pub id: String,
    /// Regular expressions of its messages, in any letter case: a line with a match of any of them is such an error.
    pub patterns: Vec<String>,
    /// A real message that this entry explains and no earlier entry does.
    pub sample: String,
    /// The address of a page or source that contains the sample. If there is none, a test provokes the error, or builds its value
    /// where only a defect would: `orchestrator/ryz/tests/cli/explain/provoked.rs`.
    pub source: Option<String>,
    /// The cause. Like the remedy, it is the end of a sentence, without a full stop.
    pub cause: String,
    /// The remedy.
    pub remedy: String,
    /// True if the message itself states cause and remedy, so that nothing needs to be added to it.
    #[serde(default)]
    pub is_plain: bool,
}

/// Entries on one topic.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// Its entries. More specific entries come first.
    pub entries: Vec<Entry>,
}

/// The file of entries.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    noise: Vec<String>,
    frames: Vec<String>,
    sections: Vec<Section>,
}

struct Catalogue {
    sections: Vec<Section>,
    /// The patterns of all entries, in their order.
    patterns: RegexSet,
    /// The section and the entry of each pattern.
    owners: Vec<(usize, usize)>,
    noise: RegexSet,
    frames: RegexSet,
}

impl Catalogue {
    fn parse(text: &str) -> Result<Self, String> {
        let set = |patterns: &[&String]| {
            let mut builder = RegexSetBuilder::new(patterns);
            builder.case_insensitive(true).unicode(false).build().map_err(|error| error.to_string())
        };
        let File { noise, frames, sections } = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut patterns = Vec::new();
        let mut owners = Vec::new();
        for (s, section) in sections.iter().enumerate() {
            for (e, entry) in section.entries.iter().enumerate() {
                patterns.extend(&entry.patterns);
                owners.resize(patterns.len(), (s, e));
            }
        }
        let patterns = set(&patterns)?;
        let [noise, frames] = [noise, frames].map(|all| set(&all.iter().collect::<Vec<_>>()));
        Ok(Self { sections, patterns, owners, noise: noise?, frames: frames? })
    }

    /// Returns the number of the first pattern that the line has, and its entry.
    fn explain(&self, line: &str) -> Option<(usize, &Entry)> {
        let first = self.patterns.matches(line.as_bytes()).iter().next()?;
        let (section, entry) = self.owners[first];
        Some((first, &self.sections[section].entries[entry]))
    }
}

static CATALOGUE: LazyLock<Catalogue> =
    LazyLock::new(|| Catalogue::parse(include_str!("catalogue.toml")).expect("the tests parse this file"));

/// Returns all sections. Those that explain more are first, because a line may match several entries.
pub fn sections() -> &'static [Section] {
    &CATALOGUE.sections
}

/// Returns the first entry, in the catalogue's order, that explains a line of the text. Colours and stack frames are ignored.
pub fn find(text: &str) -> Option<&'static Entry> {
    let text = without_colors(text);
    let mut frames = FrameFilter::default();
    let lines = text.lines().filter(|line| !frames.is_frame(line));
    let found = lines.filter_map(|line| CATALOGUE.explain(line)).min_by_key(|(order, _)| *order);
    found.map(|(_, entry)| entry)
}

/// Returns the first entry that explains a line, which has no colours and is not a stack frame.
pub fn find_in_line(line: &str) -> Option<&'static Entry> {
    CATALOGUE.explain(line).map(|(_, entry)| entry)
}

/// Returns the remedy for an error of NCCL or CUDA, if it is known.
pub(crate) fn remedy(text: &str) -> Option<&'static str> {
    find(text).map(|entry| &*entry.remedy)
}

/// Removes a terminal's escape sequences, such as colours.
pub fn without_colors(text: &str) -> Cow<'_, str> {
    static ESCAPES: LazyLock<Regex> = LazyLock::new(|| {
        let sequence = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])";
        Regex::new(sequence).expect("a regular expression")
    });
    ESCAPES.replace_all(text, "")
}

/// Tells lines that describe where an error was raised from lines that describe the error.
#[derive(Clone, Copy, Default, Debug)]
pub struct FrameFilter {
    /// Indentation of the frame that the last line belonged to.
    frame: Option<usize>,
}

impl FrameFilter {
    /// Returns true if this line is part of a stack trace. Must be called for each line of a text, in order; the lines have no
    /// colours.
    pub fn is_frame(&mut self, line: &str) -> bool {
        // What torchrun and our launcher put before each line of a rank.
        static PREFIX: LazyLock<Regex> =
            LazyLock::new(|| Regex::new(r"^(?:\[rank ?[0-9]+\]:? ?)*").expect("a regular expression"));
        let own = PREFIX.find(line).map_or(line, |prefix| &line[prefix.end()..]);
        let indent = own.len() - own.trim_start().len();
        if CATALOGUE.frames.is_match(own.as_bytes()) {
            self.frame = Some(indent);
            return true;
        }
        // Below a frame, its source text is indented further.
        if self.frame.is_some_and(|frame| indent > frame) {
            return true;
        }
        self.frame = None;
        CATALOGUE.noise.is_match(own.as_bytes())
    }
}

/// Returns the lines of a program's last output that tell what went wrong, at most `most`, in their order.
///
/// Empty lines and stack traces are left out, unless nothing else is there. If too many lines are left, these are the last ones,
/// and before them the line that the catalogue explains best.
pub fn telling_lines<'a>(tail: impl IntoIterator<Item = &'a str>, most: usize) -> Vec<&'a str> {
    let tail: Vec<&str> = tail.into_iter().collect();
    let mut frames = FrameFilter::default();
    let mut lines = tail.clone();
    lines.retain(|line| !frames.is_frame(&without_colors(line)) && !line.trim().is_empty());
    if lines.is_empty() {
        lines = tail;
    }
    let rest = lines.split_off(lines.len().saturating_sub(most));
    let order = |line: &&str| CATALOGUE.explain(&without_colors(line)).map_or(usize::MAX, |(order, _)| order);
    let best = rest.iter().map(order).min().unwrap_or_default();
    match lines.into_iter().min_by_key(order).filter(|line| order(line) < best) {
        Some(line) => [line].into_iter().chain(rest.into_iter().skip(1)).collect(),
        None => rest,
    }
}

#[cfg(test)]
mod tests;
