//! The KV cache: keys and values of past positions, of this rank's heads.

use ryzanstein_process_group::DType;

use crate::compute::{Compute, LayerCache, SlotMapping};
use crate::error::{RequestError, Result};

/// The KV cache of several sequences: keys and values of this rank's heads in all layers.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    /// Number of cached positions, by sequence.
    lengths: Vec<usize>,
    capacity: usize,
}

impl KvCache {
    /// Allocates room for `sequences` sequences of `capacity` positions each, in each of `layers` layers, in the memory of
    /// `compute`.
    ///
    /// # Errors
    /// Returns an error if memory runs out.
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

    /// Returns the number of cached positions of a sequence, or 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Returns true if no sequence has cached positions.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|length| *length == 0)
    }

    /// Removes all but the first `length` positions of a sequence.
    pub fn truncate(&mut self, sequence: usize, length: usize) {
        if let Some(held) = self.lengths.get_mut(sequence) {
            *held = length.min(*held);
        }
    }

    /// Copies the first `length` positions of sequence `from` to sequence `to`, and replaces its content.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, `from` holds fewer positions, or a GPU fails.
    pub fn fork(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        let held = self.length(from)?;
        self.length(to)?;
        if length > held {
            return Err(RequestError::ShortSequence { sequence: from, length, held }.into());
        }
        if from != to {
            self.lengths[to] = 0;
            self.layers.iter_mut().try_for_each(|layer| layer.copy_prefix(from, to, length))?;
        }
        self.lengths[to] = length;
        Ok(())
    }

    /// Returns the number of cached positions of a sequence, or an error if there is no such sequence.
    fn length(&self, sequence: usize) -> Result<usize> {
        let sequences = self.lengths.len();
        let unknown = RequestError::UnknownSequence { sequence, sequences };
        self.lengths.get(sequence).copied().ok_or_else(|| unknown.into())
    }

    /// Returns the next position of a sequence, or an error if the sequence has no room for `more`.
    pub(crate) fn next_position(&self, sequence: usize, more: usize) -> Result<usize> {
        let (length, capacity) = (self.length(sequence)?, self.capacity);
        if more > capacity - length {
            return Err(RequestError::CacheFull { sequence, more, length, capacity }.into());
        }
        Ok(length)
    }

    /// Updates the lengths of sequences after tokens have been written to these slots.
    pub(crate) fn advance(&mut self, slots: &SlotMapping) {
        for (sequence, end) in slots.ends() {
            self.lengths[sequence] = end;
        }
    }
}
