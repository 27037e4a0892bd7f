//! A JSON object, read key by key.

use serde_json::{Map, Value};

use super::config_error::ConfigError;

/// One JSON object. Errors name the key.
pub(super) struct JsonObject<'a>(pub(super) &'a Map<String, Value>);

impl<'a> JsonObject<'a> {
    /// Returns the value of a key. `null` counts as missing.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn optional<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(ConfigError::Invalid { key, expected, found: value.clone() }),
            },
        }
    }

    pub(super) fn size(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        // Larger sizes occur in no model, and products of two would overflow.
        self.size_up_to(key, 1 << 31)
    }

    pub(super) fn size_up_to(&self, key: &'static str, limit: u64) -> Result<Option<usize>, ConfigError> {
        let size = self.optional(key, "a positive whole number", |v| v.as_u64().filter(|n| *n > 0))?;
        match size {
            Some(value) if value > limit => Err(ConfigError::TooLarge { key, value, limit }),
            size => Ok(size.map(|n| n as usize)),
        }
    }

    pub(super) fn required(&self, key: &'static str, limit: u64) -> Result<usize, ConfigError> {
        self.size_up_to(key, limit)?.ok_or(ConfigError::Missing { key })
    }

    pub(super) fn number(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        self.optional(key, "a positive number", |v| v.as_f64().filter(|n| *n > 0.0 && n.is_finite()))
    }

    pub(super) fn flag(&self, key: &'static str) -> Result<bool, ConfigError> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'a str>, ConfigError> {
        self.optional(key, "a text", Value::as_str)
    }
}
