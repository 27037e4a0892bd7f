//! Memory and clock of a GPU.
//!
//! Operands are copied to the GPU before the timed part, and results are copied back and compared after it. Events between the
//! calls in the GPU's stream measure the times, so host time counts only if the GPU waits for it.

use std::time::{Duration, Instant};

use ryzanstein_process_group::device::{Device, DeviceBuffer, DeviceError, Event, PinnedBuffer};
use ryzanstein_process_group::{DType, Error, ProcessGroup};

use super::{Bench, Call, CallBuffers, Sample};

/// Total size of the rotating buffers: several times a GPU's caches.
const ROTATED: usize = 512 << 20;
/// Maximum number of calls in a run, and of chains of calls in a graph.
const MAX_CALLS: usize = 64;
const MAX_CHAINS: usize = 24;

/// Measures back-to-back collectives on GPU memory: one by one, or replayed from a graph.
#[derive(Debug)]
pub struct Gpu {
    device: Device,
    graph: bool,
    /// True once the calls have been made one by one. The backend has then allocated its workspace, which it cannot do during a
    /// capture.
    has_run: bool,
    /// Host memory for copies to and from the GPU.
    staging: Option<PinnedBuffer>,
}

impl Gpu {
    /// Creates a bench for calls on this GPU's stream.
    pub fn new(device: Device, graph: bool) -> Self {
        Self { device, graph, has_run: false, staging: None }
    }

    /// Returns pinned host memory of this length.
    fn staging(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        let staging = match self.staging.take() {
            Some(staging) if staging.bytes().len() >= bytes => staging,
            _ => PinnedBuffer::new(&self.device, bytes)?,
        };
        Ok(&mut self.staging.insert(staging).bytes_mut()[..bytes])
    }

    fn one_by_one(
        &self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<DeviceBuffer>],
        chain: usize,
        call: Call<'_, DeviceBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        let stream = self.device.stream();
        let events: Vec<Event> =
            slots.iter().map(|_| Event::new(stream, true)).collect::<Result<_, DeviceError>>()?;
        let mut host = Vec::with_capacity(slots.len());
        group.barrier()?;
        for (slot, event) in slots.iter_mut().zip(&events) {
            let started = Instant::now();
            for _ in 0..chain {
                call(group, slot)?;
            }
            host.push(micros(started.elapsed()));
            event.record(stream)?;
        }
        group.synchronize()?;
        events
            .windows(2)
            .zip(&host[1..])
            .map(|(pair, host_us)| {
                Ok(Sample { latency_us: micros(pair[1].since(&pair[0])?), host_us: *host_us })
            })
            .collect()
    }

    fn replayed(
        &self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<DeviceBuffer>],
        chain: usize,
        call: Call<'_, DeviceBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        let stream = self.device.stream();
        let (start, end) = (Event::new(stream, true)?, Event::new(stream, true)?);
        #[expect(unsafe_code, reason = "a graph keeps addresses")]
        // SAFETY: the graph is launched once, below, and waited for there, with the slots and the group borrowed.
        let graph = unsafe {
            stream.capture::<Error>(|| {
                for (index, slot) in slots.iter_mut().enumerate() {
                    for _ in 0..chain {
                        call(group, slot)?;
                    }
                    // The clock starts after the untimed call, inside the graph: neither launch nor late ranks count.
                    if index == 0 {
                        start.record_external(stream)?;
                    }
                }
                Ok(end.record_external(stream)?)
            })
        }?;
        group.barrier()?;
        let launched = Instant::now();
        graph.launch(stream)?;
        let host = micros(launched.elapsed());
        group.synchronize()?;
        let timed = ((slots.len() - 1) * chain) as f64;
        let all = (slots.len() * chain) as f64;
        Ok(vec![Sample { latency_us: micros(end.since(&start)?) / timed, host_us: host / all }])
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

impl Bench for Gpu {
    type Memory = DeviceBuffer;

    fn slots(&self, bytes: usize) -> usize {
        (ROTATED / bytes.max(1)).clamp(2, if self.graph { MAX_CHAINS } else { MAX_CALLS })
    }

    fn times_whole_runs(&self) -> bool {
        self.graph
    }

    fn untimed_calls(&self) -> usize {
        1
    }

    fn allocate(&mut self, dtype: DType, elements: usize) -> Result<DeviceBuffer, Error> {
        Ok(DeviceBuffer::new(&self.device, dtype, elements)?)
    }

    fn write(&mut self, memory: &mut DeviceBuffer, content: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        let device = self.device.clone();
        let staging = self.staging(memory.bytes())?;
        content(staging);
        Ok(memory.write_bytes(device.stream(), staging)?)
    }

    fn read(&mut self, memory: &DeviceBuffer, look: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let device = self.device.clone();
        let staging = self.staging(memory.bytes())?;
        memory.read_bytes(device.stream(), staging)?;
        look(staging);
        Ok(())
    }

    fn checks_in_parallel(&self) -> bool {
        true
    }

    fn time(
        &mut self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<DeviceBuffer>],
        chain: usize,
        call: Call<'_, DeviceBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        if self.graph && self.has_run {
            return self.replayed(group, slots, chain, call);
        }
        self.has_run = true;
        self.one_by_one(group, slots, chain, call)
    }
}
