//! The tokens of one forward pass and their slots in the cache.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// Number of positions in a page of the KV cache: a multiple of the keys that any kernel processes together.
pub const PAGE_SIZE: usize = 128;

/// Marks a token that [`Compute::choose_tokens`](super::Compute::choose_tokens) takes from row `token & !CHOSEN` of the candidates. It is
/// above every token, so [`VocabParallelEmbedding`](crate::embedding::VocabParallelEmbedding) refuses a batch that still has one.
pub const CHOSEN: u32 = 1 << 31;

/// The maximum number of positions of a sequence: kernels add numbers of positions in 32 bits.
pub(crate) const MOST_POSITIONS: usize = 1 << 30;

/// The cache slots of the tokens of a batch: runs of consecutive positions, each of its own sequence. Put runs of one token next to each
/// other: attention processes them at once.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct SlotMapping {
    /// The runs, in the order of the tokens.
    runs: Vec<Run>,
    /// The page table of each run, as long as the capacity needs.
    pages: Vec<u32>,
    capacity: usize,
}

/// Consecutive positions of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// The position of the first token.
    pub(crate) position: usize,
    /// Number of tokens.
    pub(crate) tokens: usize,
}

impl Run {
    /// Returns the number of positions of the sequence after the run, which has been [checked](SlotMapping::check).
    pub(super) fn end(&self) -> usize {
        self.position + self.tokens
    }
}

/// The place of pages that a table does not have.
const NO_PAGE: u32 = u32::MAX;

/// Rows of a batch that attention can process at once: one run, or several of one token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) runs: Range<usize>,
}

impl Part {
    /// Returns true if each row belongs to a different sequence; otherwise the rows are consecutive positions of one sequence.
    pub(super) fn is_single(&self) -> bool {
        self.rows.len() == self.runs.len()
    }
}

/// Without the page tables, which may be long.
impl fmt::Debug for SlotMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { runs, capacity, .. } = self;
        f.debug_struct("SlotMapping").field("runs", runs).field("capacity", capacity).finish_non_exhaustive()
    }
}

impl SlotMapping {
    /// Creates an empty mapping for sequences of at most `capacity` positions. Results may depend on the capacity in their last bits,
    /// unless numerics are invariant.
    pub fn new(capacity: usize) -> Self {
        Self { runs: Vec::new(), pages: Vec::new(), capacity }
    }

    /// Appends slots of `tokens` tokens from `position` on. `pages` is the page table of the sequence, up to the end of the run at least:
    /// `pages[i]` is the page of the cache with the positions from i × [`PAGE_SIZE`] on. Sequences may share pages, but a page to which
    /// the batch writes must occur once in one table only. [`Compute::batch`](super::Compute::batch) refuses two writers; other results
    /// are unspecified.
    pub fn push(&mut self, pages: &[u32], position: usize, tokens: usize) {
        let end = self.pages.len() + self.table_length();
        self.pages.extend(pages.iter().take(self.table_length()));
        self.pages.resize(end, NO_PAGE);
        self.runs.push(Run { position, tokens });
    }

    /// Creates the slots of `tokens` positions from `position` on, of a sequence in the first pages of the cache.
    pub fn from_position(position: usize, tokens: usize) -> Self {
        let mut slots = Self::new(position.saturating_add(tokens));
        let pages: Vec<u32> = (0..slots.table_length() as u32).collect();
        slots.push(&pages, position, tokens);
        slots
    }

    /// Returns the runs, in the order of the tokens.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Returns the number of pages of a table.
    pub(super) fn table_length(&self) -> usize {
        // A larger capacity has no tables, and is refused.
        if self.capacity <= MOST_POSITIONS { self.capacity.div_ceil(PAGE_SIZE) } else { 0 }
    }

    /// Returns the page tables of some runs, one after the other.
    pub(super) fn tables(&self, runs: Range<usize>) -> &[u32] {
        &self.pages[runs.start * self.table_length()..runs.end * self.table_length()]
    }

    /// Returns the pages that hold the sequence of a run after the run.
    fn held(&self, run: usize) -> &[u32] {
        &self.tables(run..run + 1)[..self.runs[run].end().div_ceil(PAGE_SIZE)]
    }

    /// Returns the number of 32-bit words of the [state](DeviceBatch::state) before the tokens.
    pub(super) fn state_words(&self) -> usize {
        self.runs.iter().map(|run| run.tokens).sum::<usize>() + self.pages.len()
    }

    /// Returns the number of words before a part.
    pub(super) fn state_offset(&self, part: &Part) -> usize {
        part.rows.start + part.runs.start * self.table_length()
    }

    /// Iterates over the index of the run and the position of each row of the batch.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, usize)> {
        let runs = self.runs.iter().enumerate();
        runs.flat_map(|(i, run)| (run.position..run.end()).map(move |position| (i, position)))
    }

    /// Iterates over the position of each row of the batch, and the length of its sequence after the pass.
    pub(super) fn positions(&self) -> impl Iterator<Item = (usize, usize)> {
        self.rows().map(|(run, position)| (position, self.runs[run].end()))
    }

    /// Returns the parts of a batch, in order.
    pub(super) fn parts(&self) -> Vec<Part> {
        let (mut parts, mut row) = (Vec::<Part>::new(), 0);
        for (i, run) in self.runs.iter().enumerate() {
            let rows = row..row + run.tokens;
            row = rows.end;
            match parts.last_mut() {
                Some(last) if run.tokens == 1 && last.is_single() => {
                    last.rows.end = rows.end;
                    last.runs.end = i + 1;
                }
                _ => parts.push(Part { rows, runs: i..i + 1 }),
            }
        }
        parts
    }

    /// Returns an error if the slots are not those of `rows` tokens.
    pub(super) fn check(&self, rows: usize) -> Result<()> {
        let Self { runs, capacity, .. } = self;
        let fits = |run: &Run| {
            let end = run.position.checked_add(run.tokens);
            run.tokens > 0 && end.is_some_and(|end| end <= *capacity)
        };
        let tokens = runs.iter().try_fold(0, |tokens: usize, run| tokens.checked_add(run.tokens));
        if *capacity > MOST_POSITIONS || !runs.iter().all(fits) || tokens != Some(rows) {
            return Err(Error::input(format!(
                "{rows} tokens cannot go to the slots {self:?}: each run needs tokens and at most as many positions as the capacity, \
                 which is at most {MOST_POSITIONS}"
            )));
        }
        let written = (0..runs.len()).flat_map(|run| &self.held(run)[runs[run].position / PAGE_SIZE..]);
        let mut written: Vec<u32> = written.copied().collect();
        written.sort_unstable();
        if written.last() == Some(&NO_PAGE) {
            return Err(Error::input(format!(
                "a page table of {self:?} is too short: it needs a page for each {PAGE_SIZE} positions up to the end of the run"
            )));
        }
        match written.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                Err(Error::input(format!("tokens of a batch go to page {} of the cache twice", pair[0])))
            }
            None => Ok(()),
        }
    }

    /// Returns the minimum number of pages of a cache that has these slots, which have been [checked](Self::check).
    fn least_pages(&self) -> usize {
        let pages = (0..self.runs.len()).flat_map(|run| self.held(run));
        pages.max().map_or(0, |page| *page as usize + 1)
    }

    /// Replaces the slots by others, in the same memory.
    fn set(&mut self, other: &Self) {
        self.runs.clone_from(&other.runs);
        self.pages.clone_from(&other.pages);
        self.capacity = other.capacity;
    }
}

/// The tokens of one forward pass, with their slots and rotations, which are computed once for all layers and stored where they
/// are needed.
#[derive(Debug)]
pub struct Batch {
    /// The tokens; empty while the memory of the GPU may hold others.
    tokens: Vec<u32>,
    /// Number of tokens that the batch was created for.
    rows: usize,
    slots: SlotMapping,
    /// The minimum number of pages of a cache that has the slots.
    least_pages: usize,
    /// Number of angles of one position: half the length of a head.
    half: usize,
    /// Number of rotary frequencies that the memory of the GPU has room for.
    frequencies: usize,
    memory: Memory,
}

/// The part of a batch in a GPU's memory.
#[derive(Debug)]
pub(super) struct DeviceBatch {
    /// Positions of the rows and then page tables of the runs of each [`Part`], tokens, and the rotary frequencies, 32 bits each:
    /// those of all rows, or, if they depend on the length of the sequence, of each run.
    pub(super) state: Block,
    /// Sine and cosine of all angles.
    pub(super) rotations: Block,
}

#[derive(Debug)]
enum Memory {
    Host(RotaryTable),
    Device(DeviceBatch),
}

impl Batch {
    pub(super) fn on_host(tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Self> {
        let (rows, half) = (tokens.len(), rotary.half());
        slots.check(rows)?;
        let memory = Memory::Host(rotary.table(slots.positions()));
        let (tokens, slots, least_pages) = (tokens.into(), slots.clone(), slots.least_pages());
        Ok(Self { tokens, rows, slots, least_pages, half, frequencies: 0, memory })
    }

    /// Creates a batch for `rows` tokens in slots like these, which [`update_device`](Self::update_device) must set.
    pub(super) fn on_device(
        rows: usize,
        slots: &SlotMapping,
        (half, frequencies): (usize, usize),
        batch: DeviceBatch,
    ) -> Self {
        let memory = Memory::Device(batch);
        Self { tokens: Vec::new(), rows, slots: slots.clone(), least_pages: 0, half, frequencies, memory }
    }

    /// Returns an error if number, parts, capacity, angles or frequencies of the tokens differ from those that the batch was created
    /// for. The slots have been [checked](SlotMapping::check).
    pub(super) fn check_update(
        &self,
        rows: usize,
        slots: &SlotMapping,
        (half, frequencies): (usize, usize),
    ) -> Result<()> {
        let same = (rows, half, frequencies) == (self.rows, self.half, self.frequencies);
        if same && slots.capacity == self.slots.capacity && slots.parts() == self.slots.parts() {
            return Ok(());
        }
        Err(Error::input(format!(
            "{rows} tokens with {half} angles each, at {slots:?}, do not fit a batch that was made for {} with {}, at {:?}; \
             make a new one",
            self.rows, self.half, self.slots
        )))
    }

    /// Sets tokens and slots that [`check_update`](Self::check_update) has accepted, and calls `write` to copy them to the GPU.
    ///
    /// Kernels read and write the cache at the slots in the memory of the GPU. Those are always slots that were checked here, or
    /// the batch has no tokens.
    pub(super) fn update_device(
        &mut self,
        tokens: &[u32],
        slots: &SlotMapping,
        write: impl FnOnce(&mut DeviceBatch) -> Result<()>,
    ) -> Result<()> {
        self.tokens.clear();
        match &mut self.memory {
            Memory::Device(batch) => write(batch)?,
            Memory::Host(_) => {
                return Err(Error::input("this batch was made for host memory and is used on a GPU"));
            }
        }
        self.tokens.extend_from_slice(tokens);
        self.slots.set(slots);
        self.least_pages = slots.least_pages();
        Ok(())
    }

    /// Returns true if the rotations are for heads of this length.
    pub(super) fn has_rotations_for(&self, head_dim: usize) -> bool {
        2 * self.half == head_dim
    }

    /// Returns the tokens, 0 for one that a GPU has chosen.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the rows of candidates that choose tokens, in no order.
    pub(super) fn chosen_rows(&self) -> impl Iterator<Item = usize> {
        self.tokens.iter().filter(|token| **token & CHOSEN != 0).map(|token| (token & !CHOSEN) as usize)
    }

    /// Sets marked tokens to 0, after the kernel that replaces them is enqueued.
    pub(super) fn set_chosen(&mut self) {
        self.tokens.iter_mut().filter(|token| **token & CHOSEN != 0).for_each(|token| *token = 0);
    }

    /// Returns true if a cache with this number of pages has the slots of the batch.
    pub(super) fn fits(&self, pages: usize) -> bool {
        self.least_pages <= pages
    }

    /// Returns the cache slots of the tokens.
    pub fn slots(&self) -> &SlotMapping {
        &self.slots
    }

    pub(super) fn rotations(&self) -> Result<&RotaryTable> {
        match &self.memory {
            Memory::Host(table) => Ok(table),
            Memory::Device(_) => {
                Err(Error::input("this batch was made for a GPU and is used in host memory"))
            }
        }
    }

    pub(super) fn device(&self) -> Result<&DeviceBatch> {
        match &self.memory {
            Memory::Device(batch) => Ok(batch),
            Memory::Host(_) => Err(Error::input("this batch was made for host memory and is used on a GPU")),
        }
    }
}
