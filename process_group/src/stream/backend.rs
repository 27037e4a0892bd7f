//! The interface of a group to a backend whose calls run on streams of a GPU.

use std::sync::Arc;
use std::time::Instant;

use super::capture::StreamCapture;
use super::watchdog::Watchdog;
use crate::backend::call::Call;
use crate::backend::timings::Timings;
use crate::backend::{Backend, Completion};
use crate::device::Device;
use crate::error::Result;

/// A backend whose calls are enqueued on streams of a GPU: [`Backend::submit`] uses the device's compute stream.
pub(crate) trait StreamBackend: Backend {
    /// Returns the GPU whose memory contains the buffers of calls.
    fn device(&self) -> &Device;

    /// Begins a call on a second stream, after the earlier work of the compute stream and in parallel with its later work.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn StreamWork>)>;

    /// Executes several calls, which the backend may combine; each gets a completion.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn group(&mut self, calls: Vec<Call<'_>>, deadline: Instant) -> Result<Vec<Completion>>;

    /// Captures the following calls into a graph, with events around some of them if it is timed.
    fn begin_capture(&mut self, is_timed: bool);

    /// Ends the capture, and returns the data with which the graph's launches are watched.
    fn end_capture(&mut self) -> Arc<StreamCapture>;

    /// Watches a graph with captured calls. `launch` launches it on the compute stream, or reports that it could not.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn replay(
        &mut self,
        captured: &Arc<StreamCapture>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()>;

    /// Waits until every enqueued call is done, at most until the deadline.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn synchronize(&mut self, deadline: Instant) -> Result<()>;

    /// Returns the watchdog of the group.
    fn watchdog(&self) -> &Watchdog;

    /// Returns the source of the times of enqueued calls.
    fn timings(&self) -> Arc<dyn Timings>;

    /// Returns the bandwidth of this rank's links in one direction, in 10⁹ bytes per second, if the hardware is rated.
    fn link_gbs(&self) -> Option<f64>;
}

/// A call that has been started on a stream of its own.
pub(crate) trait StreamWork: Send {
    /// Waits until it is done, at most until the call's deadline.
    ///
    /// # Errors
    /// Those of the call.
    fn wait(&mut self) -> Result<()>;

    /// Returns an error if the call has failed so far.
    ///
    /// # Errors
    /// Those of the call.
    fn check(&self) -> Result<()>;

    /// Makes the compute stream wait for its end, in any outcome; returns at once.
    ///
    /// # Errors
    /// Those of the GPU.
    fn join(&mut self) -> Result<()>;
}
