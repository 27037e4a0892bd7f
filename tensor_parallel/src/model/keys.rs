//! A JSON object, read key by key.

use serde_json::{Map, Value};

/// One JSON object. Errors are sentences that name the key.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// The value of a key; `null` is as good as none.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn optional<T>(
        &self,
        key: &str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(format!("`{key}` must be {what}, and is {value}")),
            },
        }
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, String> {
        // Larger sizes would overflow products of two, and no model has them.
        self.size_up_to(key, 1 << 31)
    }

    pub(super) fn size_up_to(&self, key: &str, limit: u64) -> Result<Option<usize>, String> {
        let size = self.optional(key, "a positive whole number", |v| v.as_u64().filter(|n| *n > 0))?;
        match size {
            Some(size) if size > limit => {
                Err(format!("`{key}` is {size}, and {limit} is the most that is supported"))
            }
            size => Ok(size.map(|n| n as usize)),
        }
    }

    pub(super) fn needed(&self, key: &str, limit: u64) -> Result<usize, String> {
        self.size_up_to(key, limit)?.ok_or_else(|| format!("`{key}` is missing"))
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
