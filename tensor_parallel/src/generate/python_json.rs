//! JSON in the format of Python's `json.dumps`, for the templates' `tojson`.

use std::collections::BTreeMap;
use std::io::{Result, Write};

use serde::Serialize;
use serde_json::Value;

/// The arguments of `json.dumps` that templates may set.
#[derive(Debug)]
pub(super) struct Style {
    /// Number of spaces per level, with each value on its own line; everything on one line if `None`.
    pub(super) indent: Option<usize>,
    /// The separator between values, and that between a key and its value.
    pub(super) separators: (String, String),
    pub(super) ensure_ascii: bool,
}

/// Serializes a value.
pub(super) fn text(value: &impl Serialize, style: Style) -> serde_json::Result<String> {
    let mut out = Vec::new();
    let formatter = Formatter { style, depth: 0, is_empty: true };
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Sorts the keys of all objects.
pub(super) fn sorted(value: Value) -> Value {
    match value {
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        Value::Object(entries) => {
            let entries: BTreeMap<_, _> = entries.into_iter().collect();
            entries.into_iter().map(|(key, value)| (key, sorted(value))).collect()
        }
        other => other,
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
        let Some(spaces) = self.style.indent else { return Ok(()) };
        write!(out, "\n{:1$}", "", spaces * self.depth)
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
