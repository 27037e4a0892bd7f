//! Work recorded into a CUDA graph.

#![expect(unsafe_code, reason = "a graph keeps addresses")]

use std::sync::Arc;

use ryzanstein_process_group::device::Graph;

use crate::compute::operations::Recording;
use crate::error::Result;
use crate::gpu::{self, Gpu};

/// A graph, and what it needs to be launched.
#[derive(Debug)]
pub(super) struct Recorded {
    // Before the memory whose addresses it holds.
    graph: Graph,
    _memory: gpu::Recorded,
    gpu: Arc<Gpu>,
}

impl Recorded {
    /// # Safety
    /// As [`Compute::record`](crate::compute::Compute::record).
    pub(super) unsafe fn new(gpu: &Arc<Gpu>, work: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let (memory, graph) = gpu::Recorded::during(gpu, || {
            // SAFETY: by the caller's promise; what `work` makes and drops itself stays with the graph, and whatever else
            // had it before is done with it in the order of the stream.
            unsafe { gpu.device.stream().capture(work) }
        })?;
        let graph = graph?;
        tracing::debug!(nodes = graph.nodes(), "a decode step is recorded");
        Ok(Self { graph, _memory: memory, gpu: Arc::clone(gpu) })
    }
}

impl Recording for Recorded {
    fn replay(&self) -> Result<()> {
        Ok(self.graph.launch(self.gpu.device.stream())?)
    }
}
