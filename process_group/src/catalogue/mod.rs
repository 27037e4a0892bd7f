//! Known errors: maps a message to its cause and its remedy.
//!
//! The entries are data, in `catalogue.toml`: those of this library, of NCCL, CUDA, InfiniBand, PyTorch, schedulers and the
//! operating system. The orchestrator explains texts with them, and prints them in the troubleshooting page of the book.

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::{LazyLock, Mutex};

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;
use regex_automata::{Input, MatchKind, PatternSet};
use serde::Deserialize;

use crate::types::sync::lock;

/// A known error.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name, which never changes: `nccl-duplicate-gpu`.
    pub id: String,
    /// Regular expressions of its messages, in lower case: a line with a match of any of them is such an error, whatever its case.
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
    /// True if the message says that another process failed, or did not do its part: it is not the origin of the failure.
    #[serde(default)]
    pub is_echo: bool,
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
    misleading: Vec<String>,
    /// What `<xid>` in a pattern stands for.
    xid: String,
    sections: Vec<Section>,
}

/// Meaning of a pattern of the file.
#[derive(Clone, Copy, Debug)]
enum Meaning {
    /// The entry of this number in this section.
    Entry(usize, usize),
    Frame,
    Noise,
    Misleading,
}

struct Catalogue {
    sections: Vec<Section>,
    /// All patterns at once, with the states that lines have led to. A line costs one pass, whatever the number of patterns.
    patterns: DFA,
    states: Mutex<Cache>,
    /// The meaning of each pattern. Those of entries are first, in the order of the file.
    meanings: Vec<Meaning>,
}

impl Catalogue {
    fn parse(text: &str) -> Result<Self, String> {
        /// Maximum size of the states, in bytes; if it is reached, they are built anew.
        const STATES: usize = 16 << 20;
        let File { noise, frames, misleading, xid, mut sections } =
            toml::from_str(text).map_err(|error| error.to_string())?;
        let entries = sections.iter_mut().flat_map(|section| &mut section.entries);
        for pattern in entries.flat_map(|entry| &mut entry.patterns) {
            *pattern = pattern.replace("<xid>", &xid);
        }
        let mut patterns = Vec::new();
        let mut meanings = Vec::new();
        for (s, section) in sections.iter().enumerate() {
            for (e, entry) in section.entries.iter().enumerate() {
                patterns.extend(&entry.patterns);
                meanings.resize(patterns.len(), Meaning::Entry(s, e));
            }
        }
        let others =
            [(&frames, Meaning::Frame), (&noise, Meaning::Noise), (&misleading, Meaning::Misleading)];
        for (list, meaning) in others {
            patterns.extend(list);
            meanings.resize(patterns.len(), meaning);
        }
        let patterns = DFA::builder()
            .configure(DFA::config().match_kind(MatchKind::All).cache_capacity(STATES))
            .syntax(syntax::Config::new().unicode(false).utf8(false))
            .thompson(thompson::Config::new().utf8(false).which_captures(WhichCaptures::None))
            .build_many(&patterns)
            .map_err(|error| error.to_string())?;
        Ok(Self { sections, states: Mutex::new(patterns.create_cache()), patterns, meanings })
    }

    /// Returns the patterns of a line, which is in lower case.
    fn patterns_of(&self, line: &str) -> PatternSet {
        let mut found = PatternSet::new(self.meanings.len());
        let mut states = lock(&self.states);
        self.patterns
            .try_which_overlapping_matches(&mut states, &Input::new(line), &mut found)
            .expect("no byte ends a search, and states may be built anew without limit");
        found
    }
}

static CATALOGUE: LazyLock<Catalogue> =
    LazyLock::new(|| Catalogue::parse(include_str!("catalogue.toml")).expect("the tests parse this file"));

/// Returns all sections. Those that explain more are first, because a line may match several entries.
pub fn sections() -> &'static [Section] {
    &CATALOGUE.sections
}

/// Returns the first entry, in the catalogue's order, that explains a line of the text. Stack traces are ignored.
pub fn find(text: &str) -> Option<&'static Entry> {
    let mut explainer = LineExplainer::default();
    let known = text.lines().filter_map(|line| explainer.explain(line).known());
    known.min_by_key(|(order, _)| *order).map(|(_, entry)| entry)
}

/// Returns the remedy for an error of NCCL or CUDA, if it is known.
pub(crate) fn remedy(text: &str) -> Option<&'static str> {
    find(text).map(|entry| &*entry.remedy)
}

/// Removes a terminal's escape sequences, such as colours.
pub fn without_colors(text: &str) -> Cow<'_, str> {
    if text.contains('\x1b') { anstream::adapter::strip_str(text).to_string().into() } else { text.into() }
}

/// Explains the lines of a text, one after the other.
#[derive(Clone, Copy, Default, Debug)]
pub struct LineExplainer {
    /// Indentation of the stack frame that the last line belonged to.
    frame: Option<usize>,
}

/// Kind of a line of a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// A part of a stack trace, which says where an error was raised, not which.
    StackTrace,
    /// A known error.
    Known {
        /// The first entry that explains it.
        entry: &'static Entry,
        /// The place of its pattern in the catalogue: of several lines, the lowest explains most.
        order: usize,
    },
    /// Anything else.
    Other,
}

impl Line {
    fn known(self) -> Option<(usize, &'static Entry)> {
        match self {
            Self::Known { entry, order } => Some((order, entry)),
            Self::StackTrace | Self::Other => None,
        }
    }
}

impl LineExplainer {
    /// Explains the next line, whatever its letter case, its colours, and the rank in front of it.
    pub fn explain(&mut self, line: &str) -> Line {
        let line = without_colors(line).to_ascii_lowercase();
        let line = without_rank(&line);
        let indent = line.len() - line.trim_start().len();
        let found = CATALOGUE.patterns_of(line);
        let mut entry = None;
        let (mut is_frame, mut is_noise) = (false, false);
        for pattern in found.iter().map(|pattern| pattern.as_usize()) {
            match CATALOGUE.meanings[pattern] {
                Meaning::Entry(s, e) => entry = entry.or(Some((pattern, &CATALOGUE.sections[s].entries[e]))),
                Meaning::Frame => is_frame = true,
                Meaning::Noise => is_noise = true,
                // Patterns of entries come first.
                Meaning::Misleading => entry = None,
            }
        }
        if is_frame {
            self.frame = Some(indent);
        } else if self.frame.is_some_and(|frame| indent <= frame) {
            self.frame = None;
        }
        // Below a frame, its source text is indented further.
        if self.frame.is_some() || is_noise {
            return Line::StackTrace;
        }
        entry.map_or(Line::Other, |(order, entry)| Line::Known { entry, order })
    }
}

/// Returns a line, which is in lower case, without what torchrun and our launcher put before the lines of a rank.
fn without_rank(mut line: &str) -> &str {
    while let Some((_, rest)) = line.strip_prefix("[rank").and_then(|line| line.split_once(']')) {
        let rest = rest.strip_prefix(':').unwrap_or(rest);
        line = rest.strip_prefix(' ').unwrap_or(rest);
    }
    line
}

/// Returns the lines of a program's last output that tell what went wrong, at most `most`, in their order.
///
/// Empty lines and stack traces are left out, unless nothing else is there. If too many lines are left, these are the last ones,
/// and before them the line that the catalogue explains best.
pub fn telling_lines<'a>(tail: impl IntoIterator<Item = &'a str>, most: NonZeroUsize) -> Vec<&'a str> {
    let most = most.get();
    let tail: Vec<&str> = tail.into_iter().collect();
    let mut explainer = LineExplainer::default();
    let explained = tail.iter().map(|line| (*line, explainer.explain(line)));
    let mut lines: Vec<(&str, Line)> =
        explained.filter(|(text, line)| *line != Line::StackTrace && !text.trim().is_empty()).collect();
    if lines.is_empty() {
        return tail[tail.len().saturating_sub(most)..].to_vec();
    }
    let mut rest = lines.split_off(lines.len().saturating_sub(most));
    let order = |(_, line): &(&str, Line)| line.known().map_or(usize::MAX, |(order, _)| order);
    let best = lines.into_iter().min_by_key(order);
    if let Some(best) = best.filter(|best| rest.iter().all(|line| order(best) < order(line))) {
        rest[0] = best;
    }
    rest.into_iter().map(|(text, _)| text).collect()
}

#[cfg(test)]
mod tests;
