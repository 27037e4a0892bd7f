//! Work that is repeated.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::Context;
use super::error::DeviceError;
use super::stream::Stream;
use super::symbols::foreign;
use super::turns::Turn;

/// Work recorded by [`Stream::capture`], to be done any number of times at the price of one launch.
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
    fn instantiate(context: &Arc<Context>, graph: sys::CUgraph) -> Result<Self, DeviceError> {
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

    /// How many operations it has.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Enqueues all of it on a stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        let _turn = stream.turn();
        self.context.bind()?;
        let _one_at_a_time = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: executable and stream live. That the recorded addresses still are is promised by whoever captured.
        let code =
            unsafe { foreign!(driver, self.context.driver.cuGraphLaunch(self.executable, stream.handle())) };
        self.context.check("cuGraphLaunch", code)
    }
}

impl Stream {
    /// Records what `work` enqueues on this stream into a graph, without doing it.
    ///
    /// `work` must not wait for the GPU, nor allocate or free its memory. Another thread that enqueues on the stream waits until
    /// the capture has ended, so `work` must not wait for one. What goes to the stream past this crate does not wait.
    ///
    /// # Errors
    /// Those of `work`, and those of the driver.
    ///
    /// # Safety
    /// The graph keeps addresses, not buffers: all memory that `work` makes the GPU use must stay allocated, and be used
    /// by nothing else at the same time, whenever the graph is launched. Process groups whose collectives are in it must
    /// not have failed or ended by then, and must outlive it, as must what [`ProcessGroup::capture`] gave for them.
    ///
    /// [`ProcessGroup::capture`]: crate::ProcessGroup::capture
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

const RELAXED: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A stream that is captured until this is dropped: also when what is captured fails or panics.
struct Capture<'a> {
    stream: Option<&'a Stream>,
    /// Ends with the capture.
    _turn: Turn<'a>,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, DeviceError> {
        let turn = stream.turns().capture().ok_or_else(|| {
            DeviceError::invalid(
                "a stream is captured that is being captured already; end the first capture before",
            )
        })?;
        let context = stream.context();
        // Relaxed: events of calls before the capture may be asked for meanwhile, by this thread (whose profile does)
        // and by the watchers' threads; in the stricter modes that ends the capture.
        // SAFETY: the stream lives.
        let code =
            unsafe { foreign!(driver, context.driver.cuStreamBeginCapture_v2(stream.handle(), RELAXED)) };
        context.check("cuStreamBeginCapture", code)?;
        Ok(Self { stream: Some(stream), _turn: turn })
    }

    /// The graph, if CUDA's code is zero.
    fn end(mut self) -> (sys::CUgraph, i32) {
        self.stream.take().map_or((std::ptr::null_mut(), 0), finish)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        let (graph, _) = finish(stream);
        if !graph.is_null() {
            let driver = &stream.context().driver;
            // SAFETY: just made, and used by nothing else.
            let _ = unsafe { foreign!(driver, driver.cuGraphDestroy(graph)) };
        }
    }
}

/// Ends the capture of a stream.
fn finish(stream: &Stream) -> (sys::CUgraph, i32) {
    let mut graph = std::ptr::null_mut();
    let driver = &stream.context().driver;
    // SAFETY: the capture was begun by this program; the pointer is to a live handle.
    let code = unsafe { foreign!(driver, driver.cuStreamEndCapture(stream.handle(), &raw mut graph)) };
    (graph, code)
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
