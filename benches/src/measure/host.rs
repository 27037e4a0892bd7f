//! Host memory and clock.

use std::time::Instant;

use bytemuck::{Pod, Zeroable};
use ryzanstein_process_group::{Buffer, BufferMut, DType, Error, ProcessGroup, View, ViewMut, units};

use super::{Bench, Call, CallBuffers, HOST_SLOTS, Sample};

/// Total size of the rotating buffers, so that caches are as cold as in real use.
const ROTATED: usize = 128 << 20;

/// Measures collectives on host memory: each timed call starts after a barrier.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

/// A cache line: the alignment of arrays in tensor libraries, sufficient for every element type.
#[derive(Clone, Copy, Zeroable, Pod, Debug)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Elements of a type known only at run time.
#[derive(Debug)]
pub struct HostBuffer {
    dtype: DType,
    bytes: usize,
    lines: Vec<Line>,
}

impl HostBuffer {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }
}

impl Buffer for HostBuffer {
    fn view(&self) -> View<'_> {
        View::from_bytes(self.dtype, self.bytes())
            .expect("lines are aligned, and whole elements were asked for")
    }
}

impl BufferMut for HostBuffer {
    fn view_mut(&mut self) -> ViewMut<'_> {
        let dtype = self.dtype;
        ViewMut::from_bytes(dtype, self.bytes_mut())
            .expect("lines are aligned, and whole elements were asked for")
    }
}

impl Bench for Host {
    type Memory = HostBuffer;

    fn slots(&self, bytes: usize) -> usize {
        (ROTATED / bytes.max(1)).clamp(1, HOST_SLOTS)
    }

    fn allocate(&mut self, dtype: DType, elements: usize) -> Result<HostBuffer, Error> {
        let bytes = elements * dtype.size();
        let mut lines = Vec::new();
        lines.try_reserve_exact(bytes.div_ceil(size_of::<Line>())).map_err(|_| {
            let size = units::bytes(bytes as f64);
            Error::Configuration(format!(
                "this host does not have {size} of memory for one buffer; measure smaller sizes, or fewer ranks"
            ))
        })?;
        lines.resize(bytes.div_ceil(size_of::<Line>()), Line::zeroed());
        Ok(HostBuffer { dtype, bytes, lines })
    }

    fn write(&mut self, memory: &mut HostBuffer, content: &mut dyn FnMut(&mut [u8])) -> Result<(), Error> {
        content(memory.bytes_mut());
        Ok(())
    }

    fn read(&mut self, memory: &HostBuffer, look: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        look(memory.bytes());
        Ok(())
    }

    fn time(
        &mut self,
        group: &mut ProcessGroup,
        slots: &mut [CallBuffers<HostBuffer>],
        _chain: usize,
        call: Call<'_, HostBuffer>,
    ) -> Result<Vec<Sample>, Error> {
        slots
            .iter_mut()
            .map(|slot| {
                group.barrier()?;
                let started = Instant::now();
                call(group, slot)?;
                let us = started.elapsed().as_secs_f64() * 1e6;
                // A call on host memory returns when it is complete.
                Ok(Sample { latency_us: us, host_us: us })
            })
            .collect()
    }
}
