//! Repeatable work.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys;

use super::context::{Context, driver_call};
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::foreign;
use crate::types::sync::lock;

/// Work recorded by [`Stream::capture`], which can be repeated any number of times, each at the cost of one launch.
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
    launching: Mutex<()>,
    nodes: usize,
}

// SAFETY: a handle that any thread may use.
unsafe impl Send for Graph {}
// SAFETY: all that it can do when shared is to be launched, which is locked: CUDA does not synchronise that.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn instantiate(context: &Arc<Context>, graph: sys::CUgraph) -> Result<Self, DeviceError> {
        let (mut executable, mut nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: the graph is live; a null list asks for the number alone.
        let counted = unsafe {
            foreign!(driver, context.driver.cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes))
        };
        // SAFETY: the graph is live, the pointer is to a live handle.
        let code = unsafe {
            foreign!(driver, context.driver.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0))
        };
        // SAFETY: the executable does not need the graph any more, and nothing else knows it.
        let _ = unsafe { foreign!(driver, context.driver.cuGraphDestroy(graph)) };
        context.check("cuGraphInstantiate", code)?;
        context.check("cuGraphGetNodes", counted)?;
        Ok(Self { context: Arc::clone(context), executable, launching: Mutex::default(), nodes })
    }

    /// Returns the number of operations.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it on a stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        let _one_at_a_time = lock(&self.launching);
        // SAFETY: executable and stream live. That the recorded addresses still are is promised by whoever captured.
        unsafe { driver_call!(self.context, cuGraphLaunch(self.executable, stream.handle())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `instantiate`, destroyed once; a launch under way is finished by the driver.
            let _ = unsafe { foreign!(driver, self.context.driver.cuGraphExecDestroy(self.executable)) };
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes)", self.nodes)
    }
}
