//! Work recorded into a CUDA graph.

#![expect(unsafe_code, reason = "a graph keeps addresses")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ryzanstein_process_group::device::Graph;

use crate::compute::operations::Recording;
use crate::error::Result;
use crate::gpu::Gpu;

/// A graph, and what it needs to be launched.
#[derive(Debug)]
pub(super) struct Recorded {
    graph: Graph,
    gpu: Arc<Gpu>,
}

impl Recorded {
    /// # Safety
    /// As [`Compute::record`](crate::compute::Compute::record).
    pub(super) unsafe fn new(gpu: &Arc<Gpu>, work: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        // Counted before, so that the pool is not emptied while its addresses go into the graph.
        let held = Held::new(gpu);
        // SAFETY: by the caller's promise; what `work` makes and drops itself goes back to the pool, which stays, and is used
        // in the order of the stream.
        let graph = unsafe { gpu.device.stream().capture(work) }?;
        tracing::debug!(nodes = graph.nodes(), "a decode step is recorded");
        std::mem::forget(held);
        Ok(Self { graph, gpu: Arc::clone(gpu) })
    }
}

impl Recording for Recorded {
    fn replay(&self) -> Result<()> {
        Ok(self.graph.launch(self.gpu.device.stream())?)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.gpu.recordings.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One recording more, until dropped.
struct Held<'a>(&'a Gpu);

impl<'a> Held<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        gpu.recordings.fetch_add(1, Ordering::AcqRel);
        Self(gpu)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.recordings.fetch_sub(1, Ordering::AcqRel);
    }
}
