//! What a group asks of a backend whose calls run on streams of a GPU.

use std::sync::Arc;
use std::time::Instant;

use super::capture::StreamCapture;
use super::watchdog::Watchdog;
use crate::backend::call::Call;
use crate::backend::timings::Timings;
use crate::backend::{Backend, Completion};
use crate::device::Device;
use crate::error::Result;

/// A backend whose calls are enqueued on streams of a GPU: [`Backend::submit`] on the device's compute stream.
pub(crate) trait StreamBackend: Backend {
    /// The GPU whose memory the buffers of calls are in.
    fn device(&self) -> &Device;

    /// Begins a call on a second stream, behind what the compute stream has been given and beside what it will be given.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn start(&mut self, call: Call<'_>) -> Result<(Completion, Box<dyn StreamWork>)>;

    /// Does several calls, which the backend may take together; each gets a completion.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn group(&mut self, calls: Vec<Call<'_>>, deadline: Instant) -> Result<Vec<Completion>>;

    /// From here on, calls are captured into a graph.
    fn begin_capture(&mut self);

    /// Ends that, and returns what is needed to watch the graph's launches.
    fn end_capture(&mut self) -> Arc<StreamCapture>;

    /// Watches a graph with captured calls, which `launch` launches on the compute stream, or says that it could not.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn replay(
        &mut self,
        captured: &Arc<StreamCapture>,
        deadline: Instant,
        launch: &mut dyn FnMut() -> bool,
    ) -> Result<()>;

    /// Waits until every call that was enqueued is done, at most until the deadline.
    ///
    /// # Errors
    /// As [`submit`](Backend::submit).
    fn synchronize(&mut self, deadline: Instant) -> Result<()>;

    /// What watches the group.
    fn watchdog(&self) -> &Watchdog;

    /// Where the times of enqueued calls come from.
    fn timings(&self) -> Arc<dyn Timings>;

    /// What this rank's links carry in one direction, in 10⁹ bytes per second, where the hardware is rated.
    fn link_gbs(&self) -> Option<f64>;
}

/// A call that has been started on a stream of its own.
pub(crate) trait StreamWork: Send {
    /// Waits until it is done, at most until the call's deadline.
    ///
    /// # Errors
    /// Those of the call.
    fn wait(&mut self) -> Result<()>;

    /// Errors if the call has failed so far.
    ///
    /// # Errors
    /// Those of the call.
    fn check(&self) -> Result<()>;

    /// Makes the compute stream wait for its end, however it ends; returns at once.
    ///
    /// # Errors
    /// Those of the GPU.
    fn join(&mut self) -> Result<()>;
}
