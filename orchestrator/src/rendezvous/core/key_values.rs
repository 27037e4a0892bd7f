//! The key-value store of one epoch, with a bound on its memory.

use std::collections::HashMap;

use bytes::Bytes;
use ryzanstein_process_group::store::{MAX_KEY, MAX_VALUE, OWN, RESERVED};

use super::event::Refusal;

/// Maximum number of bytes in the store, [`ENTRY_OVERHEAD`] for each entry included.
pub(crate) const MAX_STORE: usize = 64 << 20;
/// Number of bytes that an entry counts in addition to its key and value.
pub(crate) const ENTRY_OVERHEAD: usize = 64;

/// Keys, their values, and their size in bytes.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct KeyValues {
    values: HashMap<String, Bytes>,
    bytes: usize,
}

impl KeyValues {
    pub(super) fn get(&self, key: &str) -> Option<Bytes> {
        self.values.get(key).cloned()
    }

    /// Stores a copy of the value, and returns it. The value as it was received would keep the whole receive buffer in memory.
    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> Result<Bytes, Refusal> {
        check_key(key)?;
        if value.len() > MAX_VALUE {
            return Err(Refusal::Invalid(format!(
                "the value of store key `{key}` has {} bytes; at most {MAX_VALUE} are allowed",
                value.len()
            )));
        }
        let old = self.values.get(key).map_or(0, |value| cost(key, value));
        if value.is_empty() && key.starts_with(OWN) {
            self.bytes -= old;
            self.values.remove(key);
            return Ok(Bytes::new());
        }
        let bytes = self.bytes - old + cost(key, value);
        if bytes > MAX_STORE {
            return Err(Refusal::Refused(format!(
                "the store is full: with key `{key}` it would hold {bytes} bytes, and at most {MAX_STORE} are allowed"
            )));
        }
        self.bytes = bytes;
        let value = Bytes::copy_from_slice(value);
        self.values.insert(key.to_owned(), value.clone());
        Ok(value)
    }

    /// Removes every key but those of launchers.
    pub(super) fn forget_members(&mut self) {
        self.values.retain(|key, _| key.starts_with(RESERVED));
        self.bytes = self.values.iter().map(|(key, value)| cost(key, value)).sum();
    }

    /// Returns the counter `key` plus `amount`. Stores nothing.
    pub(super) fn sum(&self, key: &str, amount: i64) -> Result<i64, Refusal> {
        let Some(value) = self.values.get(key) else { return Ok(amount) };
        let Ok(bytes) = <[u8; 8]>::try_from(value.as_ref()) else {
            return Err(Refusal::Invalid(format!("store key `{key}` does not hold a counter")));
        };
        Ok(i64::from_le_bytes(bytes).wrapping_add(amount))
    }
}

fn cost(key: &str, value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY_OVERHEAD
}

pub(super) fn check_key(key: &str) -> Result<(), Refusal> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(Refusal::Invalid(format!(
            "a key must have 1 to {MAX_KEY} bytes; this one has {}",
            key.len()
        )));
    }
    Ok(())
}
