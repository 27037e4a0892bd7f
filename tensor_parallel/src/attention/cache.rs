//! The KV cache: keys and values of past positions, of this rank's heads.

use ryzanstein_process_group::DType;

use super::pages::{PageCopy, PageTables};
use crate::compute::{Compute, LayerCache, PAGE_SIZE, SlotMapping};
use crate::error::{Error, RequestError, Result};

/// The size of a KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSize {
    /// The maximum number of sequences at the same time.
    pub sequences: usize,
    /// The maximum number of positions of a sequence.
    pub capacity: usize,
    /// Number of pages of [`PAGE_SIZE`] positions: the memory that all sequences share.
    pub pages: usize,
}

impl CacheSize {
    /// Returns the size with memory for all sequences at their full length.
    pub fn full(sequences: usize, capacity: usize) -> Self {
        Self { sequences, capacity, pages: sequences.saturating_mul(capacity.div_ceil(PAGE_SIZE)) }
    }

    /// Returns the size with memory for this number of positions in all sequences together. Each sequence holds whole pages of
    /// [`PAGE_SIZE`] positions.
    #[must_use]
    pub fn with_positions(self, positions: usize) -> Self {
        Self { pages: positions.div_ceil(PAGE_SIZE), ..self }
    }
}

/// The KV cache of several sequences: keys and values of this rank's heads in all layers. A sequence holds as many pages as its
/// positions need. Sequences with a common prefix share its pages.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    /// Number of cached positions, by sequence.
    lengths: Vec<usize>,
    tables: PageTables,
    capacity: usize,
}

impl KvCache {
    /// Allocates the pages of each of `layers` layers in the memory of `compute`.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or there are more pages or tables than 32 bits count.
    pub fn new(
        compute: &dyn Compute,
        layers: usize,
        CacheSize { sequences, capacity, pages }: CacheSize,
        [kv_heads, head_dim]: [usize; 2],
        dtype: DType,
    ) -> Result<Self> {
        let table_length = capacity.div_ceil(PAGE_SIZE);
        let entries = sequences.checked_mul(table_length).map(u32::try_from);
        let (Ok(count), Some(Ok(_))) = (u32::try_from(pages), entries) else {
            return Err(Error::input(format!(
                "a KV cache of {pages} pages for {sequences} sequences of up to {table_length} each; it takes fewer than 2³² pages, \
                 and as many in the tables of all sequences"
            )));
        };
        let layer = |_| LayerCache::new(compute, [pages, kv_heads, head_dim], dtype);
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        let tables = PageTables::new([sequences, table_length], count);
        Ok(Self { layers, lengths: vec![0; sequences], tables, capacity })
    }

    /// Returns the number of cached positions of a sequence, or 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Returns true if no sequence has cached positions.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|length| *length == 0)
    }

    /// Returns the number of pages that no sequence holds. A sequence takes one with its first position, and one whenever its
    /// length is a multiple of [`PAGE_SIZE`].
    pub fn free_pages(&self) -> usize {
        self.tables.free()
    }

    /// Removes all but the first `length` positions of a sequence.
    pub fn truncate(&mut self, sequence: usize, length: usize) {
        if let Some(held) = self.lengths.get_mut(sequence) {
            *held = length.min(*held);
            self.tables.truncate(sequence, *held);
        }
    }

    /// Replaces the content of sequence `to` by the first `length` positions of sequence `from`. Both share their pages, until one
    /// of them appends to a page that is partly filled.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, or `from` holds fewer positions.
    pub fn fork(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
        let held = self.length(from)?;
        self.length(to)?;
        if length > held {
            return Err(RequestError::ShortSequence { sequence: from, length, held }.into());
        }
        if from == to {
            self.truncate(to, length);
        } else {
            self.tables.share(from, to, length);
            self.lengths[to] = length;
        }
        Ok(())
    }

    /// Returns the number of cached positions of a sequence, or an error if there is no such sequence.
    fn length(&self, sequence: usize) -> Result<usize> {
        let sequences = self.lengths.len();
        let unknown = RequestError::UnknownSequence { sequence, sequences };
        self.lengths.get(sequence).copied().ok_or_else(|| unknown.into())
    }

    /// Gives different sequences pages for more tokens each.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if there is no such sequence, it is full, or no pages are left. Returns an error if a
    /// GPU fails.
    pub(crate) fn reserve(&mut self, more: &[(usize, usize)]) -> Result<()> {
        let capacity = self.capacity;
        let of = |(sequence, more)| {
            let length = self.length(sequence)?;
            if more > capacity - length {
                return Err(RequestError::CacheFull { sequence, more, length, capacity }.into());
            }
            Ok((sequence, length..length + more))
        };
        let writes = more.iter().copied().map(of).collect::<Result<Vec<_>>>()?;
        for PageCopy { from, to } in self.tables.reserve(&writes)? {
            self.layers.iter_mut().try_for_each(|layer| layer.copy_page(from, to))?;
        }
        Ok(())
    }

    /// Returns the slots of more tokens of sequences, for which pages have been [reserved](Self::reserve).
    pub(crate) fn slots(&self, more: impl Iterator<Item = (usize, usize)>) -> SlotMapping {
        let mut slots = SlotMapping::new(self.capacity);
        more.for_each(|(sequence, more)| slots.push(self.tables.of(sequence), self.lengths[sequence], more));
        slots
    }

    /// Updates the lengths of sequences after more tokens have been written to their [slots](Self::slots).
    pub(crate) fn advance(&mut self, more: &[(usize, usize)]) {
        for (sequence, more) in more {
            self.lengths[*sequence] += more;
        }
    }
}
