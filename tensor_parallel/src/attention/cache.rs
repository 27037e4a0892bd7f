//! Keys and values of the positions seen so far, of this rank's heads only.

use crate::compute::{Compute, LayerCache};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// The cache of one sequence: every layer's keys and values of this rank's heads.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    length: usize,
    capacity: usize,
}

impl KvCache {
    /// Room for `capacity` positions in each of `layers` layers, where `compute` computes.
    ///
    /// # Errors
    /// When there is not so much memory.
    pub fn new(
        compute: &dyn Compute,
        layers: usize,
        kv_heads: usize,
        capacity: usize,
        head_dim: usize,
        dtype: Dtype,
    ) -> Result<Self> {
        let layer = |_| LayerCache::new(compute, kv_heads, capacity, head_dim, dtype);
        Ok(Self { layers: (0..layers).map(layer).collect::<Result<_>>()?, length: 0, capacity })
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it holds no positions.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of all keys and values on this rank.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|l| l.keys.bytes() + l.values.bytes()).sum()
    }

    /// Forgets everything after the first `length` positions.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    pub(crate) fn room_for(&self, more: usize) -> Result<()> {
        if more > self.capacity - self.length {
            return Err(Error::input(format!(
                "{more} more positions do not fit the KV cache, which holds {} of {}",
                self.length, self.capacity
            )));
        }
        Ok(())
    }

    pub(crate) fn advance(&mut self, positions: usize) {
        self.length += positions;
    }
}
