//! One pass over some tokens.

use crate::error::{Error, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// Where the tokens of a pass go in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlotMapping {
    /// One behind the other, in one sequence.
    Consecutive {
        /// Which.
        sequence: usize,
        /// Of the first.
        position: usize,
    },
    /// One behind each of several sequences: which, and its position there.
    OnePerSequence(Vec<(usize, usize)>),
}

impl SlotMapping {
    /// One behind the other from a position on, in the first sequence.
    pub const fn from_position(position: usize) -> Self {
        Self::Consecutive { sequence: 0, position }
    }

    /// Sequence and position of a row.
    pub(crate) fn slot(&self, row: usize) -> (usize, usize) {
        match self {
            Self::Consecutive { sequence, position } => (*sequence, position + row),
            Self::OnePerSequence(slots) => slots[row],
        }
    }

    fn check(&self, rows: usize) -> Result<()> {
        let Self::OnePerSequence(slots) = self else { return Ok(()) };
        if slots.len() != rows {
            return Err(Error::input(format!("{rows} tokens cannot go to {} slots", slots.len())));
        }
        let mut sequences: Vec<usize> = slots.iter().map(|(sequence, _)| *sequence).collect();
        sequences.sort_unstable();
        let twice = sequences.windows(2).find_map(|pair| (pair[0] == pair[1]).then_some(pair[0]));
        if let Some(sequence) = twice {
            return Err(Error::input(format!(
                "sequence {sequence} is to get two tokens in one pass over several; give it one a pass"
            )));
        }
        Ok(())
    }

    fn is_like(&self, other: &Self) -> bool {
        matches!(
            (self, other),
            (Self::Consecutive { .. }, Self::Consecutive { .. })
                | (Self::OnePerSequence(_), Self::OnePerSequence(_))
        )
    }
}

/// The tokens of one pass, their slots and rotations, computed once for all layers and held where they are needed.
#[derive(Debug)]
pub struct Batch {
    tokens: Vec<u32>,
    slots: SlotMapping,
    /// Angles of one position: half the length of a head.
    half: usize,
    memory: Memory,
}

/// What a GPU keeps of a batch.
#[derive(Debug)]
pub(super) struct DeviceBatch {
    /// Positions, sequences, tokens, and the rotary frequencies, 32 bits each.
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
        slots.check(tokens.len())?;
        let table = rotary.table((0..tokens.len()).map(|row| slots.slot(row).1));
        let memory = Memory::Host(table);
        Ok(Self { tokens: tokens.into(), slots: slots.clone(), half: rotary.frequencies().len(), memory })
    }

    pub(super) fn on_device(
        tokens: &[u32],
        slots: &SlotMapping,
        half: usize,
        batch: DeviceBatch,
    ) -> Result<Self> {
        slots.check(tokens.len())?;
        Ok(Self { tokens: tokens.into(), slots: slots.clone(), half, memory: Memory::Device(batch) })
    }

    /// Takes note of other tokens, as many, placed alike, with as many angles; the device's memory is the caller's to set.
    pub(super) fn replace(&mut self, tokens: &[u32], slots: &SlotMapping, half: usize) -> Result<()> {
        slots.check(tokens.len())?;
        if tokens.len() != self.tokens.len() || half != self.half || !slots.is_like(&self.slots) {
            return Err(Error::input(format!(
                "{} tokens with {half} angles each, at {slots:?}, are put into a batch that was made for {} with {}, at {:?}; \
                 make a new one",
                tokens.len(),
                self.tokens.len(),
                self.half,
                self.slots
            )));
        }
        self.tokens.copy_from_slice(tokens);
        self.slots = slots.clone();
        Ok(())
    }

    /// Whether its angles are those of heads of this length.
    pub(super) fn rotates(&self, head_dim: usize) -> bool {
        2 * self.half == head_dim
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where they go.
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

    pub(super) fn device_mut(&mut self) -> Result<&mut DeviceBatch> {
        match &mut self.memory {
            Memory::Device(batch) => Ok(batch),
            Memory::Host(_) => Err(Error::input("this batch was made for host memory and is used on a GPU")),
        }
    }
}
