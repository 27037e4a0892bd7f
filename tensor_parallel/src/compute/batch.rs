//! The tokens of one forward pass and their slots in the cache.

use std::ops::Range;

use crate::error::{Error, RequestError, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// The cache slots of the tokens of a batch: first single tokens, each of its own sequence, then runs of consecutive positions of
/// other sequences.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SlotMapping {
    /// The slots of the single tokens, each a sequence and a position in it.
    pub single: Vec<(usize, usize)>,
    /// The slots of the other tokens, sequence by sequence.
    pub runs: Vec<Run>,
}

/// Consecutive positions of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The sequence.
    pub sequence: usize,
    /// The position of the first token.
    pub position: usize,
    /// Number of tokens.
    pub tokens: usize,
}

/// Rows of a batch that attention can process at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    /// True if each row belongs to a different sequence; otherwise the rows are consecutive positions of one sequence.
    pub(super) is_single: bool,
}

impl From<Run> for SlotMapping {
    fn from(run: Run) -> Self {
        Self { single: Vec::new(), runs: vec![run] }
    }
}

impl SlotMapping {
    /// Creates the slots of `tokens` positions of the first sequence, from `position` on.
    pub fn from_position(position: usize, tokens: usize) -> Self {
        Run { sequence: 0, position, tokens }.into()
    }

    /// Iterates over the sequence and position of each row of the batch.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_run = |run: &Run| {
            let &Run { sequence, position, tokens } = run;
            (position..position + tokens).map(move |position| (sequence, position))
        };
        self.single.iter().copied().chain(self.runs.iter().flat_map(of_run))
    }

    /// Iterates over the sequence of each single token and run, and its number of positions afterwards.
    pub(crate) fn ends(&self) -> impl Iterator<Item = (usize, usize)> {
        let singles = self.single.iter().map(|(sequence, position)| (*sequence, position + 1));
        singles.chain(self.runs.iter().map(|run| (run.sequence, run.position + run.tokens)))
    }

    /// Iterates over the position of each row of the batch, and the length of its sequence after the pass.
    pub(super) fn positions(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_run = |run: &Run| {
            let &Run { position, tokens, .. } = run;
            (position..position + tokens).map(move |at| (at, position + tokens))
        };
        let singles = self.single.iter().map(|(_, position)| (*position, position + 1));
        singles.chain(self.runs.iter().flat_map(of_run))
    }

    /// Returns the parts of a batch, in order.
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut parts = vec![Part { rows: 0..self.single.len(), is_single: true }];
        for run in &self.runs {
            let start = parts[parts.len() - 1].rows.end;
            parts.push(Part { rows: start..start + run.tokens, is_single: run.tokens == 1 });
        }
        parts.retain(|part| !part.rows.is_empty());
        parts
    }

    /// Returns an error if the slots are not those of `rows` tokens.
    pub(crate) fn check(&self, rows: usize) -> Result<()> {
        let Self { single, runs } = self;
        let countable = single.iter().all(|(_, position)| *position < usize::MAX)
            && runs.iter().all(|run| run.position.checked_add(run.tokens).is_some());
        let slots = runs.iter().try_fold(single.len(), |slots, run| slots.checked_add(run.tokens));
        if !countable || slots != Some(rows) {
            return Err(Error::input(format!("{rows} tokens cannot go to the slots {self:?}")));
        }
        let mut sequences: Vec<usize> = single.iter().map(|(sequence, _)| *sequence).collect();
        sequences.extend(runs.iter().map(|run| run.sequence));
        sequences.sort_unstable();
        let twice = sequences.windows(2).find_map(|pair| (pair[0] == pair[1]).then_some(pair[0]));
        if let Some(sequence) = twice {
            return Err(RequestError::RepeatedSequence { sequence }.into());
        }
        Ok(())
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
    /// Number of angles of one position: half the length of a head.
    half: usize,
    /// Number of rotary frequencies that the memory of the GPU has room for.
    frequencies: usize,
    memory: Memory,
}

/// The part of a batch in a GPU's memory.
#[derive(Debug)]
pub(super) struct DeviceBatch {
    /// Positions and then sequences of each [`Part`], tokens, and the rotary frequencies, 32 bits each: those of all rows, or, if
    /// they depend on the length of the sequence, of each single token and run.
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
        Ok(Self { tokens: tokens.into(), rows, slots: slots.clone(), half, frequencies: 0, memory })
    }

    /// Creates a batch for `rows` tokens in slots like these, which [`update_device`](Self::update_device) must set.
    pub(super) fn on_device(
        rows: usize,
        slots: &SlotMapping,
        (half, frequencies): (usize, usize),
        batch: DeviceBatch,
    ) -> Self {
        let memory = Memory::Device(batch);
        Self { tokens: Vec::new(), rows, slots: slots.clone(), half, frequencies, memory }
    }

    /// Returns an error if number, parts, angles or frequencies of the tokens differ from those that the batch was created for.
    pub(super) fn check_update(
        &self,
        rows: usize,
        slots: &SlotMapping,
        (half, frequencies): (usize, usize),
    ) -> Result<()> {
        slots.check(rows)?;
        let same = (rows, half, frequencies) == (self.rows, self.half, self.frequencies);
        if same && slots.parts() == self.slots.parts() {
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
        self.slots = slots.clone();
        Ok(())
    }

    /// Returns true if the rotations are for heads of this length.
    pub(super) fn has_rotations_for(&self, head_dim: usize) -> bool {
        2 * self.half == head_dim
    }

    /// Returns the tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
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
