//! A GPU's memory, and the host's clock around each call on it.

use std::time::Instant;

use ryzanstein_orchestrator::measure::{Bench, Call, Gpu, Sample, Slot};
use ryzanstein_process_group::device::{Device, DeviceBuffer};
use ryzanstein_process_group::{DType, Error, ProcessGroup};

/// Calls of a run at least: enough to follow one another, however large they are.
const FEWEST_SLOTS: usize = 10;
/// Calls at the head of a run that do not count: the first behind a pause finds cold caches.
const LEAD_IN: usize = 2;

/// Times the host alone: how long calls take to return that follow one another.
#[derive(Debug)]
pub struct HostClock {
    gpu: Gpu,
    /// The microseconds of each call so far, in their order, those of warm-ups included; none for those at the head of a run.
    pub calls: Vec<Option<f64>>,
}

impl HostClock {
    /// On this GPU, whose stream the group's calls go to.
    pub fn new(device: Device) -> Self {
        Self { gpu: Gpu::new(device, false), calls: Vec::new() }
    }
}

impl Bench for HostClock {
    type Memory = DeviceBuffer;

    fn slots(&self, bytes: usize) -> usize {
        self.gpu.slots(bytes).max(FEWEST_SLOTS)
    }

    fn lead_in(&self) -> usize {
        LEAD_IN
    }

    fn has_processors_to_spare(&self) -> bool {
        self.gpu.has_processors_to_spare()
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
        slots: &mut [Slot<DeviceBuffer>],
        _chain: usize,
        call: Call<'_, DeviceBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        group.barrier()?;
        let mut samples = Vec::with_capacity(slots.len());
        for (index, slot) in slots.iter_mut().enumerate() {
            let started = Instant::now();
            call(group, slot)?;
            let us = started.elapsed().as_secs_f64() * 1e6;
            let counts = index >= LEAD_IN;
            self.calls.push(counts.then_some(us));
            if counts {
                samples.push(Sample { latency_us: us, host_us: us });
            }
        }
        group.synchronize()?;
        Ok(samples)
    }
}
