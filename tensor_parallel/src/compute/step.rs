//! One pass over some tokens.

use crate::error::{Error, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// Where the tokens of a pass go in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Places {
    /// One behind the other, in one sequence.
    Run {
        /// Which.
        sequence: usize,
        /// Of the first.
        position: usize,
    },
    /// One behind each of several sequences: which, and its position there.
    Each(Vec<(usize, usize)>),
}

impl Places {
    /// One behind the other from a position on, in the first sequence.
    pub const fn from(position: usize) -> Self {
        Self::Run { sequence: 0, position }
    }

    /// Sequence and position of a row.
    pub(crate) fn of(&self, row: usize) -> (usize, usize) {
        match self {
            Self::Run { sequence, position } => (*sequence, position + row),
            Self::Each(places) => places[row],
        }
    }

    fn check(&self, rows: usize) -> Result<()> {
        let Self::Each(places) = self else { return Ok(()) };
        if places.len() != rows {
            return Err(Error::input(format!("{rows} tokens cannot go to {} places", places.len())));
        }
        let mut sequences: Vec<usize> = places.iter().map(|(sequence, _)| *sequence).collect();
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
        matches!((self, other), (Self::Run { .. }, Self::Run { .. }) | (Self::Each(_), Self::Each(_)))
    }
}

/// The tokens of one pass, their places and rotations, computed once for all layers and held where they are needed.
#[derive(Debug)]
pub struct Step {
    tokens: Vec<u32>,
    places: Places,
    /// Angles of one position: half the length of a head.
    half: usize,
    memory: Memory,
}

/// What a GPU keeps of a step.
#[derive(Debug)]
pub(super) struct DeviceStep {
    /// Positions, sequences, tokens, and the rotary frequencies, 32 bits each.
    pub(super) state: Block,
    /// Sine and cosine of every angle.
    pub(super) rotations: Block,
}

#[derive(Debug)]
enum Memory {
    Host(RotaryTable),
    Device(DeviceStep),
}

impl Step {
    pub(super) fn on_host(tokens: &[u32], places: &Places, rotary: &Rotary) -> Result<Self> {
        places.check(tokens.len())?;
        let table = rotary.table((0..tokens.len()).map(|row| places.of(row).1));
        let memory = Memory::Host(table);
        Ok(Self { tokens: tokens.into(), places: places.clone(), half: rotary.frequencies().len(), memory })
    }

    pub(super) fn on_device(tokens: &[u32], places: &Places, half: usize, step: DeviceStep) -> Result<Self> {
        places.check(tokens.len())?;
        Ok(Self { tokens: tokens.into(), places: places.clone(), half, memory: Memory::Device(step) })
    }

    /// Takes note of other tokens, as many, placed alike, with as many angles; the device's memory is the caller's to set.
    pub(super) fn replace(&mut self, tokens: &[u32], places: &Places, half: usize) -> Result<()> {
        places.check(tokens.len())?;
        if tokens.len() != self.tokens.len() || half != self.half || !places.is_like(&self.places) {
            return Err(Error::input(format!(
                "{} tokens with {half} angles each, at {places:?}, are put into a step that was made for {} with {}, at {:?}; \
                 make a new one",
                tokens.len(),
                self.tokens.len(),
                self.half,
                self.places
            )));
        }
        self.tokens.copy_from_slice(tokens);
        self.places = places.clone();
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
    pub fn places(&self) -> &Places {
        &self.places
    }

    pub(super) fn rotations(&self) -> Result<&RotaryTable> {
        match &self.memory {
            Memory::Host(table) => Ok(table),
            Memory::Device(_) => Err(Error::input("this step was made for a GPU and is used in host memory")),
        }
    }

    pub(super) fn device(&self) -> Result<&DeviceStep> {
        match &self.memory {
            Memory::Device(step) => Ok(step),
            Memory::Host(_) => Err(Error::input("this step was made for host memory and is used on a GPU")),
        }
    }

    pub(super) fn device_mut(&mut self) -> Result<&mut DeviceStep> {
        match &mut self.memory {
            Memory::Device(step) => Ok(step),
            Memory::Host(_) => Err(Error::input("this step was made for host memory and is used on a GPU")),
        }
    }
}
