//! All settings as data, for `ryz config show`, the documentation and suggestions for unknown names.

/// A group of settings: a `[table]` of the file.
#[derive(Clone, Copy, Debug)]
pub struct SectionInfo {
    /// Its dotted name, such as `process_group.tcp`.
    pub name: &'static str,
    /// Its description.
    pub doc: &'static str,
    /// Its settings, in the order of the fields of the struct.
    pub keys: &'static [KeyInfo],
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct KeyInfo {
    /// The dotted key, such as `process_group.timeout`.
    pub key: &'static str,
    /// The default in the users' syntax; empty if there is none.
    pub default: &'static str,
    /// Its description.
    pub doc: &'static str,
    /// The accepted values. Completes the sentence "expected …".
    pub expected: &'static str,
    /// An example of a valid value.
    pub example: &'static str,
    /// True if the setting may be a table in the file.
    pub is_table: bool,
}

impl KeyInfo {
    /// Returns the name of its environment variable, such as `RYZ_PROCESS_GROUP__TIMEOUT`.
    pub fn environment_variable(&self) -> String {
        environment_variable(self.key)
    }
}

pub(crate) fn environment_variable(key: &str) -> String {
    format!("RYZ_{}", key.to_uppercase().replace('.', "__"))
}

/// Iterates over all settings.
///
/// ```
/// let key = ryzanstein_config::keys().find(|key| key.key == "process_group.timeout").unwrap();
/// assert_eq!(key.default, "5m");
/// assert_eq!(key.environment_variable(), "RYZ_PROCESS_GROUP__TIMEOUT");
/// ```
pub fn keys() -> impl Iterator<Item = &'static KeyInfo> {
    crate::SECTIONS.iter().flat_map(|section| section.keys)
}

/// Returns the candidate nearest to `text`, if at most a third of its letters differ.
pub(crate) fn nearest(text: &str, candidates: impl Iterator<Item = String>) -> Option<String> {
    let text = text.to_lowercase();
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(&text, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| distance * 3 <= candidate.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}
