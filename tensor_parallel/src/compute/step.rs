//! One pass over some tokens.

use crate::error::{Error, Result};
use crate::gpu::Block;
use crate::rotary::{Rotary, RotaryTable};

/// The tokens of one pass, their positions and rotations, computed once for all layers and held where they are needed.
#[derive(Debug)]
pub struct Step {
    tokens: Vec<u32>,
    position: usize,
    /// Angles of one position: half the length of a head.
    half: usize,
    memory: Memory,
}

/// What a GPU keeps of a step.
#[derive(Debug)]
pub(super) struct DeviceStep {
    /// Position, tokens, and the rotary frequencies, 32 bits each.
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
    pub(super) fn on_host(tokens: &[u32], position: usize, rotary: &Rotary) -> Self {
        let memory = Memory::Host(rotary.table(position, tokens.len()));
        Self { tokens: tokens.into(), position, half: rotary.frequencies().len(), memory }
    }

    pub(super) fn on_device(tokens: &[u32], position: usize, half: usize, step: DeviceStep) -> Self {
        Self { tokens: tokens.into(), position, half, memory: Memory::Device(step) }
    }

    /// Takes note of other tokens, as many, with as many angles; the device's memory is the caller's to set.
    pub(super) fn replace(&mut self, tokens: &[u32], position: usize, half: usize) -> Result<()> {
        if tokens.len() != self.tokens.len() || half != self.half {
            return Err(Error::input(format!(
                "{} tokens with {half} angles each are put into a step that was made for {} with {}; make a new one",
                tokens.len(),
                self.tokens.len(),
                self.half
            )));
        }
        self.tokens.copy_from_slice(tokens);
        self.position = position;
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

    /// The position of the first.
    pub fn position(&self) -> usize {
        self.position
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
