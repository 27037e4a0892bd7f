//! Captures the work that a thread enqueues on a stream into a graph.
//!
//! A capture has a CUDA stream of its own, which replaces the captured stream on the capturing thread. Work that other threads
//! enqueue in the meantime, through this crate or without it, runs as always and cannot become part of the graph.

use cudarc::driver::sys;

use super::captured::{self, Own};
use super::context::driver_call;
use super::error::DeviceError;
use super::graph::Graph;
use super::stream::Stream;
use super::symbols::foreign;

impl Stream {
    /// Records the work that `work` enqueues on this stream, on this thread, into a graph, without running it.
    ///
    /// `work` must not wait for the GPU, nor allocate or free its memory. Other threads may use the stream in the meantime; their
    /// work is not part of the graph. Neither is work that reaches the stream without this crate, unless it uses the
    /// [`handle`](Self::handle) that `work` sees.
    ///
    /// # Errors
    /// Those of `work`, and those of the driver; [`DeviceError::Invalid`] when the stream is being captured already.
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
        let mut capture = Capture::begin(self)?;
        work()?;
        let (graph, code) = capture.end();
        context.check("cuStreamEndCapture", code)?;
        Ok(Graph::instantiate(context, graph)?)
    }
}

/// Any thread may continue to query CUDA: in the stricter modes, queries of events of earlier calls, as profiles and watchdogs make
/// them, end the capture.
const RELAXED: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A capture on this thread. It ends when this is dropped, also when the captured work fails or panics.
struct Capture {
    of: Own,
    /// The replacement stream; `None` once the capture has ended.
    place: Option<Stream>,
}

impl Capture {
    fn begin(stream: &Stream) -> Result<Self, DeviceError> {
        if stream.is_capturing()? {
            return Err(DeviceError::invalid(
                "this stream is already being captured; end that capture first",
            ));
        }
        let (context, of) = (stream.context(), stream.own());
        let place = Stream::new(context)?;
        // SAFETY: the stream lives.
        unsafe { driver_call!(context, cuStreamBeginCapture_v2(place.own().stream, RELAXED)) }?;
        captured::begin(of, place.own().stream);
        Ok(Self { of, place: Some(place) })
    }

    /// Ends the capture. Returns the graph, which is valid if CUDA's code is zero.
    fn end(&mut self) -> (sys::CUgraph, i32) {
        let mut graph = std::ptr::null_mut();
        let Some(place) = self.place.take() else { return (graph, 0) };
        captured::end(self.of);
        let driver = &place.context().driver;
        // SAFETY: the capture was begun on this stream, which lives; the pointer is to a live handle.
        let code = unsafe { foreign!(driver, driver.cuStreamEndCapture(place.own().stream, &raw mut graph)) };
        (graph, code)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let Some(driver) = self.place.as_ref().map(|place| place.context().driver) else { return };
        let (graph, _) = self.end();
        if !graph.is_null() {
            // SAFETY: just made, and used by nothing else.
            let _ = unsafe { foreign!(driver, driver.cuGraphDestroy(graph)) };
        }
    }
}
