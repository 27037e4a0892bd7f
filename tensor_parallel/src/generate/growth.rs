//! Limits on the growth of a text by a `tokenizer.json`.

use serde::Serialize;
use serde_json::Value;

/// Maximum length of a string in the file. Far more than a token needs.
const LONGEST_STRING: usize = 64 << 10;
/// Maximum factor by which rules may lengthen a text one after the other. Far more than known models need.
const MOST_GROWTH: f64 = 4096.0;
/// The factor that is assumed for a table of replacements.
const TABLE_GROWTH: f64 = 16.0;

/// Refuses a file with a string that no tokenizer needs.
pub(super) fn check_strings(file: &[u8]) -> Result<(), String> {
    let (mut start, mut is_table, mut escaped) = (None, false, false);
    for (at, byte) in file.iter().enumerate() {
        match (start, byte) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), b'\\') => escaped = true,
            (Some(first), b'"') => {
                if at - first > LONGEST_STRING && !is_table {
                    return Err(format!("a string of {} bytes; the most is {LONGEST_STRING}", at - first));
                }
                is_table = &file[first..at] == b"precompiled_charsmap";
                start = None;
            }
            (None, b'"') => start = Some(at + 1),
            _ => {}
        }
    }
    Ok(())
}

/// Refuses rules, such as those of a normalizer, that may lengthen a text too much.
pub(super) fn check_rules(rules: &impl Serialize) -> Result<(), String> {
    let growth = growth(&serde_json::to_value(rules).map_err(|error| error.to_string())?);
    if growth > MOST_GROWTH {
        return Err(format!("rules that lengthen a text {growth:.0} times; the most is {MOST_GROWTH}"));
    }
    Ok(())
}

fn growth(rules: &Value) -> f64 {
    let length = |key: &str| rules.get(key).and_then(Value::as_str).map_or(0, str::len) as f64;
    match (rules, rules.get("type").and_then(Value::as_str)) {
        (_, Some("Replace")) => match rules.pointer("/pattern/String").and_then(Value::as_str) {
            Some(pattern) if !pattern.is_empty() => (length("content") / pattern.len() as f64).max(1.0),
            // The pattern may match nothing between any two characters.
            _ => 1.0 + length("content"),
        },
        (_, Some("Prepend")) => 1.0 + length("prepend"),
        (_, Some("Metaspace")) => 1.0 + length("replacement"),
        (_, Some("ByteLevel")) => 2.0,
        (_, Some("Precompiled")) => TABLE_GROWTH,
        (Value::Object(rule), _) => rule.values().map(growth).product(),
        (Value::Array(rules), _) => rules.iter().map(growth).product(),
        _ => 1.0,
    }
}
