//! JSON as Python's `json` module reads and writes it.

use std::borrow::Cow;
use std::io::{Result, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Parses the JSON of a model folder. Python also writes `NaN`, `Infinity` and `-Infinity`, which are not JSON. They become
/// strings, so that keys without a meaning may have them and those that need a number refuse them.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(&with_quoted_constants(text))
}

fn with_quoted_constants(text: &str) -> Cow<'_, str> {
    if !["NaN", "Infinity"].iter().any(|constant| text.contains(constant)) {
        return text.into();
    }
    let mut quoted = String::with_capacity(text.len() + 64);
    // Every second part is the inside of a string. An escaped quotation mark does not end it.
    let (mut rest, mut in_string) = (text, false);
    while !rest.is_empty() {
        let end = if in_string {
            let mut escaped = false;
            let is_end = |c: char| {
                let end = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                end
            };
            rest.find(is_end)
        } else {
            rest.find('"')
        };
        let (part, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
        if in_string {
            quoted += part;
        } else {
            let part = part.replace("NaN", "\"NaN\"").replace("Infinity", "\"Infinity\"");
            quoted += &part.replace("-\"Infinity\"", "\"-Infinity\"");
        }
        (rest, in_string) = (after, !in_string);
    }
    quoted.into()
}

/// The arguments of `json.dumps` that templates may set.
#[derive(Debug)]
pub(crate) struct Style {
    /// The indent of each level, with each value on its own line; everything on one line if `None`.
    pub(crate) indent: Option<String>,
    /// The separator between values, and that between a key and its value.
    pub(crate) separators: (String, String),
    pub(crate) ensure_ascii: bool,
}

/// Serializes a value.
pub(crate) fn text(value: &impl Serialize, style: Style) -> serde_json::Result<String> {
    let mut out = Vec::new();
    let formatter = Formatter { style, depth: 0, is_empty: true };
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Returns the text that Python writes for a number with a fraction.
pub(crate) fn float(value: f64) -> String {
    // Rust changes to exponents at the same sizes as Python, but writes `1e-5` for `1e-05`, and `NaN` for `nan`.
    let text = format!("{value:?}").to_lowercase();
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e{:+03}", exponent.parse().unwrap_or(0_i32)),
        None => text,
    }
}

struct Formatter {
    style: Style,
    depth: usize,
    /// True if the innermost open array or object has no values.
    is_empty: bool,
}

impl Formatter {
    fn begin(&mut self, out: &mut (impl ?Sized + Write), bracket: &[u8]) -> Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn end(&mut self, out: &mut (impl ?Sized + Write), bracket: &[u8]) -> Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket)
    }

    fn begin_value(&mut self, out: &mut (impl ?Sized + Write), first: bool) -> Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.style.separators.0.as_bytes())?;
        }
        self.new_line(out)
    }

    fn new_line(&self, out: &mut (impl ?Sized + Write)) -> Result<()> {
        let Some(indent) = &self.style.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }
}

impl serde_json::ser::Formatter for Formatter {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.begin_value(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> Result<()> {
        self.begin_value(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> Result<()> {
        out.write_all(self.style.separators.1.as_bytes())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, text: &str) -> Result<()> {
        if !self.style.ensure_ascii {
            return out.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if (' '..='~').contains(&c) {
                out.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn constants_of_python_are_strings_and_texts_stay() {
        let text = r#"{"a": [NaN, -Infinity,Infinity], "NaN \" Infinity": "-Infinity \\", "b":NaN}"#;
        let read: Value = parse(text).unwrap();
        let constants = json!(["NaN", "-Infinity", "Infinity"]);
        assert_eq!(read, json!({ "a": constants, "NaN \" Infinity": "-Infinity \\", "b": "NaN" }));
        assert!(parse::<Value>("{NaN: 1").is_err() && parse::<Value>("[NaNa]").is_err());
    }

    proptest::proptest! {
        #[test]
        fn json_without_constants_is_read_as_it_is(text in r#"[a"\\NI,:{}]{0,12}"#, key in "NaN|Infinity|x") {
            let value = json!({ key: text, "NaN": [1, text] });
            proptest::prop_assert_eq!(parse::<Value>(&value.to_string()).unwrap(), value);
        }
    }
}
