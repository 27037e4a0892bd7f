//! Known errors: from a message to its cause and what to do about it.
//!
//! The entries are data, in sections. Here are those of NCCL, CUDA, InfiniBand, the operating system and the groups; the
//! orchestrator adds its own, explains texts with all of them, and prints them in the book's page on troubleshooting.

mod calls;
mod gpu;
mod infiniband;
mod nccl;
mod system;

/// A known error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its name, which stays: `nccl-duplicate-gpu`.
    pub id: &'static str,
    /// How its messages read: a line with any of these is one. In lower case; `*` stands for any text within the line.
    pub patterns: &'static [&'static str],
    /// A real message, which this entry explains and no other before it.
    pub sample: &'static str,
    /// Where the sample is from.
    pub source: Source,
    /// Why it happens. Like the remedy, the rest of a line, without a full stop.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
    /// Whether the message itself says all this, so that nothing need be added where it is shown.
    pub is_plain: bool,
}

/// Where a sample is from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A test provokes this error, or builds its value where only a defect would: `orchestrator/ryz/tests/cli/explain/provoked.rs`.
    Provoked,
    /// The page or the source at this address has the message.
    Documented(&'static str),
}

/// Entries about one thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Section {
    /// Its heading.
    pub title: &'static str,
    /// Its entries. What explains more stands first.
    pub entries: &'static [Entry],
}

/// The sections of this crate. What explains more stands first: a line may match several entries.
pub const SECTIONS: &[Section] = &[
    Section { title: "Calls of a group", entries: calls::ENTRIES },
    Section { title: "NCCL", entries: nccl::ENTRIES },
    Section { title: "InfiniBand and RoCE", entries: infiniband::ENTRIES },
    Section { title: "GPUs and drivers", entries: gpu::ENTRIES },
    Section { title: "Operating system", entries: system::ENTRIES },
    Section { title: "NCCL's codes alone", entries: nccl::CODES },
];

impl Entry {
    /// Whether this line, in lower case, is such an error.
    pub fn matches(&self, line: &str) -> bool {
        self.patterns.iter().any(|pattern| has(line, pattern))
    }
}

/// The first entry of these sections that explains a line of the text.
pub fn find<'a>(sections: impl IntoIterator<Item = &'a Section>, text: &str) -> Option<&'a Entry> {
    let text = text.to_ascii_lowercase();
    let mut entries = sections.into_iter().flat_map(|section| section.entries);
    entries.find(|entry| text.lines().any(|line| entry.matches(line)))
}

/// What to do about an error of NCCL or CUDA, if it is known.
pub(crate) fn remedy(text: &str) -> Option<&'static str> {
    find(SECTIONS, text).map(|entry| entry.remedy)
}

/// Whether the parts of the pattern stand in the line, one behind the other.
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
