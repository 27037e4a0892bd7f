//! A JSON object, read key by key.

use serde_json::{Map, Value, json};

/// One JSON object. Errors are sentences that name the key.
pub(super) struct JsonObject<'a>(pub(super) &'a Map<String, Value>);

impl<'a> JsonObject<'a> {
    /// Returns the value of a key. `null` counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    /// Returns the value of a key, or `None` if it is missing or Python takes it for false.
    pub(super) fn truthy(&self, key: &str) -> Option<&'a Value> {
        let falsy = [json!(false), json!(0), json!(""), json!([]), json!({})];
        self.get(key).filter(|v| !falsy.contains(v))
    }

    pub(super) fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let invalid = || format!("`{key}` must be {expected}, and is {}", shortened(&value.to_string()));
        read(value).map(Some).ok_or_else(invalid)
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, String> {
        // Larger sizes occur in no model, and products of two would overflow.
        self.size_up_to(key, 1 << 31)
    }

    pub(super) fn size_up_to(&self, key: &str, limit: u64) -> Result<Option<usize>, String> {
        let size = self.optional(key, "a positive whole number", |v| v.as_u64().filter(|n| *n > 0))?;
        match size {
            Some(n) if n > limit => Err(format!("`{key}` is {n}, and {limit} is the most that is supported")),
            size => Ok(size.map(|n| n as usize)),
        }
    }

    pub(super) fn required(&self, key: &str, limit: u64) -> Result<usize, String> {
        self.size_up_to(key, limit)?.ok_or_else(|| missing(key))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, String> {
        self.optional(key, "a positive number", |v| v.as_f64().filter(|n| *n > 0.0 && n.is_finite()))
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, String> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        self.optional(key, "a text", Value::as_str)
    }
}

/// The error of a missing key that every model has.
pub(super) fn missing(key: &str) -> String {
    format!("`{key}` is missing; fetch the config.json that belongs to the weights")
}

/// Shortens a value for a message, because it may be as long as the file.
pub(super) fn shortened(value: &str) -> String {
    const QUOTED: usize = 100;
    match value.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}
