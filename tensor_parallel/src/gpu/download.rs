//! Copies of a few values to the host, while the GPU goes on.

#![expect(unsafe_code, reason = "copies from GPU memory; each block says why it holds")]

use std::sync::Arc;

use ryzanstein_process_group::DType;
use ryzanstein_process_group::device::{Event, PinnedBuffer};

use super::memory::{DeviceArray, Gpu, lock};
use crate::error::{Error, Result};

/// The minimum size of a pinned buffer.
const BYTES: usize = 4096;

/// Values on their way to the host.
#[derive(Debug)]
pub(crate) struct Download {
    gpu: Arc<Gpu>,
    /// The values' place and the event behind the copy, which return to the GPU's list when this is dropped.
    place: Option<(PinnedBuffer, Event)>,
    bytes: usize,
}

impl Download {
    /// Enqueues a copy of an array of `f32`.
    ///
    /// # Errors
    /// Returns an error if the array has another type or the device fails.
    pub(crate) fn start(array: &DeviceArray) -> Result<Self> {
        let (gpu, bytes) = (array.gpu(), array.count() * size_of::<f32>());
        if array.dtype() != DType::F32 {
            return Err(Error::input(format!(
                "values of {} are not copied while the GPU goes on",
                array.dtype()
            )));
        }
        // A copy that nobody waited for may still be under way.
        let is_free = |(buffer, event): &(PinnedBuffer, Event)| {
            buffer.bytes().len() >= bytes && event.is_done().unwrap_or(false)
        };
        let free = {
            let mut places = lock(&gpu.downloads);
            places.iter().position(is_free).map(|at| places.swap_remove(at))
        };
        let (mut buffer, event) = match free {
            Some(place) => place,
            None => {
                (PinnedBuffer::new(&gpu.device, bytes.max(BYTES))?, Event::new(gpu.device.stream(), false)?)
            }
        };
        // SAFETY: the array has as many bytes, and is written only in the order of the stream. The buffer is read or reused once the
        // event has passed; the driver waits for the copy before the buffer is freed.
        unsafe { gpu.device.stream().copy_to_host(&mut buffer.bytes_mut()[..bytes], array.address()) }?;
        event.record(gpu.device.stream())?;
        Ok(Self { gpu: Arc::clone(gpu), place: Some((buffer, event)), bytes })
    }

    /// Returns the event behind the copy.
    pub(crate) fn event(&self) -> Option<&Event> {
        self.place.as_ref().map(|(_, event)| event)
    }

    /// Returns the values.
    ///
    /// # Errors
    /// Returns an error if the copy has not ended.
    pub(crate) fn values(&self) -> Result<&[f32]> {
        match &self.place {
            Some((buffer, event)) if event.is_done()? => {
                Ok(bytemuck::cast_slice(&buffer.bytes()[..self.bytes]))
            }
            _ => Err(Error::input("values are still being copied from the GPU; wait for them")),
        }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        lock(&self.gpu.downloads).extend(self.place.take());
    }
}
