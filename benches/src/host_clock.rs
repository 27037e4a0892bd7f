//! Measures the host time of calls on GPU memory.

use std::time::Instant;

use crate::measure::{Bench, Call, CallBuffers, Collective, Gpu, Sample};
use ryzanstein_process_group::device::{Device, DeviceBuffer};
use ryzanstein_process_group::{DType, Error, ProcessGroup};

/// Untimed calls on small buffers at the start of each run, because the first calls after a pause find cold caches.
const LEAD_IN: usize = 16;
/// Number of f32 elements of those buffers, per rank.
const SMALL: usize = 64;

/// Times the host only: the time until consecutive calls return.
#[derive(Debug)]
pub struct HostClock {
    gpu: Gpu,
    small: CallBuffers<DeviceBuffer>,
    /// Microseconds of each call so far, in order, warm-up included; `None` for the untimed calls at the start of a run.
    pub calls: Vec<Option<f64>>,
}

impl HostClock {
    /// Creates a clock for calls of this operation in a group of `world_size` ranks on this GPU's stream.
    ///
    /// # Errors
    /// Returns the errors of the GPU.
    pub fn new(device: Device, what: Collective, world_size: usize) -> Result<Self, Error> {
        let zeros = || DeviceBuffer::from_slice(&device, &vec![0f32; SMALL * world_size]);
        let input = what.is_out_of_place().then(zeros).transpose()?;
        let small = CallBuffers { input, buffer: zeros()? };
        Ok(Self { gpu: Gpu::new(device, false), small, calls: Vec::new() })
    }
}

impl Bench for HostClock {
    type Memory = DeviceBuffer;

    fn slots(&self, bytes: usize) -> usize {
        self.gpu.slots(bytes)
    }

    fn checks_in_parallel(&self) -> bool {
        self.gpu.checks_in_parallel()
    }

    fn allocate(&mut self, dtype: DType, elements: usize) -> Result<DeviceBuffer, Error> {
        self.gpu.allocate(dtype, elements)
    }

    fn write(&mut self, memory: &mut DeviceBuffer, content: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        self.gpu.write(memory, content)
    }

    fn read(&mut self, memory: &DeviceBuffer, look: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.gpu.read(memory, look)
    }

    fn time(
        &mut self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<DeviceBuffer>],
        _chain: usize,
        call: Call<'_, DeviceBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        group.barrier()?;
        for _ in 0..LEAD_IN {
            call(group, &mut self.small)?;
            self.calls.push(None);
        }
        let mut samples = Vec::with_capacity(slots.len());
        for slot in slots {
            let started = Instant::now();
            call(group, slot)?;
            let us = started.elapsed().as_secs_f64() * 1e6;
            self.calls.push(Some(us));
            samples.push(Sample { latency_us: us, host_us: us, entered_ns: None });
        }
        group.synchronize()?;
        Ok(samples)
    }
}
