//! Known errors: maps a message to its cause and its remedy.
//!
//! The entries are data, in sections. This module contains those of NCCL, CUDA, InfiniBand, the operating system and the groups.
//! The orchestrator adds its own sections, explains texts with all of them, and prints them in the troubleshooting page of the
//! book.

mod calls;
mod gpu;
mod infiniband;
mod nccl;
mod system;

/// A known error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its name, which never changes: `nccl-duplicate-gpu`.
    pub id: &'static str,
    /// Patterns of its messages: a line that matches any of them is such an error. In lower case; `*` stands for any text within
    /// the line.
    pub patterns: &'static [&'static str],
    /// A real message that this entry explains and no earlier entry does.
    pub sample: &'static str,
    /// Origin of the sample.
    pub source: Source,
    /// The cause. Like the remedy, it is the end of a sentence, without a full stop.
    pub cause: &'static str,
    /// The remedy.
    pub remedy: &'static str,
    /// True if the message itself states cause and remedy, so that nothing needs to be added to it.
    pub is_plain: bool,
}

/// Origin of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A test provokes this error, or builds its value where only a defect would: `orchestrator/ryz/tests/cli/explain/provoked.rs`.
    Provoked,
    /// The page or source at this address contains the message.
    Documented(&'static str),
}

/// Entries on one topic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Section {
    /// Its heading.
    pub title: &'static str,
    /// Its entries. More specific entries come first.
    pub entries: &'static [Entry],
}

/// The sections of this crate. More specific sections come first, because a line may match several entries.
pub const SECTIONS: &[Section] = &[
    Section { title: "Calls of a group", entries: calls::ENTRIES },
    Section { title: "NCCL", entries: nccl::ENTRIES },
    Section { title: "InfiniBand and RoCE", entries: infiniband::ENTRIES },
    Section { title: "GPUs and drivers", entries: gpu::ENTRIES },
    Section { title: "Operating system", entries: system::ENTRIES },
    Section { title: "NCCL's codes alone", entries: nccl::CODES },
];

impl Entry {
    /// Returns true if this line, in lower case, is such an error.
    pub fn matches(&self, line: &str) -> bool {
        self.patterns.iter().any(|pattern| has(line, pattern))
    }
}

/// Returns the first entry of these sections that explains a line of the text.
pub fn find<'a>(sections: impl IntoIterator<Item = &'a Section>, text: &str) -> Option<&'a Entry> {
    let text = text.to_ascii_lowercase();
    let mut entries = sections.into_iter().flat_map(|section| section.entries);
    entries.find(|entry| text.lines().any(|line| entry.matches(line)))
}

/// Returns the remedy for an error of NCCL or CUDA, if it is known.
pub(crate) fn remedy(text: &str) -> Option<&'static str> {
    find(SECTIONS, text).map(|entry| entry.remedy)
}

/// Returns true if the line contains the parts of the pattern, in order.
fn has(line: &str, pattern: &str) -> bool {
    let mut rest = line;
    pattern.split('*').all(|part| match rest.split_once(part) {
        Some((_, behind)) => {
            rest = behind;
            true
        }
        None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_pattern_stand_in_a_line_in_their_order() {
        for (line, pattern, expected) in [
            ("call to ibv_reg_mr failed", "ibv_reg_mr", true),
            ("call to ibv_reg_mr_iova2 failed with", "ibv_reg_mr*failed", true),
            ("failed: ibv_reg_mr", "ibv_reg_mr*failed", false),
            ("abab", "ab*ab", true),
            ("aba", "ab*ba", false),
            ("", "a", false),
        ] {
            assert_eq!(has(line, pattern), expected, "`{pattern}` in `{line}`");
        }
    }

    #[test]
    fn a_pattern_does_not_cross_lines_and_the_best_entry_of_all_lines_wins() {
        let text = "ncclSystemError: System call failed\nError: failed to extend /dev/shm/nccl-x to 4 bytes";
        assert_eq!(find(SECTIONS, text).map(|entry| entry.id), Some("shared-memory-too-small"));
        assert_eq!(find(SECTIONS, "connect to\n<1> failed : connection\nrefused"), None);
    }
}
