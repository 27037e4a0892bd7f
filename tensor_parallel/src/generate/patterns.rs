//! Patterns of a `tokenizer.json` that mean something else in Oniguruma, which transformers uses, than in `fancy-regex`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Returns rules, such as those of a normalizer, whose patterns mean here what they mean in Oniguruma, or `None` if they already
/// do.
pub(super) fn translated<T: Serialize + DeserializeOwned>(
    rules: Option<&T>,
) -> serde_json::Result<Option<T>> {
    let Some(rules) = rules else { return Ok(None) };
    let mut rules = serde_json::to_value(rules)?;
    Ok(if translate_all(&mut rules) { Some(serde_json::from_value(rules)?) } else { None })
}

/// Translates the patterns of rules. Returns true if one has changed.
fn translate_all(rules: &mut Value) -> bool {
    let mut changed = false;
    match rules {
        Value::Object(rule) => {
            for (key, value) in rule {
                match value {
                    Value::String(pattern) if key == "Regex" => {
                        let new = translate(pattern);
                        changed |= new != *pattern;
                        *pattern = new;
                    }
                    _ => changed |= translate_all(value),
                }
            }
        }
        Value::Array(rules) => {
            for rule in rules {
                changed |= translate_all(rule);
            }
        }
        _ => {}
    }
    changed
}

/// Translates a pattern. In Oniguruma, `^` and `$` match at every line, `+` repeats a count such as `{1,3}`, which elsewhere forbids
/// backtracking, and `?` makes one such as `{2}` optional.
fn translate(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    // Where the last operand of a repeat and the open groups begin.
    let (mut operand, mut groups) = (0, Vec::new());
    let mut rest = pattern;
    while !rest.is_empty() {
        let (element, after) = rest.split_at(element(rest));
        rest = after;
        match element {
            "?" | "*" | "+" => out += element,
            ")" => {
                out += element;
                operand = groups.pop().unwrap_or(operand);
            }
            _ if is_count(element) => {
                out += element;
                let repeat =
                    rest.chars().next().filter(|next| *next == '+' || *next == '?' && !element.contains(','));
                if let Some(repeat) = repeat {
                    out.insert_str(operand, "(?:");
                    out.extend([')', repeat]);
                    rest = &rest[1..];
                }
            }
            _ => {
                operand = out.len();
                out += match element {
                    // No line begins behind a line feed at the end.
                    "^" => r"(?:\A|(?m:^)(?!\z))",
                    "$" => "(?m:$)",
                    _ => element,
                };
                if element == "(" {
                    groups.push(operand);
                }
            }
        }
    }
    out
}

/// Returns the length of the first class, escape, comment, count or character.
fn element(rest: &str) -> usize {
    let to = |end: char| rest.find(end).map_or(rest.len(), |at| at + end.len_utf8());
    let first = rest.chars().next().map_or(0, char::len_utf8);
    match rest.as_bytes() {
        [b'[', ..] => class(rest),
        [b'\\', ..] => escape(rest),
        [b'(', b'?', b'#', ..] => to(')'),
        [b'{', ..] if is_count(&rest[..to('}')]) => to('}'),
        _ => first,
    }
}

fn is_count(element: &str) -> bool {
    let count = element.strip_prefix('{').and_then(|count| count.strip_suffix('}'));
    count.is_some_and(|count| {
        let (from, to) = count.split_once(',').unwrap_or((count, count));
        from.len() + to.len() > 0 && from.bytes().chain(to.bytes()).all(|byte| byte.is_ascii_digit())
    })
}

/// Returns the length of a class, which may contain others.
fn class(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut at = if rest.starts_with("[^") { 2 } else { 1 };
    // As the first character, a bracket is no end.
    if bytes.get(at) == Some(&b']') {
        at += 1;
    }
    let mut depth = 1;
    while let Some(byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'\\' => at += 1,
            b'[' => depth += 1,
            b']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Returns the length of an escape, with its braces, name or digits.
fn escape(rest: &str) -> usize {
    let Some(kind) = rest[1..].chars().next() else { return rest.len() };
    let start = 1 + kind.len_utf8();
    let after = &rest[start..];
    let to = |end: char| after.find(end).map_or(0, |at| at + 1);
    let hexadecimal = |most| after.bytes().take(most).take_while(u8::is_ascii_hexdigit).count();
    start
        + match kind {
            'p' | 'P' | 'x' | 'u' | 'U' | 'o' if after.starts_with('{') => to('}'),
            'k' | 'g' if after.starts_with('<') => to('>'),
            'x' => hexadecimal(2),
            'u' => hexadecimal(4),
            '0'..='9' => after.bytes().take_while(u8::is_ascii_digit).count(),
            _ => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_repeats_of_counts_are_those_of_oniguruma() {
        for (pattern, translated) in [
            (r"\p{N}{1,3}+| ?x++[\r\n]*+", r"(?:\p{N}{1,3})+| ?x++[\r\n]*+"),
            (r"(?:a(b|c)){2}+?", r"(?:(?:a(b|c)){2})+?"),
            (r"[[^a]{1,2}+$]{,2}+\x41{2,}+", r"(?:[[^a]{1,2}+$]{,2})+(?:\x41{2,})+"),
            (r"\s++$|\$[$^]\^\p{^L}(?#^)", r"\s++(?m:$)|\$[$^]\^\p{^L}(?#^)"),
            (r"a{2}?b{1,2}?c{2,}?", r"(?:a{2})?b{1,2}?c{2,}?"),
            ("^é{1}+", r"(?:\A|(?m:^)(?!\z))(?:é{1})+"),
            (r"\{1}+a{x}+\x{31}+{", r"\{1}+a{x}+\x{31}+{"),
        ] {
            assert_eq!(translate(pattern), translated);
        }
    }
}
