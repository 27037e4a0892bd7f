//! Work that is repeated.

use std::sync::{Arc, PoisonError};

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
    fn instantiate(context: &Arc<Context>, graph: Handle) -> Result<Self, DeviceError> {
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

impl Stream {
    /// Records what `work` enqueues on this stream into a graph, without doing it.
    ///
    /// `work` must not wait for the GPU, nor allocate or free its memory.
    ///
    /// # Errors
    /// Those of `work`, and those of the driver.
    ///
    /// # Safety
    /// The graph keeps addresses, not buffers: all memory that `work` makes the GPU use must stay allocated, and be used
    /// by nothing else at the same time, whenever the graph is launched. Process groups whose collectives are in it must
    /// not have failed or ended by then, and must outlive it, as must what [`ProcessGroup::record`] gave for them.
    ///
    /// [`ProcessGroup::record`]: crate::ProcessGroup::record
    pub unsafe fn capture<E: From<DeviceError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let context = self.context();
        context.bind()?;
        let capture = Capture::begin(self)?;
        work()?;
        let (graph, code) = capture.end();
        context.check("cuStreamEndCapture", code)?;
        Ok(Graph::instantiate(context, graph)?)
    }
}

/// A stream that is captured until this is dropped: also when what is captured fails or panics.
struct Capture<'a>(Option<&'a Stream>);

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, DeviceError> {
        let mut capturing = stream.capturing().lock().unwrap_or_else(PoisonError::into_inner);
        if *capturing {
            return Err(DeviceError::invalid(
                "a stream is captured that is being captured already; end the first capture before",
            ));
        }
        let context = stream.context();
        // Mode 2, relaxed: events of calls before the capture may be asked for meanwhile, by this thread (whose profile does)
        // and by the watchers' threads; in the stricter modes that ends the capture.
        // SAFETY: the stream lives.
        let code = unsafe { (context.driver.cuStreamBeginCapture_v2)(stream.handle(), 2) };
        context.check("cuStreamBeginCapture", code)?;
        *capturing = true;
        Ok(Self(Some(stream)))
    }

    /// The graph, if CUDA's code is zero.
    fn end(mut self) -> (Handle, i32) {
        self.0.take().map_or((0, 0), finish)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let Some(stream) = self.0.take() else { return };
        let (graph, _) = finish(stream);
        if graph != 0 {
            // SAFETY: just made, and used by nothing else.
            let _ = unsafe { (stream.context().driver.cuGraphDestroy)(graph) };
        }
    }
}

/// Ends the capture of a stream.
fn finish(stream: &Stream) -> (Handle, i32) {
    let mut capturing = stream.capturing().lock().unwrap_or_else(PoisonError::into_inner);
    *capturing = false;
    let mut graph = 0;
    // SAFETY: the capture was begun by this program; the pointer is to a live handle.
    let code = unsafe { (stream.context().driver.cuStreamEndCapture)(stream.handle(), &raw mut graph) };
    (graph, code)
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
