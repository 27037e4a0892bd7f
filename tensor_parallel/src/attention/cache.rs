//! The KV cache: keys and values of past positions, of this rank's heads.

use ryzanstein_process_group::DType;

use super::pages::{PageCopy, PageTables};
use crate::compute::{Compute, LayerCache, MOST_POSITIONS, PAGE_SIZE, SlotMapping};
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

/// The KV cache of several sequences: keys and values of this rank's heads in all layers. A sequence of n positions holds
/// n / [`PAGE_SIZE`] pages, rounded up. Sequences share pages only after a [`fork`](Self::fork).
#[derive(Debug)]
pub(crate) struct KvCache {
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
    /// Returns an error if memory runs out, or the cache has more pages, entries of page tables, or positions of a sequence than it can
    /// count.
    pub(crate) fn new(
        compute: &dyn Compute,
        layers: usize,
        size: CacheSize,
        [kv_heads, head_dim]: [usize; 2],
        dtype: DType,
    ) -> Result<Self> {
        let CacheSize { sequences, capacity, pages } = size;
        let table_length = capacity.div_ceil(PAGE_SIZE);
        let entries = sequences.max(1).checked_mul(table_length.max(1)).map(u32::try_from);
        let (Ok(count), Some(Ok(_)), true) = (u32::try_from(pages), entries, capacity <= MOST_POSITIONS)
        else {
            return Err(Error::input(format!(
                "a KV cache of {pages} pages for {sequences} sequences of up to {capacity} positions; it takes at most 2³² - 1 pages, \
                 as many in the tables of all sequences, and {MOST_POSITIONS} positions of a sequence"
            )));
        };
        let tables = PageTables::new([sequences, table_length], count);
        let layer = |_| LayerCache::new(compute, [pages, kv_heads, head_dim], dtype);
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, lengths: vec![0; sequences], tables, capacity })
    }

    /// Returns the number of cached positions of a sequence, or 0 if there is no such sequence.
    pub(crate) fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Returns true if no sequence has cached positions.
    pub(crate) fn is_empty(&self) -> bool {
        self.lengths.iter().all(|length| *length == 0)
    }

    /// Returns the number of pages that no sequence holds.
    pub(crate) fn free_pages(&self) -> usize {
        self.tables.free()
    }

    /// Returns true if the cache is in the memory of a GPU.
    pub(crate) fn is_on_device(&self) -> bool {
        self.layers.first().is_some_and(LayerCache::is_on_device)
    }

    /// Removes all but the first `length` positions of a sequence.
    pub(crate) fn truncate(&mut self, sequence: usize, length: usize) {
        if let Some(held) = self.lengths.get_mut(sequence) {
            *held = length.min(*held);
            self.tables.truncate(sequence, *held);
        }
    }

    /// Replaces the content of sequence `to` by the first `length` positions of sequence `from`. They share the pages until one of them
    /// writes to them.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, or `from` holds fewer positions.
    pub(crate) fn fork(&mut self, from: usize, to: usize, length: usize) -> Result<()> {
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

    /// Gives different sequences pages for more tokens each, which `pass` writes to their [slots](Self::slots). They count as cached if
    /// it succeeds.
    ///
    /// # Errors
    /// Returns an error if there is no such sequence, it is full, or no pages are left; otherwise the errors of `pass`. The sequences
    /// are then as before. Returns an error if a GPU fails.
    pub(crate) fn append<T>(
        &mut self,
        more: &[(usize, usize)],
        pass: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
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
        let result = pass(self);
        for (sequence, positions) in writes {
            if result.is_ok() {
                self.lengths[sequence] = positions.end;
            } else {
                self.tables.truncate(sequence, positions.start);
            }
        }
        result
    }

    /// Returns the slots of more tokens of sequences, within a call of [`append`](Self::append).
    pub(crate) fn slots(&self, more: impl Iterator<Item = (usize, usize)>) -> SlotMapping {
        let mut slots = SlotMapping::new(self.capacity);
        more.for_each(|(sequence, more)| slots.push(self.tables.of(sequence), self.lengths[sequence], more));
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::Host;

    fn cache(size: CacheSize) -> Result<KvCache> {
        KvCache::new(&Host::new(1), 1, size, [1, 2], DType::F32)
    }

    #[test]
    fn sizes_that_cannot_be_counted_are_refused() {
        let most = usize::MAX;
        for size in [
            CacheSize::full(most, 1),
            CacheSize::full(most, 0),
            CacheSize::full(1, most),
            CacheSize::full(most, most),
            CacheSize::full(1, most).with_positions(1),
            CacheSize::full(most, 1).with_positions(1),
            CacheSize::full(1, MOST_POSITIONS + 1).with_positions(1),
            CacheSize::full(1, 1).with_positions(most),
            CacheSize { sequences: 1, capacity: 1, pages: 1 << 32 },
        ] {
            assert!(cache(size).is_err(), "{size:?}");
        }
    }

    #[test]
    fn a_cache_without_pages_takes_no_token() {
        for size in [CacheSize::full(2, 10).with_positions(0), CacheSize::full(0, 10), CacheSize::full(2, 0)]
        {
            let mut cache = cache(size).unwrap();
            assert!(cache.append(&[(0, 1)], |_| Ok(())).is_err(), "{size:?}");
            cache.append(&[], |_| Ok(())).unwrap();
        }
    }

    #[test]
    fn a_pass_that_fails_leaves_lengths_and_free_pages_as_they_were() {
        let mut cache = cache(CacheSize::full(3, 1000)).unwrap();
        cache.append(&[(0, 200)], |_| Ok(())).unwrap();
        cache.fork(0, 1, 200).unwrap();
        let free = cache.free_pages();
        let fails = |_: &mut KvCache| Err::<(), _>(Error::input("no"));
        assert!(cache.append(&[(1, 300), (2, 128)], fails).is_err());
        assert_eq!([0, 1, 2].map(|sequence| cache.len(sequence)), [200, 200, 0]);
        // The copy of the page that it shared stays.
        assert_eq!(cache.free_pages(), free - 1);
        cache.truncate(1, 0);
        cache.truncate(0, 0);
        assert_eq!(cache.free_pages(), 24);
    }
}
