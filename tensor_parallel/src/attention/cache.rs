//! Keys and values of the positions seen so far, of this rank's heads only.

use ryzanstein_process_group::DType;

use crate::compute::{Compute, LayerCache, SlotMapping};
use crate::error::{Error, Result};

/// The cache of some sequences: every layer's keys and values of this rank's heads.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    /// Of each sequence.
    lengths: Vec<usize>,
    capacity: usize,
}

impl KvCache {
    /// Room for `sequences` sequences of `capacity` positions each, in each of `layers` layers, where `compute` computes.
    ///
    /// # Errors
    /// When there is not so much memory.
    pub fn new(
        compute: &dyn Compute,
        layers: usize,
        [sequences, kv_heads, capacity, head_dim]: [usize; 4],
        dtype: DType,
    ) -> Result<Self> {
        let layer = |_| LayerCache::new(compute, [sequences, kv_heads, capacity, head_dim], dtype);
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, lengths: vec![0; sequences], capacity })
    }

    /// Sequences there is room for.
    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    /// Positions held of a sequence; none of one that there is no room for.
    pub fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Whether it holds no positions at all.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|length| *length == 0)
    }

    /// Positions there is room for in each sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of all keys and values on this rank.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }

    /// Forgets everything of a sequence after its first `length` positions.
    pub fn truncate(&mut self, sequence: usize, length: usize) {
        if let Some(held) = self.lengths.get_mut(sequence) {
            *held = length.min(*held);
        }
    }

    /// The end of a sequence, where so many more positions must fit.
    pub(crate) fn end(&self, sequence: usize, more: usize) -> Result<usize> {
        let Some(length) = self.lengths.get(sequence) else {
            return Err(Error::input(format!(
                "there is no sequence {sequence} in a KV cache for {}; they count from 0",
                self.lengths.len()
            )));
        };
        if more > self.capacity - length {
            return Err(Error::input(format!(
                "{more} more positions do not fit sequence {sequence} of the KV cache, which holds {length} of {}",
                self.capacity
            )));
        }
        Ok(*length)
    }

    /// So many more tokens have been put to these slots.
    pub(crate) fn advance(&mut self, slots: &SlotMapping, tokens: usize) {
        for row in 0..tokens {
            let (sequence, position) = slots.slot(row);
            self.lengths[sequence] = position + 1;
        }
    }
}
