//! The tokens of one forward pass, and where they go in the cache.

use std::ops::Range;

use crate::error::{Error, RequestError, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// The cache slots of the tokens of a batch. A slot is a sequence and a position in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotMapping {
    /// Consecutive positions of one sequence.
    Consecutive {
        /// The sequence.
        sequence: usize,
        /// The position of the first token.
        position: usize,
    },
    /// One token for each of several sequences: the sequence, and the token's position there.
    OnePerSequence(Vec<(usize, usize)>),
    /// One token for each of some sequences, then consecutive positions of others.
    Mixed {
        /// The first tokens: the sequence, and the token's position there.
        single: Vec<(usize, usize)>,
        /// The other tokens, sequence by sequence.
        runs: Vec<Run>,
    },
}

/// Consecutive positions of one sequence, among others in a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The sequence.
    pub sequence: usize,
    /// The position of the first token.
    pub position: usize,
    /// Number of tokens.
    pub tokens: usize,
}

/// Rows of a batch that attention can take at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    /// Whether each row is of another sequence; otherwise their positions in one sequence follow each other.
    pub(super) is_single: bool,
}

impl SlotMapping {
    /// Consecutive positions of the first sequence, starting at this one.
    pub const fn from_position(position: usize) -> Self {
        Self::Consecutive { sequence: 0, position }
    }

    /// The sequence and position of a row of the batch.
    pub(crate) fn slot(&self, row: usize) -> (usize, usize) {
        match self {
            Self::Consecutive { sequence, position } => (*sequence, position + row),
            Self::OnePerSequence(slots) => slots[row],
            Self::Mixed { single, runs } => {
                if let Some(slot) = single.get(row) {
                    return *slot;
                }
                let mut row = row - single.len();
                for run in runs {
                    if row < run.tokens {
                        return (run.sequence, run.position + row);
                    }
                    row -= run.tokens;
                }
                panic!("a batch has slots for all its rows")
            }
        }
    }

    /// The parts of a batch of `rows` tokens, in order.
    pub(super) fn parts(&self, rows: usize) -> Vec<Part> {
        match self {
            Self::Consecutive { .. } => vec![Part { rows: 0..rows, is_single: rows == 1 }],
            Self::OnePerSequence(_) => vec![Part { rows: 0..rows, is_single: true }],
            Self::Mixed { single, runs } => {
                let mut parts = vec![Part { rows: 0..single.len(), is_single: true }];
                for run in runs {
                    let start = parts[parts.len() - 1].rows.end;
                    parts.push(Part { rows: start..start + run.tokens, is_single: run.tokens == 1 });
                }
                parts.retain(|part| !part.rows.is_empty());
                parts
            }
        }
    }

    fn check(&self, rows: usize) -> Result<()> {
        let (single, runs): (&[_], &[Run]) = match self {
            Self::OnePerSequence(slots) => (slots, &[]),
            Self::Mixed { single, runs } => (single, runs),
            Self::Consecutive { sequence, position } => {
                (&[], &[Run { sequence: *sequence, position: *position, tokens: rows }])
            }
        };
        for Run { position, tokens, .. } in runs {
            if position.checked_add(*tokens).is_none() {
                return Err(Error::input(format!(
                    "{tokens} tokens from position {position} on cannot be counted"
                )));
            }
        }
        let slots = runs.iter().try_fold(single.len(), |slots, run| slots.checked_add(run.tokens));
        if slots != Some(rows) {
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

    fn same_kind(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Consecutive { .. }, Self::Consecutive { .. })
            | (Self::OnePerSequence(_), Self::OnePerSequence(_)) => true,
            (Self::Mixed { .. }, Self::Mixed { .. }) => self == other,
            _ => false,
        }
    }
}

/// The tokens of one forward pass, their slots and rotations, computed once for all layers and held where they are needed.
#[derive(Debug)]
pub struct Batch {
    /// Empty while the GPU's memory may hold something else.
    tokens: Vec<u32>,
    /// How many tokens there is room for.
    rows: usize,
    slots: SlotMapping,
    /// Angles of one position: half the length of a head.
    half: usize,
    memory: Memory,
}

/// What a GPU keeps of a batch.
#[derive(Debug)]
pub(super) struct DeviceBatch {
    /// Positions and then sequences of each [`Part`], tokens, and the rotary frequencies, 32 bits each.
    pub(super) state: Block,
    /// Sine and cosine of every angle.
    pub(super) rotations: Block,
}

#[derive(Debug)]
enum Memory {
    Host(RotaryTable),
    Device(DeviceBatch),
}

impl Batch {
    pub(super) fn on_host(tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Self> {
        let (rows, half) = (tokens.len(), rotary.frequencies().len());
        slots.check(rows)?;
        let table = rotary.table((0..rows).map(|row| slots.slot(row).1));
        Ok(Self { tokens: tokens.into(), rows, slots: slots.clone(), half, memory: Memory::Host(table) })
    }

    /// A batch for so many tokens in slots of this kind, which [`update_device`](Self::update_device) must set.
    pub(super) fn on_device(rows: usize, slots: &SlotMapping, half: usize, batch: DeviceBatch) -> Self {
        Self { tokens: Vec::new(), rows, slots: slots.clone(), half, memory: Memory::Device(batch) }
    }

    /// Whether other tokens fit: as many, in slots of the same kind, with as many angles.
    pub(super) fn check_update(&self, rows: usize, slots: &SlotMapping, half: usize) -> Result<()> {
        slots.check(rows)?;
        if rows == self.rows && half == self.half && slots.same_kind(&self.slots) {
            return Ok(());
        }
        Err(Error::input(format!(
            "{rows} tokens with {half} angles each, at {slots:?}, do not fit a batch that was made for {} with {}, at {:?}; \
             make a new one",
            self.rows, self.half, self.slots
        )))
    }

    /// Takes tokens and slots that [`check_update`](Self::check_update) let pass, and has `write` put them on the GPU.
    ///
    /// What kernels find there is what was checked here, or the batch has no tokens: they read and write the cache at the
    /// slots that the GPU holds.
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

    /// Whether its angles are those of heads of this length.
    pub(super) fn has_rotations_for(&self, head_dim: usize) -> bool {
        2 * self.half == head_dim
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The cache slots of the tokens.
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
