//! Work captured in a CUDA graph.

#![expect(unsafe_code, reason = "a graph keeps addresses")]

use std::sync::Arc;

use ryzanstein_process_group::device::Graph;

use crate::error::Result;
use crate::gpu::{self, Gpu};

/// Work that was captured by [`Compute::capture`](crate::Compute::capture).
#[derive(Debug)]
pub struct CapturedGraph {
    // Dropped before the memory whose addresses it contains.
    graph: Graph,
    _memory: Option<gpu::CapturedMemory>,
    gpu: Arc<Gpu>,
}

impl CapturedGraph {
    /// # Safety
    /// The requirements of [`Compute::capture`](crate::Compute::capture).
    pub(super) unsafe fn new(gpu: &Arc<Gpu>, work: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let mut memory = None;
        let capture = || {
            let (captured, outcome) = gpu::CapturedMemory::during(gpu, work)?;
            memory = Some(captured);
            outcome
        };
        // SAFETY: by the caller's promise. Memory that `work` allocates and frees itself stays with the graph; the previous users
        // of that memory have finished with it, in the order of the stream.
        let graph = unsafe { gpu.device.stream().capture(capture) }?;
        tracing::debug!(nodes = graph.nodes(), "recorded a decode pass");
        Ok(Self { graph, _memory: memory, gpu: Arc::clone(gpu) })
    }

    /// Enqueues the work again, as one launch.
    ///
    /// # Errors
    /// Returns an error if the GPU fails.
    pub fn replay(&self) -> Result<()> {
        Ok(self.graph.launch(self.gpu.device.stream())?)
    }
}
