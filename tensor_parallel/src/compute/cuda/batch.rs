//! Batches on a GPU: the tokens, slots and rotations that kernels read.

use super::Cuda;
use crate::compute::batch::{Batch, DeviceBatch, SlotMapping};
use crate::error::Result;
use crate::rotary::Rotary;

/// Returns the rotary frequencies of a batch: of all rows, or, if they depend on the length of the sequence, of each run.
fn frequencies(slots: &SlotMapping, rotary: &Rotary) -> Vec<f32> {
    if !rotary.depends_on_length() {
        return rotary.frequencies(1).into_owned();
    }
    slots.runs().iter().flat_map(|run| rotary.frequencies(run.end()).into_owned()).collect()
}

impl Cuda {
    pub(super) fn new_batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        slots.check(tokens.len())?;
        let (rows, half, frequencies) = (tokens.len(), rotary.half(), frequencies(slots, rotary).len());
        let state = self.gpu.scratch((slots.state_words() + rows + frequencies) * size_of::<u32>())?;
        let rotations = self.gpu.scratch(rows * half * 2 * size_of::<f32>())?;
        let mut batch = Batch::on_device(rows, slots, (half, frequencies), DeviceBatch { state, rotations });
        self.set_batch(&mut batch, tokens, slots, rotary)?;
        Ok(batch)
    }

    pub(super) fn set_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        slots.check(tokens.len())?;
        let (rows, half, frequencies) = (tokens.len(), rotary.half(), frequencies(slots, rotary));
        batch.check_update(rows, slots, (half, frequencies.len()))?;
        let parts = slots.parts();
        let mut words = Vec::with_capacity(slots.state_words() + rows + frequencies.len());
        for part in &parts {
            let runs = &slots.runs()[part.runs.clone()];
            let positions = runs.iter().flat_map(|run| run.position..run.end());
            // The capacity, which no position reaches, has been checked.
            words.extend(positions.map(|position| position as u32));
            words.extend_from_slice(slots.tables(part.runs.clone()));
        }
        words.extend_from_slice(tokens);
        words.extend(frequencies.iter().map(|f| f.to_bits()));
        batch.update_device(tokens, slots, |device| {
            device.state.write(bytemuck::cast_slice(&words))?;
            parts.iter().try_for_each(|part| self.kernels.rotations(device, part, (slots, rows), rotary))
        })
    }
}
