//! Batches on a GPU: the tokens, slots and rotations that kernels read.

use super::Cuda;
use super::launch::to_u32;
use crate::compute::batch::{Batch, DeviceBatch, SlotMapping};
use crate::error::Result;
use crate::rotary::Rotary;

impl Cuda {
    pub(super) fn new_batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        let (rows, half) = (tokens.len(), rotary.frequencies().len());
        let state = self.gpu.scratch((3 * rows + half) * size_of::<u32>())?;
        let rotations = self.gpu.scratch(rows * half * 2 * size_of::<f32>())?;
        let mut batch = Batch::on_device(rows, slots, half, DeviceBatch { state, rotations });
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
        let (rows, frequencies) = (tokens.len(), rotary.frequencies());
        batch.check_update(rows, slots, frequencies.len())?;
        let parts = slots.parts();
        let places: Vec<_> = slots.slots().collect();
        let mut words = Vec::with_capacity(3 * rows + frequencies.len());
        for part in &parts {
            for (_, position) in &places[part.rows.clone()] {
                words.push(to_u32("positions", *position)?);
            }
            for (sequence, _) in &places[part.rows.clone()] {
                words.push(to_u32("sequences", *sequence)?);
            }
        }
        words.extend_from_slice(tokens);
        words.extend(frequencies.iter().map(|f| f.to_bits()));
        batch.update_device(tokens, slots, |device| {
            device.state.write(bytemuck::cast_slice(&words))?;
            parts.iter().try_for_each(|part| self.kernels.rotations(device, part, rows, frequencies.len()))
        })
    }
}
