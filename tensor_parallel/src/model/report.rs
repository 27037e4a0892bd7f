//! Bytes read and time taken by loading a model.

use serde::{Deserialize, Serialize};

/// Bytes read and time taken by loading, on this rank.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct LoadReport {
    /// Bytes of weights in all files, known on ranks that opened them.
    pub checkpoint_bytes: u64,
    /// Bytes of weights that this rank read from files.
    pub bytes_read: u64,
    /// Seconds until every rank had its weights.
    pub seconds: f64,
}
