//! Work that is repeated.

use std::sync::Arc;

use super::context::Context;
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::Handle;

/// Work recorded by [`Stream::capture`], to be done any number of times at the price of one launch.
pub struct Graph {
    context: Arc<Context>,
    executable: Handle,
    nodes: usize,
}

impl Graph {
    pub(super) fn instantiate(context: &Arc<Context>, graph: Handle) -> Result<Self, DeviceError> {
        let (mut executable, mut nodes) = (0, 0);
        // SAFETY: the graph is live; a null list asks for the number alone.
        let counted =
            unsafe { (context.driver.cuGraphGetNodes)(graph, std::ptr::null_mut(), &raw mut nodes) };
        // SAFETY: the graph is live, the pointer is to a live handle.
        let code = unsafe { (context.driver.cuGraphInstantiateWithFlags)(&raw mut executable, graph, 0) };
        // SAFETY: the executable does not need the graph any more, and nothing else knows it.
        let _ = unsafe { (context.driver.cuGraphDestroy)(graph) };
        context.check("cuGraphInstantiate", code)?;
        context.check("cuGraphGetNodes", counted)?;
        Ok(Self { context: Arc::clone(context), executable, nodes })
    }

    /// How many operations it has.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it on a stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: executable and stream live. That the recorded addresses still are is promised by whoever captured.
        let code = unsafe { (self.context.driver.cuGraphLaunch)(self.executable, stream.handle()) };
        self.context.check("cuGraphLaunch", code)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `instantiate`, destroyed once; a launch under way is finished by the driver.
            let _ = unsafe { (self.context.driver.cuGraphExecDestroy)(self.executable) };
        }
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes)", self.nodes)
    }
}
